"""The rank of this process, which torchrun, srun or mpirun sets, and the rendezvous of the ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fedsim.errors import ExperimentError, plural, show

SIOCGIFADDR = 0x8915  # Linux's request for an interface's address
HOST_BACKEND = "gloo"  # for tensors on the host
RETRY = 0.05  # seconds between two attempts to connect
SILENT, FOREIGN = "the process at this address does not answer", "the process at this address is not rank 0"
PING = b"ping"  # any four bytes, which a TCPStore returns
GREETING = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d" + PING  # first bytes of a TCPStore client: VALIDATE, PING
COMMAND = "torchrun --standalone --nproc-per-node 2 run_experiment.py engine=distributed"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29_500  # PyTorch's default
PORTS = range(20_000, 32_000)  # below the ports that operating systems assign; a hash of the job's ID selects one
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Launcher:
    """Environment variables that a launcher sets for each rank.

    Attributes:
        rank, count: rank of the process, and number of ranks.
        local_rank: rank of the process on its host. The first variable that is set is used.
        local_count: number of ranks on the host; None if the launcher does not set it.
        job: IDs of the job, which are equal in all ranks.
    """

    rank: str
    count: str
    local_rank: tuple[str, ...]
    local_count: str | None
    job: tuple[str, ...]


LAUNCHERS = (  # in a job of SLURM, the ranks of torchrun and mpirun inherit the numbers of the process that starts them
    Launcher("RANK", "WORLD_SIZE", local_rank=("LOCAL_RANK",), local_count="LOCAL_WORLD_SIZE", job=()),
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "PMI_RANK",
        "PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
        local_count="MPI_LOCALNRANKS",
        job=("SLURM_JOB_ID", "PMI_JOBID"),
    ),
    *(
        Launcher(
            "SLURM_PROCID",
            count,
            local_rank=("SLURM_LOCALID",),
            local_count=None,
            job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        )
        for count in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    ),
)


@dataclass(frozen=True)
class RankInfo:
    """Rank of one process, and the address where the ranks connect.

    Attributes:
        rank, count: index of the rank, and number of ranks.
        local_rank: index of the rank on its machine, which selects the GPU.
        address: host and port where the ranks connect.
        attempt: how often torchrun has restarted the ranks.
    """

    rank: int
    count: int
    local_rank: int
    address: tuple[str, int]
    attempt: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankInfo | None:
        """Return the rank that the environment variables `environ` define; None if no launcher has set them.

        Raises ExperimentError if the variables are inconsistent.
        """
        launcher = launcher_of(environ)
        if launcher is None:
            return None
        rank, count = (_number(environ, name) for name in (launcher.rank, launcher.count))
        if not 0 <= rank < count:
            raise ExperimentError(
                f"{launcher.rank} = {rank}: must be at least 0 and less than {launcher.count} = {count}"
            )
        local_rank, attempt = (_number(environ, *names) for names in (launcher.local_rank, [RESTARTS]))
        return cls(rank, count, local_rank, _address(environ, count, launcher), attempt)

    @classmethod
    def here(cls) -> RankInfo:
        """Return the rank of this process.

        Raises ExperimentError if no launcher has started the process.
        """
        rank_info = cls.of(os.environ)
        if rank_info is None:
            raise ExperimentError(
                'engine = "distributed": this process has no rank (RANK and WORLD_SIZE are not set); '
                f"start it with a launcher: {COMMAND}; or use another engine, such as engine=auto"
            )
        return rank_info


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that has set the environment variables `environ`; None if there is none.

    SLURM also sets a rank (0) in a batch script, which does not start ranks. Only `srun` does, and sets SLURM_STEP_ID.
    """
    is_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    launchers = [each for each in LAUNCHERS if environ.get(each.rank) and environ.get(each.count)]
    return next((launcher for launcher in launchers if not (launcher.rank == "SLURM_PROCID" and is_batch_script)), None)


def _number(environ: Mapping[str, str], *names: str) -> int:
    """Return the value of the first of the variables `names` that is set and not empty; 0 if there is none."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return 0
    try:
        return int(environ[name])
    except ValueError:
        raise ExperimentError(f"{name} = {environ[name]!r}: must be an integer") from None


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the value of the first of the variables `names` that is set and not empty; None if there is none."""
    return next((environ[name] for name in names if environ.get(name)), None)


def _address(environ: Mapping[str, str], count: int, launcher: Launcher) -> tuple[str, int]:
    """Return the host and port where the ranks connect, according to the launcher's environment variables.

    Args:
        environ: environment variables.
        count: number of ranks.
        launcher: launcher that has set the variables.
    """
    host = environ.get("MASTER_ADDR")
    if host is None and launcher.rank != "RANK":
        host = _host_from_slurm(environ, count)
    local = launcher.local_count
    if host is None and local is not None and local in environ and _number(environ, local) < count:
        raise ExperimentError(
            f"MASTER_ADDR is not set, although {count - _number(environ, local)} of {count} ranks are on other hosts; "
            "set it to the address of the host of rank 0"
        )
    if "MASTER_PORT" in environ:
        return host or LOOPBACK, _number(environ, "MASTER_PORT")
    job = " ".join(environ[name] for name in launcher.job if name in environ)
    if not job:
        return host or LOOPBACK, DEFAULT_PORT
    digest = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big")
    return host or LOOPBACK, PORTS[digest % len(PORTS)]


