"""Restricted environments: file systems of a few kilobytes, resource limits, and users without rights."""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.commands import environment, latest

NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])  # the second one works without root
NOBODY = 64_999  # ID of a user without processes

QUICK = ["data=tests.components:tiny", "engine=serial", "model=logistic", "local.batch_size=16", "workers=3"]
QUICK += ["checkpoint.every=0"]


@functools.cache
def _namespace():
    """Return the command prefix that gives a process its own mounts, or None if the system does not allow that."""
    for prefix in NAMESPACES:
        with contextlib.suppress(OSError):
            mount = [*prefix, "sh", "-c", "mount -t tmpfs -o size=4k none /mnt"]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                return prefix
    return None


def outcomes(*commands, mounts, cwd):
    """Return the outcomes of command lines, run in one process after mounting file systems (folder, options).

    A string among the commands is run by a shell (for example another mount) and has no outcome.
    """
    prefix = _namespace()
    if prefix is None:
        pytest.skip("needs a mount namespace (unshare --mount), which this system does not allow")
    for folder, _ in mounts:
        folder.mkdir(exist_ok=True)
    command_lines = [each if isinstance(each, str) else list(map(str, latest(each))) for each in commands]
    script = [f"mount -t tmpfs -o {options} none {shlex.quote(str(folder))}" for folder, options in mounts]
    script.append(shlex.join([sys.executable, "-m", "tests.environment.probe", json.dumps(command_lines)]))
    done = subprocess.run(
        [*prefix, "sh", "-ec", "\n".join(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def limited(which, most):
    """Set a soft resource limit of this process until the block ends."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def as_somebody_else():
    """Return the command prefix that runs a process as another user, who may only read and write files."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    privileges = "-all,+dac_override"
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    words += [f"--inh-caps={privileges}", f"--ambient-caps={privileges}", f"--bounding-set={privileges}"]
    if subprocess.run([*words, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("needs the right to become another user (run as root)")
    return words
