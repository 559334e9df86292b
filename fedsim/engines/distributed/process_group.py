"""The group of ranks of this process, and their communication by `torch.distributed`."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.engines.distributed import rendezvous
from fedsim.engines.distributed.rendezvous import HOST_BACKEND, RankInfo
from fedsim.engines.distributed.watchdog import GRACE, Watchdog, always, ranks, wait_for_all
from fedsim.errors import ExperimentError, FedsimError, WorkerError, one_line, show
from fedsim.system.background import SingleThreadExecutor
from fedsim.system.devices import device_of_rank, gloo_can_sum, gpu_id

LINGER = 1.0  # seconds in which the others read why a rank ends
FOREVER = timedelta(days=30)  # the group's own timeout: waiting ranks watch the others' heartbeats instead


def no_heartbeats() -> int:
    """The heartbeats of a rank without a task."""
    return 0


class RankGroup:
    """PyTorch's process group, with counts of the bytes sent and errors in one line.

    Made once in a process, by `join`. All ranks call every method that communicates. A thread makes the calls that may
    block forever, so that time-outs and signals always reach the main thread.

    Attributes:
        index, count: number of this rank, and number of ranks.
        device: of this rank.
        backend: of the exchange of rows.
        reason: why this is not the default backend of the device; None if it is.
        sent: bytes that this rank has sent by these methods, by purpose.
        group, group_of_hooks: PyTorch's process groups, for code that sends by itself; see `supervised`.
    """

    joined: ClassVar[RankGroup | None] = None

    def __init__(self, place: RankInfo, *settings: Any) -> None:
        self._settings = _, _, self.timeout, device = settings
        self.index, self.count = place.rank, place.count
        self.device = device_of_rank(device, place.local_rank)
        self.heartbeats: Callable[[], int] = no_heartbeats
        self.sent: dict[str, int] = {}
        self._spoilt: str | None = "this rank has not joined the others"
        self._watchdog: Watchdog
        self._background = SingleThreadExecutor(self.device)

    @classmethod
    def join(cls, *, init: str, backend: str | None, timeout: float, device: str) -> RankGroup:
        """The group of this process. The first call joins it.

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
        address = init if init.startswith("file://") else "{}:{}".format(*rendezvous.meeting_address(init, place))
        try:
            if not wait([joining], self.timeout + LINGER).done:
                raise TimeoutError("the other ranks do not answer")
            joining.result()
        except FedsimError:
            raise
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            why = one_line(error).removeprefix("OSError: ")[:300]
            raise WorkerError(
                f"rank {self.index} of {self.count}: did not join the other ranks at {address} within "
                f"{self.timeout:g} s (distributed.timeout): {why}; start all ranks within this time, and give each job "
                "a port of its own (MASTER_PORT)"
            ) from error
        self._spoilt = None

    def _meet(self, place: RankInfo, init: str, backend: str | None, deadline: float) -> None:
        """Join the other ranks."""
        store = rendezvous.open_store(init, place, deadline - time.monotonic())
        self._store = dist.PrefixStore(f"fedsim/{place.attempt}", store)
        keeper = rendezvous.store_keeper(init)
        self._watchdog = Watchdog(self._store, keeper, self.index, self.count, lambda: self.heartbeats(), self.timeout)
        missing = wait_for_all(self._store, self.count, deadline - time.monotonic())
        if missing:
            raise WorkerError(f"{ranks(missing)} of {self.count} did not join within {self.timeout:g} s")
        self._identities = self._exchange_identities()
        self.backend, self.reason = rendezvous.backend_for(backend, self.device, [gpu for *_, gpu in self._identities])
        self.group, self.group_of_hooks = self._start(place, init, deadline)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def neighbours(self) -> int:
        """The number of ranks on this host, this one included."""
        return sum(host == self._identities[self.index][0] for host, *_ in self._identities)

    def facts(self) -> dict[str, Any]:
        """For the run record."""
        hosts = list(dict.fromkeys(host for host, *_ in self._identities))
        reason = {"backend_reason": self.reason} if self.reason else {}
        return {"ranks": self.count, "hosts": hosts, "backend": self.backend, **reason}

    def all_reduce(self, values: Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or `op`) of the values [...] of all ranks, in place."""
        self._count(what, 2 * (self.count - 1) * values.nbytes / self.count)
        with self._on_the_wire(values) as wire:
            self._do(dist.all_reduce, wire, op=op)
        return values

    def broadcast(self, values: Tensor, what: str) -> Tensor:
        """The first rank's values, in place."""
        self._count(what, values.nbytes * (self.count - 1) / self.count)
        with self._on_the_wire(values) as wire:
            self._do(dist.broadcast, wire, 0)
        return values

    def all_gather(self, room: Tensor, what: str) -> None:
        """Give every rank all parts of `room`, [count * width], of which each rank has its own part."""
        part = len(room) // self.count
        own = room[self.index * part : (self.index + 1) * part].clone()
        self._count(what, (self.count - 1) * own.nbytes)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
        with self._on_the_wire(room) as wire:
            self._do(gather, wire, own.to(wire.device))

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int], what: str) -> list[Tensor]:
        """Send one of `parts` to each rank; returns the flat parts that the ranks send to this one, of these sizes."""
        self._count(what, sum(part.nbytes for rank, part in enumerate(parts) if rank != self.index))
        given = torch.cat([part.reshape(-1) for part in parts])
        wire = given if self._carries(given) else given.cpu()
        got = wire.new_empty(sum(sizes))
        self._do(dist.all_to_all_single, got, wire, list(sizes), [part.numel() for part in parts])
        return list(got.to(given.device).split(list(sizes)))

    def gather_objects(self, value: Any) -> list[Any]:
        """A small picklable object of every rank, in their order."""
        values: list[Any] = [None] * self.count
        self.supervised(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's object, in all ranks."""
        values = [value]
        self.supervised(lambda: dist.broadcast_object_list(values, 0, group=self.group))
        return values[0]

    @property
    def in_order(self) -> bool:
        """Whether all ranks begin their work in the same order, as on the queue of a device."""
        return self.backend != HOST_BACKEND

    @property
    def sums_where_rows_lie(self) -> bool:
        """Whether the backend sums tensors of this device, and not copies of them on the host."""
        return self.backend != HOST_BACKEND or gloo_can_sum(self.device)

    def supervised(self, work: Callable[[], Any], waits: threading.Event | None = None) -> Any:
        """The result of `work`, which communicates with the other ranks and may wait for them without a timeout.

        It runs in another thread, while this one checks the heartbeats of the others.

        Args:
            waits: the work sets it when all that it still does is wait for the others; None: it only waits.
        """
        self.require_usable()
        done, now = self._background.begin(work), waits.is_set if waits else always
        with self._translated(), self._watchdog.waiting(now) as silences:
            while not wait([done], self._watchdog.interval).done:
                if cause := silences.look():
                    raise WorkerError(cause)
            if now():
                return done.result()
        return done.result()  # it failed before it waited, so the cause is in this rank

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
        return self._watchdog.note(why)

    def cause(self) -> str | None:
        """Why another rank has ended, if that is known."""
        return self._watchdog.said() or self._gone()

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
        if not (self._background.end(GRACE) and (watchdog is None or watchdog.stop(GRACE))):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _destroy(self) -> None:
        for name in ("group", "group_of_hooks", "_store"):  # the last references to them, or nearly
            vars(self).pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _exchange_identities(self) -> list[tuple[str, int, str | None]]:
        """Host, process and GPU of every rank, through the store."""
        gpu = gpu_id(self.device)
        self._store.set(f"who/{self.index}", "\n".join([socket.gethostname(), str(os.getpid()), gpu or ""]))
        identities = []
        for rank in range(self.count):
            host, pid, gpu = self._store.get(f"who/{rank}").decode().split("\n")
            identities.append((host, int(pid), f"{host} {gpu}" if gpu else None))
        return identities

    def _start(self, place: RankInfo, init: str, deadline: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The process groups. A first one, which is not used later, checks that the ranks are connected.

        Gloo matches messages by their order in a group, so other threads have a group of their own.
        """
        host = rendezvous.meeting_address(init, place)[0]
        if name := rendezvous.interface_towards(host):  # else gloo listens at the address of the host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        own = f"cpu:{HOST_BACKEND},{self.device.type}:{self.backend}"
        backend = HOST_BACKEND if self.backend == HOST_BACKEND else own
        try:
            dist.init_process_group(
                HOST_BACKEND,
                store=dist.PrefixStore("group", self._store),
                rank=self.index,
                world_size=self.count,
                timeout=timedelta(seconds=max(LINGER, deadline - time.monotonic())),
            )
            group = dist.new_group(backend=backend, timeout=FOREVER)
            return group, group if self.in_order else dist.new_group(backend=backend, timeout=FOREVER)
        except (RuntimeError, ValueError) as error:
            raise WorkerError(
                f"backend {self.backend}: the ranks do not reach each other: {one_line(error)[:300]}"
            ) from error

    def _carries(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" or self.backend != HOST_BACKEND

    @contextlib.contextmanager
    def _on_the_wire(self, tensor: Tensor) -> Iterator[Tensor]:
        """The tensor, or a copy on the host, which is copied back, if the backend cannot send the tensor."""
        if self._carries(tensor):
            yield tensor
            return
        copy = tensor.cpu()
        yield copy
        tensor.copy_(copy)

    def _do(self, collective: Callable[..., Any], wire: Tensor, *arguments: Any, **options: Any) -> None:
        """Call a collective, and wait for it while the others send heartbeats."""
        with self._translated():
            work = collective(wire, *arguments, group=self.group, async_op=True, **options)
            done = self._done if wire.device.type == "cpu" else self._done_on_device
            with self._watchdog.waiting() as silences:
                while not done(work):
                    if cause := silences.look():
                        raise WorkerError(cause)

    def _done(self, work: Any) -> bool:
        """Wait for an interval; whether the work is done."""
        try:
            work.wait(timedelta(seconds=self._watchdog.interval))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises its error, if it has failed
        return True

    def _done_on_device(self, work: Any) -> bool:
        """Wait for work of a device; whether it is done in time. The device's own wait has no timeout."""
        deadline = time.monotonic() + self._watchdog.interval
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0)
        work.wait()
        return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors into a WorkerError with their cause."""
        self.require_usable()
        try:
            yield
        except WorkerError as error:
            raise WorkerError(self.give_up(str(error))) from None
        except RuntimeError as error:
            cause = self.cause() or f"the connection to another rank was lost: {one_line(error)[:200]}"
            raise WorkerError(self.give_up(cause)) from error

    def _gone(self) -> str | None:
        missing = self._watchdog.missing({rank: (host, pid) for rank, (host, pid, _) in enumerate(self._identities)})
        return f"{ranks(missing)} of {self.count} ended without a word" if missing else None

    def _count(self, what: str, nbytes: float) -> None:
        self.sent[what] = self.sent.get(what, 0) + int(nbytes)
