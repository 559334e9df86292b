from __future__ import annotations

import queue
import socket
import threading

import pytest
import torch

import fedsim
from fedsim.processes.process_group import RankGroup
from fedsim.processes.rendezvous import (
    LOOPBACK,
    PORTS,
    RankInfo,
    backend_for,
    interface_towards,
    meeting_address,
    open_store,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "400"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_NNODES": "4"}
SLURM = {**BATCH, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
OPENMPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job-1"},
}


def test_torchruns_environment_and_a_plain_one():
    assert RankInfo.of(TORCHRUN) == RankInfo(3, 4, 1, ("10.0.0.1", 400))
    assert RankInfo.of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2
    assert RankInfo.of({"RANK": "0", "WORLD_SIZE": "2"}) == RankInfo(0, 2, 0, (LOOPBACK, 29_500))
    assert RankInfo.of({}) is None


def test_slurms_ranks_meet_at_its_first_host_and_at_a_port_of_the_job():
    rank_info = RankInfo.of({**SLURM, "SLURM_JOB_NODELIST": "node[07-09,12],other"})
    assert (rank_info.rank, rank_info.count, rank_info.local_rank, rank_info.address[0]) == (5, 8, 1, "node07")
    assert rank_info.address[1] in PORTS
    assert rank_info == RankInfo.of({**SLURM, "SLURM_JOB_NODELIST": "node[07-09,12],other", "SLURM_LOCALID": "1"})
    assert rank_info.address[1] != RankInfo.of({**SLURM, "SLURM_JOB_ID": "78"}).address[1]
    assert RankInfo.of({**SLURM, "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node07"}).address[0] == LOOPBACK
    assert RankInfo.of({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "9"}).address == ("here", 9)


def test_only_steps_of_slurm_are_ranks():
    assert RankInfo.of(BATCH) is None, "a batch script runs once, whatever --ntasks says"
    shell = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert RankInfo.of(shell).count == 1, "an interactive shell is a step of one task"
    assert RankInfo.of({**SLURM, "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6"}).count == 6
    assert RankInfo.of({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}).rank == 1, "set by hand, outside a job"


def test_steps_of_the_same_job_meet_at_their_own_hosts_and_ports():
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[09,12]"}
    one, two = (RankInfo.of({**SLURM, **step, "SLURM_STEP_ID": number}) for number in "12")
    assert one.address[0] == two.address[0] == "node09"
    assert one.address[1] != two.address[1]
    assert RankInfo.of({**SLURM, **step, "SLURM_STEP_NUM_NODES": "1"}).address[0] == LOOPBACK


def test_torchrun_within_a_job_of_slurm_goes_by_torchrun():
    assert RankInfo.of({**SLURM, **TORCHRUN}).rank == 3


@pytest.mark.parametrize(
    ("rank", "count", "named"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE": "job-1"}),
        ("PMI_RANK", "PMI_SIZE", {"PMI_JOBID": "job-1"}),
    ],
)
def test_mpiruns_ranks_within_a_job_of_slurm_meet_at_the_jobs_first_host(rank, count, named):
    """Ranks on the first host inherit the variables of the batch script, and the others those of mpirun's daemons."""
    job = {**BATCH, **named, "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[07-09].x,m[1-2]", count: "8"}
    daemon = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2"}
    daemon |= {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[08-09].x", "SLURM_PROCID": "1"}
    first, last = RankInfo.of({**job, rank: "0"}), RankInfo.of({**job, **daemon, rank: "7"})
    assert (first.rank, last.rank, first.count, last.count) == (0, 7, 8, 8)
    assert first.address == last.address
    assert first.address[0] == "n07.x"


def test_a_rank_that_srun_starts_through_pmi_has_the_local_rank_of_slurm():
    rank_info = RankInfo.of({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_JOB_NODELIST": "a,b"})
    assert (rank_info.rank, rank_info.count, rank_info.local_rank, rank_info.address[0]) == (5, 8, 1, "a")


def test_mpiruns_ranks_on_several_hosts_need_an_address():
    rank_info = RankInfo.of(OPENMPI)
    assert (rank_info.rank, rank_info.count, rank_info.local_rank, rank_info.address[0]) == (1, 2, 1, LOOPBACK)
    with pytest.raises(fedsim.ExperimentError, match="MASTER_ADDR is not set, although 1 of 2 ranks"):
        RankInfo.of({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK = 'two': must be an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: must be at least 0 and less than WORLD_SIZE = 2"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environ, line):
    with pytest.raises(fedsim.ExperimentError, match=line):
        RankInfo.of(environ)


def test_the_store_listens_on_loopback_alone():
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    rank_info = RankInfo(0, 1, 0, (LOOPBACK, port))
    store = open_store("env://", rank_info, 5.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=2)  # another address of this machine
    assert meeting_address("tcp://host:12", rank_info) == ("host", 12)
    with pytest.raises(OSError, match="already in use"):
        open_store("env://", rank_info, 0.2)  # the port is taken


def silence(connection):
    pass


def garbage(connection):
    connection.sendall(b"HTTP/1.1 400 Bad Request")


def ping(connection):
    """Greet like rank 0, after which PyTorch's own client waits for an answer without a timeout."""
    connection.sendall(connection.recv(100)[-4:])


GREETINGS = silence, garbage, ping, socket.socket.close


def impostor(greet, contacts):
    """Return the port of a program that greets its first connection and does not answer later ones."""
    listener = socket.create_server((LOOPBACK, 0))

    def serve():
        connections = []
        while True:
            connections.append(listener.accept()[0])
            if len(connections) == 1:
                greet(connections[0])
            contacts.put(len(connections))

    threading.Thread(target=serve, daemon=True).start()
    return str(listener.getsockname()[1])


@pytest.mark.parametrize("greet", [silence, garbage, socket.socket.close])
def test_a_program_that_is_not_rank_0_is_not_accepted_as_the_store(greet):
    rank_info = RankInfo(1, 2, 0, (LOOPBACK, int(impostor(greet, queue.SimpleQueue()))))
    with pytest.raises(OSError, match="the process at this address"):
        open_store("env://", rank_info, 0.5)


def test_the_interface_towards_this_machine_is_its_loopback():
    assert interface_towards(LOOPBACK) in ("lo", "lo0", None)
    assert interface_towards("no.such.host.invalid") is None


CUDA = torch.device("cuda")


def test_nccl_is_not_used_by_ranks_that_share_a_gpu():
    assert backend_for(None, CUDA, ["a 1", "a 2", "b 1"]) == ("nccl", None)
    assert backend_for(None, CUDA, ["a 1", "b 1", "a 1"]) == (
        "gloo",
        "ranks 0, 2 share a GPU (a 1), which NCCL does not support",
    )
    with pytest.raises(
        fedsim.ExperimentError, match='"nccl": ranks 0, 1 share a GPU .* use "gloo" or one rank per GPU'
    ):
        backend_for("NCCL", CUDA, ["a 1", "a 1"])
    assert backend_for("gloo", CUDA, ["a 1", "a 1"]) == ("gloo", None)
    with pytest.raises(fedsim.ExperimentError, match=r'distributed.backend = "glo": .* allowed: gloo'):
        backend_for("glo", CUDA, [None])


@pytest.mark.parametrize(("rank", "sharing"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_a_rank_counts_those_that_use_its_own_gpu(rank, sharing):
    """Not the others of its host, nor those of another host with GPUs of the same name."""
    group = object.__new__(RankGroup)
    group.index, group._gpus = rank, ["a 1", "a 2", "a 1", "b 1"]
    assert group.sharing == sharing