def _host_from_slurm(environ: Mapping[str, str], count: int) -> str | None:
    """Return the first host of a SLURM job or step that has several hosts, otherwise None.

    A step whose number of tasks is not `count`, the number of ranks, contains the daemons of mpirun, not the ranks.
    """
    is_step = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") == str(count)
    counts, lists = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_NODELIST",)
    n_hosts = _first_set(environ, *(counts if is_step else ()), "SLURM_JOB_NUM_NODES")
    hosts = _first_set(environ, *(lists if is_step else ()), "SLURM_JOB_NODELIST")
    return first_host(hosts) if hosts and n_hosts not in (None, "1") else None


def first_host(names: str) -> str | None:
    """Return the first host of a SLURM node list, such as `node03` for `node[03-07,9],other`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", names)
    return "".join(part or "" for part in match.groups()) if match else None


def open_store(init: str, rank_info: RankInfo, timeout: float) -> dist.Store:
    """Return the key-value store that all ranks share.

    Args:
        init: address where the ranks connect: `env://` (given by the launcher), `tcp://HOST:PORT`, or `file:///PATH`
            with a path that all ranks can access.
        rank_info: rank of this process. Rank 0 starts the store unless the launcher has started one.
        timeout: seconds to wait for the store.

    Raises OSError or RuntimeError if the store does not answer in time.
    """
    limit = timedelta(seconds=timeout)
    if init.startswith("file://"):
        return next(dist.rendezvous(init, rank_info.rank, rank_info.count, timeout=limit))[0]
    host, port = meeting_address(init, rank_info)
    launcher_leads = init == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = rank_info.rank == 0 and not launcher_leads
    if not leads:
        _wait_for_store(host, port, timeout)
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    listening = _listen(host, port) if leads and is_loopback else None
    return dist.TCPStore(
        host, port, rank_info.count, leads, timeout=limit, wait_for_workers=False, master_listen_fd=listening
    )


def _wait_for_store(host: str, port: int, timeout: float) -> None:
    """Wait until a TCPStore answers at `host` and `port`. Raises OSError if none answers within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(RETRY, deadline - time.monotonic())) as connection:
                connection.sendall(GREETING)
                if connection.recv(len(PING)) == PING:
                    return
            raise OSError(FOREIGN)
        except OSError as error:
            if time.monotonic() + RETRY > deadline:
                raise OSError(SILENT) if isinstance(error, TimeoutError) else error from None
        time.sleep(RETRY)


def meeting_address(init: str, rank_info: RankInfo) -> tuple[str, int]:
    """Return the host and port where the ranks connect: those of a `tcp://` URL in `init`, otherwise of `rank_info`."""
    if not init.startswith("tcp://"):
        return rank_info.address
    host, _, port = init.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> int:
    """Open a socket that accepts connections only at the address of `host`, and return its file descriptor."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = LOOPBACK if host == "localhost" else host, port
    return socket.create_server(address, family=family, backlog=2_048).detach()


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface, such as `eth0`, that reaches a host; None if unknown."""
    if sys.platform == "win32":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting a UDP socket sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def ranks(numbers: list[int]) -> str:
    """Format rank numbers for an error message, such as "rank 1" or "ranks 1, 2"."""
    return f"{plural(len(numbers), 'rank').partition(' ')[2]} {', '.join(map(str, numbers))}"


def backend_for(name: str | None, device: torch.device, gpus: list[str | None]) -> tuple[str, str | None]:
    """Return the torch.distributed backend to use, and why it is not PyTorch's default (None if it is the default).

    Args:
        name: requested backend; None for the default.
        device: device of this rank.
        gpus: identifier of each rank's GPU; None for a rank without a GPU.

    Raises ExperimentError if the requested backend is unknown, or is NCCL although ranks share a GPU.
    """
    chosen = (name or str(dist.get_default_backend_for_device(device))).lower()
    shared = next((gpu for gpu in gpus if gpu is not None and gpus.count(gpu) > 1), None)
    if chosen == "nccl" and shared:
        sharing = [rank for rank, gpu in enumerate(gpus) if gpu == shared]
        reason = f"{ranks(sharing)} share a GPU ({shared}), which NCCL does not support"
        if name is None:
            return HOST_BACKEND, reason
        raise ExperimentError(f'distributed.backend = "nccl": {reason}; use "{HOST_BACKEND}" or one rank per GPU')
    if chosen not in dist.Backend.backend_list:
        allowed = ", ".join(backend for backend in dist.Backend.backend_list if backend not in ("undefined", "mpi"))
        raise ExperimentError(
            f"distributed.backend = {show(name)}: not a backend of this PyTorch installation; allowed: {allowed}"
        )
    return chosen, None
