from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.system import limits
from tests.commands import environment, latest
from tests.environment.confined import QUICK, as_somebody_else, limited

PACKAGE = Path(fedsim.__file__).parent
SPAWN = [*QUICK, "engine=processes", "workers=6", "rounds=1", "records.curve=false", "-q"]


def run(*words, before=(), cwd, **most):
    """Run `fedsim *words` under resource limits, such as RLIMIT_NOFILE=(soft, hard)."""

    def limit():
        for name, pair in most.items():
            resource.setrlimit(getattr(resource, name), pair)

    command = [*before, sys.executable, "-m", "fedsim", *latest(words)]
    options = {"capture_output": True, "text": True, "timeout": 120, "preexec_fn": limit}
    return subprocess.run(command, cwd=cwd, env=environment(PYTHONDONTWRITEBYTECODE="1"), **options)


def test_too_few_files_are_reported_before_any_process_starts(cli, monkeypatch):
    monkeypatch.setattr(limits, "limits_of_files", lambda: (30, 30))
    refused = cli("run", *SPAWN, "processes=6", "--out", "x")
    message = (
        r"error: processes = 6: starting them takes about \d+ open files, but the limit is 30 \(RLIMIT_NOFILE\); "
        r"raise the limit \(ulimit -n \d+\), use fewer processes, or engine=serial, which starts no processes\n"
    )
    assert refused.exit_code == 1
    assert re.fullmatch(message, refused.stderr), refused.stderr
    assert not Path("x").exists()


@pytest.mark.slow
def test_as_many_files_as_the_error_asks_for_are_enough_as_a_hard_limit(tmp_path):
    words = [*SPAWN, "workers=12", "processes=12"]
    refused = run("run", *words, "--out", "x", cwd=tmp_path, RLIMIT_NOFILE=(30, 30))
    enough = int(re.search(r"ulimit -n (\d+)", refused.stderr)[1])
    for name, further in (("rounds", []), ("race", ["mode=race", "policy=hogwild", "race.runs=2"])):
        done = run("run", *words, *further, "--out", name, cwd=tmp_path, RLIMIT_NOFILE=(30, enough))
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_too_few_processes_give_a_one_line_error(tmp_path):
    tmp_path.chmod(0o777)
    before = as_somebody_else()
    words = [*SPAWN, "processes=4", "--out", "x"]
    if os.geteuid():
        pytest.skip("needs root, to become a user without processes")
    done = run("run", *words, before=["prlimit", "--nproc=3", *before], cwd=tmp_path)
    message = (
        "error: a process cannot be started: Resource temporarily unavailable; this user may have at most 3 "
        "processes and threads (ulimit -u raises this limit); use fewer processes\n"
    )
    assert (done.returncode, done.stderr) == (1, message)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied"),
        (OSError("something of a library's"), "OSError: something of a library's"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "memory ran out (DefaultCPUAllocator: "),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("a mistake"), None),
        (ZeroDivisionError(), None),
    ],
)
def test_errors_of_the_system_are_described_in_one_line(error, line):
    told = limits.describe_os_error(error)
    assert told is None if line is None else told.startswith(line)


def test_a_limit_is_reported_with_its_value():
    with limited(resource.RLIMIT_NOFILE, 333):
        too_many = OSError(errno.EMFILE, "Too many open files")
        assert limits.limit_hint(too_many) == "; this process may open at most 333 files (ulimit -n raises this limit)"
    assert limits.limit_hint(OSError(errno.ENOENT, "No such file")) == ""


def test_an_unexpected_error_of_the_system_gives_a_one_line_error(cli, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", "/some/where")

    monkeypatch.setattr(fedsim, "run", refuse)
    result = cli("run", *QUICK)
    assert (result.exit_code, result.stderr) == (1, "error: /some/where: Input/output error\n")


@pytest.mark.parametrize(
    ("file", "is_of_user"),
    [(f"{PACKAGE}_components.py", True), (PACKAGE / "models.py", False), (pytest.__file__, False)],
)
def test_a_file_beside_the_package_is_of_the_user(file, is_of_user):
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", str(file), "exec"))
    caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test's own frame
    assert bool(limits.frames_of_user(caught.value)) == is_of_user
