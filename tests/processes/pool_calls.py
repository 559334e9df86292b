"""Functions that tests call in pool processes. This module imports quickly, without pytest."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection

import torch

from fedsim.errors import ExperimentError


def who(process):
    return process.index, process.count, os.getpid()


def threads(process):
    return torch.get_num_threads()


def add_to(process, tensor, value):
    tensor[process.index] += value


def add_to_all(process, tensors):
    for tensor in tensors:
        tensor[process.index] += 1


def remember(process, value=None):
    if value is not None:
        process.state["value"] = value
    return process.state["value"]


def meet(process):
    process.barrier.wait()


def misbehave(process, how, index=0, meet_after=True):
    """Let process `index` fail (`how`) while the others wait for it at the barrier."""
    if process.index == index:
        with process.working_on(7, 3):
            if how == "raise":
                raise ZeroDivisionError("divided")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(0)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "sleep":
                time.sleep(3600)
    if meet_after:
        process.barrier.wait()


def work_for(process, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        process.heartbeat()


def unpicklable(process):
    return threading.Lock()


class Note:
    def __init__(self, path):
        self.path, self.cycle = path, self

    def __del__(self):
        if not sys.is_finalizing():  # at interpreter exit, CUDA may be gone already
            self.path.touch()


def leave_a_note_at_the_end(process, folder):
    gc.disable()  # so that only an explicit collection finds the note
    process.state["note"] = Note(folder / str(process.index))


def work_on(process, worker, round):
    with process.working_on(worker, round):
        pass


class OnlyHere:
    """An object that cannot be unpickled in another process."""

    def __reduce__(self):
        return import_missing, ()


def import_missing():
    raise ModuleNotFoundError("no module named here_only")


def refuse(process):
    if process.index == 1:
        raise ExperimentError("f = 9: too many", "n = 3: too few")
    process.barrier.wait()


def die_while_sending(process):
    """Make the process die after sending half of its answer."""

    def send_half(connection, data):
        os.write(connection.fileno(), struct.pack("!i", len(data)) + data[:1])
        kill_this()

    Connection.send_bytes = send_half


class KillsItsReader:
    """An object that kills the process which unpickles it."""

    def __reduce__(self):
        return kill_this, ()


def never_report(*_):
    """Main function of a process that never reports that it has started."""
    signal.pause()


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def give_by_handle_and_die(process):
    # after this process has answered, but before the parent has received the tensor
    threading.Timer(0.2, kill_this).start()
    return Slow(), torch.zeros(2)


class Slow:
    """An object that takes long to unpickle."""

    def __reduce__(self):
        return time.sleep, (1.0,)
