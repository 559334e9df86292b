"""Pretend that this system is Windows: `import tests.elsewhere`, or `pytest -s -n 0 -p tests.elsewhere PATHS`.

Modules and functions that Python lacks on Windows disappear after the packages that fedsim needs have been imported,
because these were installed for this system.
"""

from __future__ import annotations

import importlib
import multiprocessing.reduction
import os
import signal
import socket
import sys

PACKAGES = ("matplotlib.backends.backend_agg", "matplotlib.figure", "numpy", "pydantic", "safetensors.torch", "typer")
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
FUNCTIONS = {
    os: (
        *("fork", "forkpty", "geteuid", "getloadavg", "getpgid", "getpgrp", "getuid", "killpg", "memfd_create"),
        *("mkfifo", "posix_fallocate", "pread", "pwrite", "register_at_fork", "sched_getaffinity"),
        *("sched_setaffinity", "sched_yield", "setpgid", "setsid", "sysconf", "uname"),
    ),
    signal: ("SIGALRM", "SIGCONT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "pthread_sigmask", "setitimer"),
    socket: ("AF_UNIX", "recv_fds", "send_fds"),
    multiprocessing.reduction: ("DupFd",),
}

for package in (*PACKAGES, "torch.distributed", "torch.multiprocessing", "torch.utils.data"):
    importlib.import_module(package)
for module in MODULES:
    sys.modules[module] = None
for namespace, names in FUNCTIONS.items():
    for name in names:
        vars(namespace).pop(name, None)
sys.platform = "win32"
