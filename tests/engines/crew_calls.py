"""What the tests of a crew have its processes do: a module that these import quickly, without pytest."""

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

from fedsim.engines.barrier import Barrier
from fedsim.errors import ExperimentError


def who(seat):
    return seat.index, seat.count, os.getpid()


def threads(seat):
    return torch.get_num_threads()


def add_to(seat, tensor, value):
    tensor[seat.index] += value


def add_to_all(seat, tensors):
    for tensor in tensors:
        tensor[seat.index] += 1


def remember(seat, value=None):
    if value is not None:
        seat.belongings["value"] = value
    return seat.belongings["value"]


def meet(seat):
    seat.barrier.wait()


def misbehave(seat, how, index=0, meet_after=True):
    """Process `index` does something terrible while the others wait for it at the barrier."""
    if seat.index == index:
        with seat.working_on(7, 3):
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
        seat.barrier.wait()


def work_for(seat, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        seat.beat()


def unpicklable(seat):
    return threading.Lock()


class Note:
    def __init__(self, path):
        self.path, self.cycle = path, self

    def __del__(self):
        if not sys.is_finalizing():  # then CUDA may be gone already
            self.path.touch()


def leave_a_note_at_the_end(seat, folder):
    gc.disable()  # nothing but an explicit collection finds the note
    seat.belongings["note"] = Note(folder / str(seat.index))


def hang_at_the_barrier(seat):
    """Process 1 never comes, and process 0 loses patience before the parent does."""
    if seat.index == 1:
        time.sleep(3600)
    Barrier(seat.board, 0, timeout=0.5).wait()


def work_on(seat, worker, round):
    with seat.working_on(worker, round):
        pass


def fail(seat):
    raise ZeroDivisionError("divided")


class OnlyHere:
    """Cannot be unpickled in another process."""

    def __reduce__(self):
        return import_missing, ()


def import_missing():
    raise ModuleNotFoundError("no module named here_only")


def refuse(seat):
    if seat.index == 1:
        raise ExperimentError("f = 9: too many", "n = 3: too few")
    seat.barrier.wait()


def die_while_sending(seat):
    """Its answer ends in the middle of the message."""

    def send_half(connection, data):
        os.write(connection.fileno(), struct.pack("!i", len(data)) + data[:1])
        kill_this()

    Connection.send_bytes = send_half


class KillsItsReader:
    """Kills the process that unpickles it."""

    def __reduce__(self):
        return kill_this, ()


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def give_by_handle_and_die(seat):
    threading.Timer(0.2, kill_this).start()  # after it has answered, and before
    return Slow(), torch.zeros(2)


class Slow:
    """Takes its time to be unpickled."""

    def __reduce__(self):
        return time.sleep, (1.0,)
