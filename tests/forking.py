"""Fork test processes from one server that has already imported fedsim.

Importing PyTorch takes a spawned process two seconds, while a fork of the server takes milliseconds. The server is
spawned and has computed nothing, so its forks are in the state of a spawned process after its imports.

`fork_workers` makes fedsim fork its processes instead of spawning them. `Program` is a forked Python program. A few
tests still start and spawn real interpreters with `tests.commands.start_python`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import forkserver, process
from multiprocessing.reduction import DupFd
from pathlib import Path

from fedsim.processes import child_process

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("tests.forking", "tests.models", "tests.components"),
    *("fedsim.comparison", "fedsim.cli.main", "matplotlib.figure", "pytest"),
    *("dp_accounting.mechanism_calibration", "dp_accounting.pld", "dp_accounting.rdp"),  # imports of a second
    "torch._dynamo",  # some PyTorch functions import this on first use, which takes a second
]


def fork_workers():
    """Make fedsim fork its processes from the server, which starts with the first process."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    child_process.get_context = lambda method: (
        ForkingContext if method == "spawn" else multiprocessing.get_context(method)
    )
    os.register_at_fork(after_in_child=_use_running_server)


def _use_running_server():
    """Let this process use the server that its parent has started, and not wait for it as for a child of its own."""
    if forkserver._forkserver._forkserver_pid is not None:
        forkserver._forkserver.ensure_running = lambda: None


class ForkingContext:
    """The part of a multiprocessing context that fedsim uses."""

    Pipe = CONTEXT.Pipe

    @staticmethod
    def Process(target, args, **options):  # noqa: N802  # multiprocessing's name
        surroundings = dict(os.environ), os.getpgrp(), os.sched_getaffinity(0)
        return CONTEXT.Process(target=_work, args=(surroundings, target, *args), **options)


class Program:
    """A forked `python *words` in its own process group, with the `subprocess.Popen` methods that tests use."""

    def __init__(self, words, *, cwd, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
        (self.stdout, out), (self.stderr, error) = _reader(stdout), _reader(stderr)
        surroundings = environment, 0, os.sched_getaffinity(0)
        arguments = surroundings, [str(word) for word in words], str(cwd), _Descriptor(out), _Descriptor(error)
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        self.args, self.pid = words, self._process.pid
        for reader, descriptor in ((self.stdout, out), (self.stderr, error)):
            if reader:
                os.close(descriptor)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        """Send a signal, or do nothing if the program has ended, as `subprocess.Popen` does."""
        with contextlib.suppress(ProcessLookupError):  # the server of forks may know of the end first
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """Wait for the program to end and return its unread stdout and stderr."""
        texts = {}
        readers = {name: file for name in ("stdout", "stderr") if (file := getattr(self, name)) and not file.closed}
        threads = [
            threading.Thread(target=lambda name=name, file=file: texts.update({name: file.read()}), daemon=True)
            for name, file in readers.items()
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread, file in zip(threads, readers.values(), strict=True):
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
            file.close()
        return texts.get("stdout"), texts.get("stderr")


def _reader(wanted):
    """Return a file that reads what a program writes, and the descriptor for the program."""
    if wanted is subprocess.PIPE:
        ours, theirs = os.pipe()
        return open(ours), theirs  # closed by `communicate`
    return None, os.open(os.devnull, os.O_WRONLY) if wanted is subprocess.DEVNULL else _number(wanted)


def _number(file):
    return file if isinstance(file, int) else file.fileno()


class _Descriptor:
    """A file descriptor that is passed to a process at its start."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _detach, (DupFd(self.number),)


def _detach(received):
    return received.detach()


def _begin(surroundings):
    """Set the environment, process group and allowed cores that a spawned process would inherit."""
    environment, group, cores = surroundings
    os.environ.clear()
    os.environ.update(environment)
    os.setpgid(0, group)
    os.sched_setaffinity(0, cores)
    forkserver._forkserver.ensure_running = lambda: None  # processes of this process use the same server
    fork_workers()


def _work(surroundings, target, *args):
    _begin(surroundings)
    target(*args)


def _run(surroundings, words, cwd, stdout, stderr):
    """Run a script, a module (`-m`) or code (`-c`) as the interpreter would."""
    _begin(surroundings)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    process.ORIGINAL_DIR = cwd
    process._parent_process = None
    sys.argv = words[1:] if words[0] == "-m" else ["-c", *words[2:]] if words[0] == "-c" else words
    try:
        if words[0] == "-m":
            sys.path.insert(0, cwd)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.path.insert(0, cwd)
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        with contextlib.suppress(OSError):
            atexit._run_exitfuncs()
