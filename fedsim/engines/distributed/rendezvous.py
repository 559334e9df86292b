"""Where a process stands among those that torchrun, srun or mpirun has started, and how they find each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fedsim.errors import ExperimentError, WorkerError, one_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SIOCGIFADDR = 0x8915  # Linux's request for an interface's address
RETRY = 0.05  # seconds
COMMAND = "torchrun --standalone --nproc-per-node 2 run_experiment.py engine=distributed"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29_500  # PyTorch's own
PORTS = range(20_000, 32_000)  # of which a job's number picks one: below the ports that systems assign themselves

LAUNCHERS = {  # by what they say of rank and number of ranks: the place on this host, and how many there are on it
    ("RANK", "WORLD_SIZE"): ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"): ("SLURM_LOCALID", None),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"): ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE"): ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
JOB_NUMBERS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


@dataclass(frozen=True)
class RankInfo:
    """One process's place among those of a run.

    Attributes:
        rank, count: which it is, of how many.
        local_rank: its number among the ranks of its host, if the launcher says so; it chooses the GPU.
        address: host and port at which the ranks find each other.
        attempt: how often torchrun has started them all again: what earlier ones have left where they met is void.
    """

    rank: int
    count: int
    local_rank: int
    address: tuple[str, int]
    attempt: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankInfo | None:
        """By what the launcher has put into the environment; None where there is no launcher.

        Raises ExperimentError where it makes no sense.
        """
        for (rank, count), (local_rank, local_count) in LAUNCHERS.items():
            if rank in environ and count in environ:
                numbers = {name: _number(environ, name) for name in (rank, count)}
                if not 0 <= numbers[rank] < numbers[count]:
                    raise ExperimentError(f"{rank} = {numbers[rank]}: must be from 0 to {count} - 1, {numbers[count]}")
                here = _number(environ, local_rank) if local_rank in environ else 0
                attempt = _number(environ, RESTARTS) if RESTARTS in environ else 0
                return cls(numbers[rank], numbers[count], here, _address(environ, numbers[count], local_count), attempt)
        return None

    @classmethod
    def here(cls) -> RankInfo:
        """The place of this process. Raises ExperimentError, with the command to use, where it has none."""
        place = cls.of(os.environ)
        if place is None:
            raise ExperimentError(
                'engine = "distributed": this process is one of no group (RANK and WORLD_SIZE are not set); '
                f"start it by a launcher: {COMMAND}"
            )
        return place


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ExperimentError(f"{name} = {environ[name]!r}: must be a number") from None


def _address(environ: Mapping[str, str], count: int, local_count: str | None) -> tuple[str, int]:
    """Where the ranks meet: as MASTER_ADDR and MASTER_PORT say, else SLURM's first host, else this one."""
    host = environ.get("MASTER_ADDR")
    if host is None and "RANK" not in environ and "SLURM_PROCID" in environ and _slurm_hosts(environ) != 1:
        host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if host is None and local_count is not None and local_count in environ and _number(environ, local_count) < count:
        raise ExperimentError(
            f"MASTER_ADDR: is not set, and {count - _number(environ, local_count)} of {count} ranks are elsewhere; "
            "give the address of the host of rank 0"
        )
    if "MASTER_PORT" in environ:
        return host or LOOPBACK, _number(environ, "MASTER_PORT")
    job = " ".join(environ[name] for name in JOB_NUMBERS if name in environ)
    if "RANK" in environ or not job:
        return host or LOOPBACK, DEFAULT_PORT
    digest = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big")
    return host or LOOPBACK, PORTS[digest % len(PORTS)]


def _slurm_hosts(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if name in environ:
            return _number(environ, name)
    return 1


def first_host(names: str) -> str | None:
    """The first of SLURM's list of hosts: `node03` of `node[03-07,9],other`."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", names)
    return "".join(part or "" for part in found.groups()) if found else None


def open_store(init: str, place: RankInfo, timeout: float) -> dist.Store:
    """The store of keys and values through which the ranks find each other.

    Args:
        init: `env://` (what the launcher says), `tcp://HOST:PORT` or `file:///PATH`, a path that all ranks see.

    At a loopback address it listens on that alone. Raises WorkerError where it cannot be reached within the timeout.
    """
    limit = timedelta(seconds=timeout)
    host, port = meeting_address(init, place)
    try:
        if init.startswith("file://"):
            return next(dist.rendezvous(init, place.rank, place.count, timeout=limit))[0]
        if _keeps_store_in_agent(init):
            return next(dist.rendezvous(init, place.rank, place.count, timeout=limit))[0]  # it is open already
        leads = place.rank == 0
        listening = _listen(host, port) if leads and is_loopback(host) else None
        if not leads:
            _wait_for_listener(host, port, timeout)  # which PyTorch would tell of at length
        return dist.TCPStore(
            host, port, place.count, leads, timeout=limit, wait_for_workers=False, master_listen_fd=listening
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise WorkerError(
            f"rank {place.rank} of {place.count}: did not find the rendezvous at "
            f"{init if init.startswith('file://') else f'{host}:{port}'} within {timeout:g} s: {one_line(error)[:300]}"
        ) from error


def store_keeper(init: str) -> str:
    """Who keeps that store, as errors name it."""
    if init.startswith("file://"):
        return f"the ranks' store {init}"
    return "the launcher, which keeps the ranks' store," if _keeps_store_in_agent(init) else "rank 0"


def _keeps_store_in_agent(init: str) -> bool:
    return init == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there. Raises OSError where nobody does within the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(RETRY, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() + RETRY > deadline:
                raise
        time.sleep(RETRY)


def meeting_address(init: str, place: RankInfo) -> tuple[str, int]:
    """Host and port at which the ranks find each other."""
    if not init.startswith("tcp://"):
        return place.address
    host, _, port = init.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach this address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int) -> int:
    """A socket that listens at this address, and not, as PyTorch's own would, at all of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK if host == "localhost" else host, port))
        listener.listen(2_048)
    except OSError:
        listener.close()
        raise
    return listener.detach()


def interface_towards(host: str) -> str | None:
    """The name of the network interface by which this machine reaches a host, as far as Linux tells."""
    if fcntl is None:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of datagrams: nothing is sent
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return None
