"""Connection of this rank to the other ranks, by `torch.distributed`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.errors import ExperimentError, FedsimError, WorkerError, one_line, show
from fedsim.processes import rendezvous
from fedsim.processes.rendezvous import HOST_BACKEND, RankInfo, ranks
from fedsim.system.devices import device_of_rank, gloo_can_sum, gpu_id

T = TypeVar("T")

LOOK = 0.02  # seconds between two reads of the store
LINGER = 1.0  # seconds in which ranks find out why a connection was lost; rank 0 may have to keep the store for them
GRACE = 5.0  # maximum seconds for disconnecting if no rank failed
END = "end"  # store key of the reason why the first rank failed


class RankGroup:
    """Connection of this rank to the other ranks: a PyTorch process group with short error messages.

    A process has one instance, which `join` creates. All ranks must call the communicating methods in the same order.

    Attributes:
        index, count: index of this rank, and number of ranks.
        device: device of this rank.
        backend: torch.distributed backend, such as "nccl".
        reason: why `backend` is not PyTorch's default for the device; None if it is the default.
        group: PyTorch's process group.
    """

    joined: ClassVar[RankGroup | None] = None

    def __init__(self, rank_info: RankInfo, *settings: Any) -> None:
        self._settings = init, backend, self.timeout, device = settings
        self.index, self.count = rank_info.rank, rank_info.count
        self.device = device_of_rank(device, rank_info.local_rank)
        self._lost = ""  # why the ranks can no longer communicate
        self._leaving: Future[None] | None = None
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
        try:
            in_background(lambda: self._meet(rank_info, init, backend)).result(self.timeout + LINGER)
        except FedsimError:
            raise
        except (RuntimeError, OSError, ValueError, MemoryError, FutureTimeout) as error:
            why = one_line(error).removeprefix("OSError: ")[:300]
            address = (
                init if init.startswith("file://") else "{}:{}".format(*rendezvous.meeting_address(init, rank_info))
            )
            raise WorkerError(
                f"rank {self.index} of {self.count}: did not join the other ranks at {address} within "
                f"{self.timeout:g} s (distributed.timeout): {why}; start all ranks within this time, with a different "
                "MASTER_PORT for each job"
            ) from error
        atexit.register(self.leave)

    @classmethod
    def join(cls, *, init: str, backend: str | None, timeout: float, device: str) -> RankGroup:
        """Connect this process to the other ranks, and return the connection. Later calls return the same object.

        Args:
            init: address where the ranks connect: `env://` (given by the launcher), `tcp://HOST:PORT` or
                `file:///PATH`.
            backend: torch.distributed backend; None for the default of the device.
            timeout: maximum seconds that ranks wait for each other.
            device: device name, such as "cuda".

        Raises ExperimentError if no launcher started this process, and WorkerError if other ranks do not join in time.
        """
        settings = init, backend, timeout, device
        if cls.joined is None:
            cls.joined = cls(RankInfo.here(), *settings)
        elif cls.joined._settings != settings:
            raise ExperimentError(
                "this process has already joined the ranks with [init, backend, timeout, device] = "
                f"{show(list(cls.joined._settings))} and cannot join again with {show(list(settings))}; "
                "use the same settings or a new process"
            )
        return cls.joined

    def _meet(self, rank_info: RankInfo, init: str, backend: str | None) -> None:
        """Wait for the other ranks, and connect to them.

        Args:
            rank_info: rank of this process.
            init: address where the ranks connect; see `join`.
            backend: torch.distributed backend; None for the default of the device.
        """
        deadline = time.monotonic() + self.timeout
        opened = rendezvous.open_store(init, rank_info, self.timeout)
        store = self._store = dist.PrefixStore(f"fedsim/{rank_info.attempt}", opened)
        store.set(f"joined/{self.index}", json.dumps([socket.gethostname(), gpu_id(self.device)]))
        while (missing := self._without("joined")) and time.monotonic() < deadline:
            time.sleep(LOOK)
        if missing:
            raise WorkerError(f"{ranks(missing)} of {self.count} did not join within {self.timeout:g} s")
        identities = [json.loads(store.get(f"joined/{rank}")) for rank in range(self.count)]
        self._hosts = [host for host, _ in identities]
        self._gpus = gpus = [gpu and f"{host} {gpu}" for host, gpu in identities]
        self.backend, self.reason = rendezvous.backend_for(backend, self.device, gpus)
        backends = f"cpu:{HOST_BACKEND},{self.device.type}:{self.backend}"
        if name := rendezvous.interface_towards(rendezvous.meeting_address(init, rank_info)[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # by default, gloo listens at the host name's address
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # by default, NCCL's errors abort the process
        host_store, limit = dist.PrefixStore("group", store), timedelta(seconds=self.timeout)
        dist.init_process_group(HOST_BACKEND, store=host_store, rank=self.index, world_size=self.count, timeout=limit)
        self.group = dist.new_group(backend=HOST_BACKEND if self.backend == HOST_BACKEND else backends, timeout=limit)

    def _without(self, mark: str) -> list[int]:
        """Return the ranks that have not set their key "{mark}/{rank}" in the store."""
        return [rank for rank in range(self.count) if not self._store.check([f"{mark}/{rank}"])]

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def sharing(self) -> int:
        """Number of ranks that use the GPU of this rank, including this rank. Meaningless for a CPU."""
        return self._gpus.count(self._gpus[self.index])

    def metadata(self) -> dict[str, Any]:
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

        Raises WorkerError if another rank ends, or sends nothing within the time-out.
        """
        self.require_usable()
        started, futures = time.monotonic(), begin()
        try:
            for future in futures:
                done = threading.Event()
                future.add_done_callback(partial(_set, done))
                done.wait()  # unlike `future.wait()`, this wait can be interrupted by Ctrl-C
                future.wait()  # raises the future's error
            if self.device.type != "cpu":  # device synchronisation has no timeout of its own
                event = torch.get_device_module(self.device).Event()
                event.record()
                while not event.query():
                    if time.monotonic() > started + self.timeout:
                        raise RuntimeError("timed out")
                    time.sleep(0)
        except RuntimeError as error:
            timed_out = time.monotonic() > started + self.timeout
            try:
                self.give_up(in_background(partial(self._cause, error, timed_out)).result(2 * LINGER))
            except (RuntimeError, FutureTimeout):
                self.give_up(f"no answer from rank 0 of {self.count} or the launcher, which hosts the ranks' store")
            raise WorkerError(self._lost) from error

    def _cause(self, error: RuntimeError, timed_out: bool) -> str:
        """Return why communication failed: the note of the first rank that failed, or which ranks do not answer."""
        self._store.set(f"lost/{self.index}", "")
        deadline = time.monotonic() + LINGER
        while not (noted := self._store.check([END])) and time.monotonic() < deadline:
            time.sleep(LOOK)
        if noted:
            return self._store.get(END).decode()
        if not (silent := self._without("lost")):
            return f"lost the connection to another rank: {one_line(error)[:200]}"
        how = "ended without an error message"
        if timed_out:
            how = f"sent nothing for {self.timeout:g} s; if a step takes longer, increase distributed.timeout"
        return f"{ranks(silent)} of {self.count} {how}"

    def require_usable(self) -> None:
        """Raise WorkerError if the ranks can no longer communicate because of an earlier failure."""
        if self._lost:
            raise WorkerError(f"the ranks are out of step after a failure ({self._lost}); restart the program")

    def give_up(self, why: str) -> None:
        """Note for the other ranks that this rank ends because of the failure `why`, and disconnect from them."""
        if not self._lost:
            self._lost = why
            self._leaving = in_background(self._disconnect)

    def _disconnect(self) -> None:
        if self._lost:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(END, "", self._lost)
        del self.group
        dist.destroy_process_group()  # closed connections end the waits of the other ranks

    def leave(self, code: int = 1) -> None:
        """Disconnect from the other ranks at the end of the program. If this takes too long, exit with status `code`.

        PyTorch does not disconnect while it waits for a rank. PyTorch's threads abort the process if they outlive the
        interpreter.
        """
        atexit.unregister(self.leave)
        type(self).joined = None
        if self._lost and self.first:  # rank 0 may keep the store, where the other ranks read the note
            time.sleep(LINGER)
        if not wait([self._leaving or in_background(self._disconnect)], LINGER if self._lost else GRACE).done:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        del self._store

    def _do(self, collective: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Call a collective operation such as `dist.all_reduce`, and return `tensor` with its result."""
        wire, inputs = tensor, arguments
        if self.backend == HOST_BACKEND:
            wire = tensor.cpu()
            inputs = tuple(value.cpu() if isinstance(value, Tensor) else value for value in arguments)
        self.wait_for(lambda: [collective(wire, *inputs, group=self.group, async_op=True, **options).get_future()])
        return tensor.copy_(wire)  # does nothing if `wire` is `tensor`


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread, and return a Future. Calls of PyTorch ignore Ctrl-C and may never return."""
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, name="fedsim-background", daemon=True).start()
    return done


def _set(event: threading.Event, future: torch.futures.Future[Any]) -> None:
    event.set()
