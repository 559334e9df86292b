"""Program of each test rank, which executes many runs: torchrun ... rank_program.py CASES.json OUT"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import socket
import stat
import struct
import sys
import termios
import time
from pathlib import Path

import torch

import fedsim
from fedsim.config.load import load_experiment
from fedsim.engines import DistributedEngine
from fedsim.processes.process_group import RankGroup
from fedsim.runs.setup import begun
from fedsim.training.parallel_trainer import ParallelTrainer
from tests.engines.torch_post_local import post_local_row
from tests.waves import in_waves

MEASURED = ("an adaptive server", "uneven shards, by gradients")  # cases whose tensor shapes are checked
BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info


def main(cases: Path, out: Path) -> None:
    """Run the cases (tables by name) and save their results as OUT/RANK.pt. A failed case is the last one."""
    torch.set_num_threads(1)
    results = {}
    for name, tables in json.loads(cases.read_text()).items():
        try:
            results[name] = outcome({**tables, "engine": "distributed"}, out / name.replace(" ", "-"), name in MEASURED)
        except fedsim.ExperimentError as error:
            results[name] = {"error": str(error)}
            break
        if len(results) == 1 and RankGroup.joined.count == 2:
            results[name]["post_local"] = post_local_row()
    gc.collect()
    results["trainers left"] = sum(isinstance(thing, ParallelTrainer) for thing in gc.get_objects())
    torch.save(results, out / f"{os.environ['RANK']}.pt")


def outcome(tables: dict, folder: Path, measured: bool) -> dict:
    large = tables.pop("in waves", False)
    with in_waves() if large else contextlib.nullcontext(), fedsim.Session() as session:
        settings: list = []
        before = acknowledged()
        out = folder if tables.get("records") else None
        result = fedsim.run(tables, out=out, session=session, on_start=settings.append)
        return {
            "row": result.global_row,
            "state": result.model.state_dict(),
            "history": result.history,
            "wire": acknowledged() - before,
            "how": settings[0].how,
            "shapes": shapes(tables, session) if measured else None,
        }


def shapes(tables: dict, session: fedsim.Session) -> dict[str, list[int]]:
    """Return the shapes of a rank's rows and server state in a run of this experiment."""
    experiment = load_experiment(tables)
    with DistributedEngine.joined(experiment.resolved()), begun(experiment, session) as (_, engine):
        states = engine.shared.server.states.values()
        return {
            "rows": list(engine.shared.cohort.rows.shape),
            "states": [len(tensor) for state in states for tensor in state.values()],
        }


def acknowledged() -> int:
    """Return how many bytes this process has sent to others, as acknowledged by their kernels (0 except on Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                    deadline = time.monotonic() + 10
                    while _on_the_way(connection) and time.monotonic() < deadline:
                        time.sleep(0.001)
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", told, BYTES_ACKED)[0]
    return total


def _on_the_way(connection: socket.socket) -> int:
    """Return how many bytes have been written to a connection but not yet acknowledged."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
