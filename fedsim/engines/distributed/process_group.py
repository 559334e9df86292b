"""The group of ranks of this process, and their communication by `torch.distributed`."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.engines.distributed import rendezvous
from fedsim.engines.distributed.rendezvous import HOST_BACKEND, RankInfo
from fedsim.engines.distributed.watchdog import GRACE, Watchdog, ranks, wait_for_all
from fedsim.errors import ExperimentError, FedsimError, WorkerError, one_line, show
from fedsim.system.background import SingleThreadExecutor
from fedsim.system.devices import device_of_rank, gloo_can_sum, gpu_id

LINGER = 1.0  # seconds in which the others read why a rank ends
FOREVER = timedelta(days=30)  # the group's own timeout: waiting ranks watch the others' heartbeats instead


def no_heartbeats() -> int:
    """Return the heartbeats of a rank without a task."""
    return 0


class RankGroup:
    """PyTorch's process group, with errors in one line. All ranks call every method that communicates.

    Made once in a process, by `join`. No call blocks the main thread, so that time-outs and signals always reach it.

    Attributes:
        index, count: number of this rank, and number of ranks.
        device: of this rank.
        backend: of the exchange of rows.
        reason: why this is not the default backend of the device; None if it is.
        group: PyTorch's process group, for code that sends by itself; see `wait_for`.
    """

    joined: ClassVar[RankGroup | None] = None

    def __init__(self, place: RankInfo, *settings: Any) -> None:
        self._settings = _, _, self.timeout, device = settings
        self.index, self.count = place.rank, place.count
        self.device = device_of_rank(device, place.local_rank)
        self.heartbeats: Callable[[], int] = no_heartbeats
        self._spoilt: str | None = "this rank has not joined the others"
        self._watchdog: Watchdog
        self._background = SingleThreadExecutor(self.device)  # of calls that may block forever

    @classmethod
    def join(cls, *, init: str, backend: str | None, timeout: float, device: str) -> RankGroup:
        """Return the group of this process. The first call joins it.

        Raises ExperimentError without a launcher, and WorkerError if the others do not join in time.
        """
        settings, place = (init, backend, timeout, device), RankInfo.here()
        if cls.joined is None:
            cls.joined = cls(place, *settings)
            cls.joined._join(place, init, backend)
        elif cls.joined._settings != settings:
            raise ExperimentError(
                "the ranks have joined already, with init, backend, timeout and device "
                f"{show(list(cls.joined._settings))}; they cannot join again with {show(list(settings))}"
            )
        return cls.joined

    def _join(self, place: RankInfo, init: str, backend: str | None) -> None:
        atexit.register(self.leave)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
        joining = self._background.begin(lambda: self._meet(place, init, backend, time.monotonic() + self.timeout))
        try:
            if not wait([joining], self.timeout + LINGER).done:
                raise TimeoutError("the other ranks do not answer")
            joining.result()
        except FedsimError:
            raise
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            why = one_line(error).removeprefix("OSError: ")[:300]
            address = init if init.startswith("file://") else "{}:{}".format(*rendezvous.meeting_address(init, place))
            raise WorkerError(
                f"rank {self.index} of {self.count}: did not join the other ranks at {address} within "
                f"{self.timeout:g} s (distributed.timeout): {why}; start all ranks within this time, and give each job "
                "a port of its own (MASTER_PORT)"
            ) from error
        self._spoilt = None

    def _meet(self, place: RankInfo, init: str, backend: str | None, deadline: float) -> None:
        """Join the other ranks. A first process group, which is not used later, checks that they are connected."""
        opened, keeper = rendezvous.open_store(init, place, deadline - time.monotonic())
        store = self._store = dist.PrefixStore(f"fedsim/{place.attempt}", opened)
        self._watchdog = Watchdog(store, keeper, self.index, self.count, lambda: self.heartbeats(), self.timeout)
        self._watchdog.start()
        if missing := wait_for_all(store, self.count, deadline - time.monotonic()):
            raise WorkerError(f"{ranks(missing)} of {self.count} did not join within {self.timeout:g} s")
        if name := rendezvous.interface_towards(rendezvous.meeting_address(init, place)[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else gloo listens at the address of the host name
        limit = timedelta(seconds=max(LINGER, deadline - time.monotonic()))
        self.backend = HOST_BACKEND
        try:
            dist.init_process_group(
                HOST_BACKEND,
                store=dist.PrefixStore("group", store),
                rank=self.index,
                world_size=self.count,
                timeout=limit,
            )
            identities: list[Any] = [None] * self.count
            dist.all_gather_object(identities, (socket.gethostname(), gpu_id(self.device)))
            self._hosts = [host for host, _ in identities]
            gpus = [gpu and f"{host} {gpu}" for host, gpu in identities]
            self.backend, self.reason = rendezvous.backend_for(backend, self.device, gpus)
            backends = f"cpu:{HOST_BACKEND},{self.device.type}:{self.backend}"
            backends = HOST_BACKEND if self.backend == HOST_BACKEND else backends
            self.group = dist.new_group(backend=backends, timeout=FOREVER)
        except FedsimError:
            raise
        except (RuntimeError, ValueError) as error:
            raise WorkerError(
                f"backend {self.backend}: the ranks do not reach each other: {one_line(error)[:300]}"
            ) from error

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def neighbours(self) -> int:
        """The number of ranks on this host, this one included."""
        return self._hosts.count(self._hosts[self.index])

    def facts(self) -> dict[str, Any]:
        """For the run record."""
        reason = {"backend_reason": self.reason} if self.reason else {}
        return {"ranks": self.count, "hosts": list(dict.fromkeys(self._hosts)), "backend": self.backend, **reason}

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum (or `op`) of the values [...] of all ranks, in place."""
        return self._do(dist.all_reduce, values, op=op)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return the first rank's values, in place."""
        return self._do(dist.broadcast, values, 0)

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send one of `parts` to each rank; returns the flat parts that the ranks send to this one, of these sizes."""
        sent, received = torch.cat([part.reshape(-1) for part in parts]), parts[0].new_empty(sum(sizes))
        self._do(dist.all_to_all_single, received, sent, list(sizes), [part.numel() for part in parts])
        return list(received.split(list(sizes)))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small picklable object of every rank, in their order."""
        pickled = torch.from_numpy(np.frombuffer(pickle.dumps(value), np.uint8).copy())
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.index] = len(pickled)
        parts = self.exchange([pickled] * self.count, self.all_reduce(sizes).tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def broadcast_object(self, value: Any) -> Any:
        """Return the first rank's object, in all ranks."""
        return self.gather_objects(value if self.first else None)[0]

    @property
    def sums_where_rows_lie(self) -> bool:
        """Whether the backend sums tensors of this device, and not copies of them on the host."""
        return self.backend != HOST_BACKEND or gloo_can_sum(self.device)

    def wait_for(self, begin: Callable[[], Sequence[torch.futures.Future[Any]]]) -> None:
        """Begin to send, and wait for the end and for this rank's device while the others send heartbeats."""
        self.require_usable()
        pause, cause = self._watchdog.interval, self._watchdog.silences()
        self._watchdog.waits = True
        try:
            for future in begin():
                done = threading.Event()
                future.add_done_callback(partial(_set, done))
                while not done.wait(pause):
                    self._end_for(cause())
                future.wait()  # raises its error
            if self.device.type != "cpu":  # its own wait has no timeout
                event, deadline = torch.get_device_module(self.device).Event(), time.monotonic() + pause
                event.record()
                while not event.query():
                    if time.monotonic() > deadline:
                        self._end_for(cause())
                        deadline = time.monotonic() + pause
                    time.sleep(0)
        except WorkerError:
            raise
        except RuntimeError as error:
            lost = f"the connection to another rank was lost: {one_line(error)[:200]}"
            raise WorkerError(self.give_up(self.cause() or lost)) from error
        finally:
            self._watchdog.waits = False

    def _end_for(self, cause: str | None) -> None:
        if cause:
            raise WorkerError(self.give_up(cause))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """In the block, this rank ends if another one does."""
        self.require_usable()
        self._watchdog.on_duty = True
        try:
            yield
        finally:
            self._watchdog.on_duty = False

    def require_usable(self) -> None:
        """Raise WorkerError if the ranks are out of step after an earlier failure."""
        if self._spoilt:
            raise WorkerError(f"the ranks are out of step ({self._spoilt}); start the program again")

    def give_up(self, why: str) -> str:
        """Tell the others why this rank ends; returns the cause of the first rank that has ended."""
        self._spoilt = self._spoilt or why
        return self._watchdog.say(why)

    def cause(self) -> str | None:
        """Why another rank has ended, if that is known."""
        return self._watchdog.find_cause()

    def end_program(self, code: int) -> None:
        """End a program that has failed at once; it could wait for other ranks without end."""
        if self._spoilt:
            sys.stderr.flush()
            if self.first:  # it may be the process of the store
                time.sleep(LINGER)
            os._exit(code)

    def leave(self) -> None:
        """Leave the group and end its threads, at the end of the program; end the program if one of them is blocked.

        A thread that returned from C++ to an interpreter that has ended would abort the process.
        """
        atexit.unregister(self.leave)
        type(self).joined = None
        watchdog = vars(self).pop("_watchdog", None)
        self._background.begin(self._destroy)
        if not (self._background.end(GRACE) and (watchdog is None or watchdog.end(GRACE))):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _destroy(self) -> None:
        for name in ("group", "_store"):  # the last references to them, or nearly
            vars(self).pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _do(self, collective: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Call a collective that writes to `tensor`, or to a copy on the host if the backend sends none of a device."""
        wire, inputs = tensor, arguments
        if self.backend == HOST_BACKEND:
            wire = tensor.cpu()
            inputs = tuple(value.cpu() if isinstance(value, Tensor) else value for value in arguments)
        self.wait_for(lambda: [collective(wire, *inputs, group=self.group, async_op=True, **options).get_future()])
        return tensor.copy_(wire)  # does nothing if they are one


def _set(event: threading.Event, future: torch.futures.Future[Any]) -> None:
    event.set()
