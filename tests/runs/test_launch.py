"""Under a launcher, the engine `auto` is `distributed`. With another engine, each rank runs its own copy."""

from __future__ import annotations

import warnings

import pytest

import fedsim
from fedsim.errors import FedsimWarning
from fedsim.processes.rendezvous import LAUNCHERS
from fedsim.runs.launch import launched_ranks, under_launcher

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
LAUNCHED = {
    "by hand": ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE = 2"),
    "srun": (SRUN, "SLURM_NTASKS = 2"),
    "srun with a step": ({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS = 2"),
    "a step of an array job": ({**SRUN, "SLURM_ARRAY_TASK_ID": "3"}, "SLURM_NTASKS = 2"),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 2"),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE = 2"),
}
NOT_LAUNCHED = {
    "nothing": {},
    "torchrun with one process": {"RANK": "0", "WORLD_SIZE": "1"},
    "no rank": {"WORLD_SIZE": "2"},
    "empty variables": {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
    "no number of ranks": {"RANK": "1"},
    "a batch script of SLURM": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    "a task of an array job": {**SRUN, "SLURM_NTASKS": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"},
    "an allocation": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
    "torchrun with one process in a step": {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
}


@pytest.fixture
def surroundings(monkeypatch):
    """Return a function that sets the environment variables of a launcher, and no others."""
    for launcher in LAUNCHERS:
        for name in (launcher.rank, launcher.count, *launcher.local_rank, *launcher.job):
            monkeypatch.delenv(name, raising=False)

    def set_to(environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize("case", LAUNCHED)
def test_under_a_launcher_auto_is_distributed_and_a_named_engine_runs_copies_with_a_warning(
    case, surroundings, tiny_experiment
):
    environ, named = LAUNCHED[case]
    surroundings(environ)
    assert launched_ranks() == named
    auto = fedsim.Experiment(**{**tiny_experiment, "engine": "auto"})
    ranked = under_launcher(auto)
    assert ranked.engine == "distributed"
    assert ranked.resolved() == {**auto.resolved(), "engine": "distributed"}
    for engine in ("serial", "processes", "batched", "distributed"):
        experiment = fedsim.Experiment(**{**tiny_experiment, "engine": engine})
        assert under_launcher(experiment) is experiment
    with pytest.warns(FedsimWarning) as caught:
        fedsim.run(tiny_experiment, rounds=1)
    line = f'engine = "serial": each rank of the launcher ({named}) runs its own copy'
    assert [str(warning.message) for warning in caught] == [line]


@pytest.mark.parametrize("case", NOT_LAUNCHED)
def test_without_further_ranks_auto_stays_auto(case, surroundings, tiny_experiment):
    surroundings(NOT_LAUNCHED[case])
    experiment = fedsim.Experiment(**{**tiny_experiment, "engine": "auto"})
    assert under_launcher(experiment) is experiment
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedsimWarning)
        fedsim.run(tiny_experiment, rounds=1)


def test_only_rank_0_says_so_and_an_odd_environment_does_not_disturb(surroundings, tiny_experiment):
    for environ in ({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "two", "WORLD_SIZE": "2"}):
        surroundings(environ)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FedsimWarning)
            fedsim.run(tiny_experiment, rounds=1)
    with pytest.raises(fedsim.ExperimentError, match="RANK = 'two': must be an integer"):
        fedsim.run(tiny_experiment, engine="auto")


@pytest.mark.parametrize("mode", ["clock", "race"])
def test_what_ranks_cannot_divide_is_refused_in_one_line(mode, surroundings, tiny_experiment):
    surroundings({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run(tiny_experiment, engine="auto", mode=mode, policy="hogwild")
    assert caught.value.lines == (
        'engine = "auto": means engine=distributed under a launcher (WORLD_SIZE = 2), which cannot run this '
        'experiment: policy.name = "hogwild": the engine "distributed" only supports synchronous rounds; '
        "use another engine",
    )


def test_a_dry_run_shows_the_engine_of_the_ranks(surroundings, cli):
    surroundings({"RANK": "1", "WORLD_SIZE": "2"})
    assert 'engine = "distributed"' in cli("run", "--dry-run").stdout
    assert 'engine = "batched"' in cli("run", "engine=batched", "--dry-run").stdout


COMPARED = "data=tests.components:tiny", "model=logistic", "rounds=1", "seed=0,1", "--jobs", "1"


def test_a_comparison_of_ranks_names_an_engine_or_a_shard(surroundings, cli, tiny_experiment):
    surroundings({"RANK": "0", "WORLD_SIZE": "2"})
    refused = cli("compare", *COMPARED, "--out", "whole")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == (
        'error: engine = "auto": a comparison does not divide its runs among the ranks of a launcher (WORLD_SIZE = 2); '
        "start it without the launcher, give each rank a part with --shard i/n, or name an engine, such as "
        "engine=serial, with which each rank runs the whole comparison\n"
    )
    assert cli("compare", *COMPARED, "--dry-run").stderr == refused.stderr
    with pytest.raises(fedsim.ExperimentError, match="--shard i/n"):
        fedsim.compare({**tiny_experiment, "engine": "auto"}, {"seed": [0, 1]})
    shard = cli("compare", *COMPARED, "--shard", "0/2", "--out", "sweep")
    assert (shard.exit_code, shard.stderr) == (0, "")
    with warnings.catch_warnings():
        warnings.simplefilter("always", FedsimWarning)  # printed, as outside of the tests
        whole = cli("compare", *COMPARED, "engine=serial", "--out", "whole")
    line = 'warning: engine = "serial": each rank of the launcher (WORLD_SIZE = 2) runs its own copy\n'
    assert (whole.exit_code, whole.stderr) == (0, line)
