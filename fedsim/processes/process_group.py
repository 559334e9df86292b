"""Connection of this rank to the other ranks, by `torch.distributed`."""

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

from fedsim.errors import ExperimentError, FedsimError, WorkerError, one_line, show
from fedsim.processes import rendezvous
from fedsim.processes.background import SingleThreadExecutor
from fedsim.processes.rendezvous import HOST_BACKEND, RankInfo
from fedsim.processes.watchdog import GRACE, Watchdog, ranks, wait_for_all
from fedsim.system.devices import device_of_rank, gloo_can_sum, gpu_id

LINGER = 1.0  # seconds that a failed rank waits, so that the other ranks can read its error
FOREVER = timedelta(days=30)  # timeout of PyTorch's group, in effect none: ranks watch each other's heartbeats instead


def no_heartbeats() -> int:
    """Return 0, the number of heartbeats of a rank without a task."""
    return 0


class RankGroup:
    """Connection of this rank to the other ranks: a PyTorch process group with timeouts and short error messages.

    A process has one instance, which `join` creates. All ranks must call the communicating methods in the same order.

    Attributes:
        index, count: index of this rank, and number of ranks.
        device: device of this rank.
        backend: torch.distributed backend, such as "nccl".
        reason: why `backend` is not PyTorch's default for the device; None if it is the default.
        group: PyTorch's process group.
    """

    joined: ClassVar[RankGroup | None] = None

    def __init__(self, place: RankInfo, *settings: Any) -> None:
        self._settings = _, _, self.timeout, device = settings
        self.index, self.count = place.rank, place.count
        self.device = device_of_rank(device, place.local_rank)
        self.heartbeats: Callable[[], int] = no_heartbeats
        self._spoilt: str | None = "this rank has not joined the others"
        self._watchdog: Watchdog
        self._background = SingleThreadExecutor(self.device)  # runs calls that may block forever

    @classmethod
    def join(cls, *, init: str, backend: str | None, timeout: float, device: str) -> RankGroup:
        """Connect this process to the other ranks, and return the connection. Later calls return the same object.

        Args:
            init: address where the ranks connect: `env://` (given by the launcher), `tcp://HOST:PORT` or
                `file:///PATH`.
            backend: torch.distributed backend; None for the default of the device.
            timeout: seconds until missing or silent ranks count as failed.
            device: device name, such as "cuda".

        Raises ExperimentError if no launcher started this process, and WorkerError if other ranks do not join in time.
        """
        settings, place = (init, backend, timeout, device), RankInfo.here()
        if cls.joined is None:
            cls.joined = cls(place, *settings)
            cls.joined._join(place, init, backend)
        elif cls.joined._settings != settings:
            raise ExperimentError(
                "this process has already joined the ranks with [init, backend, timeout, device] = "
                f"{show(list(cls.joined._settings))} and cannot join again with {show(list(settings))}; "
                "use the same settings or a new process"
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
                f"{self.timeout:g} s (distributed.timeout): {why}; start all ranks within this time, with a different "
                "MASTER_PORT for each job"
            ) from error
        self._spoilt = None

    def _meet(self, place: RankInfo, init: str, backend: str | None, deadline: float) -> None:
        """Connect to the other ranks, and check the connections.

        Args:
            place: rank of this process.
            init: address where the ranks connect; see `join`.
            backend: torch.distributed backend; None for the default of the device.
            deadline: time by which all ranks must have joined, on the clock `time.monotonic`.
        """
        opened, keeper = rendezvous.open_store(init, place, deadline - time.monotonic())
        store = self._store = dist.PrefixStore(f"fedsim/{place.attempt}", opened)
        self._watchdog = Watchdog(store, keeper, self.index, self.count, lambda: self.heartbeats(), self.timeout)
        self._watchdog.start()
        if missing := wait_for_all(store, self.count, deadline - time.monotonic()):
            raise WorkerError(f"{ranks(missing)} of {self.count} did not join within {self.timeout:g} s")
        if name := rendezvous.interface_towards(rendezvous.meeting_address(init, place)[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # by default, gloo listens at the host name's address
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
                f"backend {self.backend}: the ranks cannot connect to each other: {one_line(error)[:300]}"
            ) from error

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def neighbours(self) -> int:
        """Number of ranks on this machine, including this rank."""
        return self._hosts.count(self._hosts[self.index])

    def facts(self) -> dict[str, Any]:
        """Return a description of the ranks for the run record: their number, hosts and backend."""
        reason = {"backend_reason": self.reason} if self.reason else {}
        return {"ranks": self.count, "hosts": list(dict.fromkeys(self._hosts)), "backend": self.backend, **reason}

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Overwrite `values` with their sum (or another reduction `op`) over all ranks, and return `values`."""
        return self._do(dist.all_reduce, values, op=op)

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` with the values of rank 0, and return `values`."""
        return self._do(dist.broadcast, values, 0)

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send `parts[i]` to rank i, for all ranks (all-to-all). Return the flat tensors received, one per rank.

        Args:
            parts: tensor to send to each rank.
            sizes: number of values that each rank sends to this rank.
        """
        sent, received = torch.cat([part.reshape(-1) for part in parts]), parts[0].new_empty(sum(sizes))
        self._do(dist.all_to_all_single, received, sent, list(sizes), [part.numel() for part in parts])
        return list(received.split(list(sizes)))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a list of the values that all ranks pass. `value` is a small picklable object."""
        pickled = torch.from_numpy(np.frombuffer(pickle.dumps(value), np.uint8).copy())
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.index] = len(pickled)
        parts = self.exchange([pickled] * self.count, self.all_reduce(sizes).tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def broadcast_object(self, value: Any) -> Any:
        """Return, on every rank, the value that rank 0 passes: a small picklable object. Other ranks may pass None."""
        return self.gather_objects(value if self.first else None)[0]

    @property
    def sums_where_rows_lie(self) -> bool:
        """Whether the backend can sum tensors directly on this rank's device, without copies to the CPU."""
        return self.backend != HOST_BACKEND or gloo_can_sum(self.device)

    def wait_for(self, begin: Callable[[], Sequence[torch.futures.Future[Any]]]) -> None:
        """Call `begin`, which starts communication, and wait until the communication has finished.

        Raises WorkerError as soon as another rank fails or no longer responds.
        """
        self.require_usable()
        pause, cause = self._watchdog.interval, self._watchdog.silences()
        self._watchdog.waits = True
        try:
            for future in begin():
                done = threading.Event()
                future.add_done_callback(partial(_set, done))
                while not done.wait(pause):
                    self._end_for(cause())
                future.wait()  # raises the future's error
            if self.device.type != "cpu":  # device synchronisation has no timeout of its own
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
            lost = f"lost the connection to another rank: {one_line(error)[:200]}"
            raise WorkerError(self.give_up(self.cause() or lost)) from error
        finally:
            self._watchdog.waits = False

    def _end_for(self, cause: str | None) -> None:
        if cause:
            raise WorkerError(self.give_up(cause))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Return a context in which this process exits soon after another rank fails, instead of waiting forever."""
        self.require_usable()
        self._watchdog.on_duty = True
        try:
            yield
        finally:
            self._watchdog.on_duty = False

    def require_usable(self) -> None:
        """Raise WorkerError if the ranks can no longer communicate because of an earlier failure."""
        if self._spoilt:
            raise WorkerError(f"the ranks are out of step after a failure ({self._spoilt}); restart the program")

    def give_up(self, why: str) -> str:
        """Tell the other ranks that this rank ends because of the failure `why`.

        Returns the failure that a rank reported first: `why`, or the failure of another rank.
        """
        self._spoilt = self._spoilt or why
        return self._watchdog.say(why)

    def cause(self) -> str | None:
        """Return why another rank has failed; None if no failure is known."""
        return self._watchdog.find_cause()

    def end_program(self, code: int) -> None:
        """Exit immediately with status `code` if a rank has failed. Otherwise, do nothing."""
        if self._spoilt:
            sys.stderr.flush()
            if self.first:  # rank 0 may run the store, in which other ranks still read the error
                time.sleep(LINGER)
            os._exit(code)

    def leave(self) -> None:
        """Disconnect from the other ranks at the end of the program."""
        atexit.unregister(self.leave)
        type(self).joined = None
        watchdog = vars(self).pop("_watchdog", None)
        self._background.begin(self._destroy)
        if not (self._background.end(GRACE) and (watchdog is None or watchdog.end(GRACE))):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _destroy(self) -> None:
        for name in ("group", "_store"):  # drop the references, so that the group and the store can be destroyed
            vars(self).pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _do(self, collective: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Call a collective operation such as `dist.all_reduce`, and return `tensor` with its result."""
        wire, inputs = tensor, arguments
        if self.backend == HOST_BACKEND:
            wire = tensor.cpu()
            inputs = tuple(value.cpu() if isinstance(value, Tensor) else value for value in arguments)
        self.wait_for(lambda: [collective(wire, *inputs, group=self.group, async_op=True, **options).get_future()])
        return tensor.copy_(wire)  # does nothing if `wire` is `tensor`


def _set(event: threading.Event, future: torch.futures.Future[Any]) -> None:
    event.set()
