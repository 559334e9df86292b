"""An interrupted and resumed run has bitwise the same result as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.errors import FedsimWarning
from fedsim.records import checkpoints
from fedsim.records.run_folder import RunFolder
from fedsim.runs import resume
from fedsim.runs.resume import ResumeState, _warn_of_other_rounding
from tests.matrix import in_turn

ROUNDS = 5
EVERY = {"checkpoint": {"every": 1, "keep": 100}}
BASE = {
    **{"rounds": ROUNDS, "workers": 4, "engine": "serial", "model": "logistic", "data": "tests.components:tiny"},
    **{"local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5, "steps": 3}, **EVERY, "records": {"curve": False}},
}
TIMED = {"mode": "clock", "clock": {"slowdown": {"name": "lognormal"}, "noise": "shifted_exponential"}}

CASES = {
    "server optimizer": {"cohort": 2, "server": "yogi", "precision": "float64"},
    "slow momentum": {
        "server": {"name": "momentum", "lr": 0.5, "beta": 0.9},
        "processors": ["qsgd", {"name": "gaussian_noise", "std": 0.1}],
    },
    "compressors in both directions": {
        **{"cohort": 2, "downlink": [{"name": "powersgd", "rank": 1}, "qsgd"]},
        "processors": [{"name": "powersgd", "rank": 1, "error_feedback": True}, "cast"],
    },
    "rule with a state": {
        **{"aggregate": {"rule": "foolsgold"}, "workers": 6, "cohort": 4, "partition": {"name": "shards", "s": 2}}
    },
    "rule that goes on from the last update": {
        **{"workers": 5, "attack": {"name": "alie", "fraction": 0.2, "z": 1.5}},
        "aggregate": {"rule": "centered_clipping", "tau": 0.05},
    },
    "attack with a state": {
        **{"workers": 5, "aggregate": "median", "attack": {"name": "mimic", "workers": [3], "warmup": 4}}
    },
    "gradients, then parameters": {"sync": "post_local", "switch_after_round": 4, "server": "adam"},
    "worker state and messages": {
        **{"local": {"algorithm": "tests.components:Counting"}, "workers": 50, "cohort": 3},
        **{"model": "tests.models:Normalised", "buffers": "local"},
    },
    "numbers that differ between workers": {
        **{
            "local": {
                "lr": {"uniform": [0.01, 0.1]},
                "momentum": [0.0, 0.5, 0.9, 0.1],
                "batch_size": {"choice": [8, 16]},
            }
        },
        "cohort": 2,
    },
    "scaffold": {"local": {"algorithm": "scaffold", "batch_size": 16}, "workers": 6, "cohort": 3},
    "feddyn": {"local": {"algorithm": "feddyn", "batch_size": 16}, "workers": 6, "cohort": 3, "aggregate": "mean"},
    "personal parameters": {
        **{"local": {"algorithm": "fedrep", "personal": ["*.bias"], "steps": 3, "head_steps": 1}, "cohort": 2}
    },
    "several global models": {
        **{"local": {"algorithm": "ifca", "k": 2, "steps": 3}, "workers": 6, "cohort": 3},
        **{"model": "tests.models:Normalised", "buffers": "average"},
    },
    "features": {"local": {"algorithm": "moon", "steps": 3}, "cohort": 2, "model": "2nn"},
    "virtual shards, on the clock": {**TIMED, "partition": "tests.components:some", "workers": 50, "cohort": 3},
    "cohorts of available workers, on the clock": {
        **{**TIMED, "workers": 9, "cohort": 2, "sampling.dropout_rate": 0.3},
        **{"sampling": {"name": "daily", "period": 10.0}, "aggregate": {"weights": "inverse_probability"}},
    },
}

NEEDED = {"k_sync": {"k": 2}, "k_async": {"k": 2}, "basgd": {"b": 2}}
ASYNCHRONOUS = {
    **{name: {**TIMED, "policy": {"name": name, **NEEDED.get(name, {})}} for name in policy.names()},
    "fedbuff, sampled": {**TIMED, "policy": "fedbuff", "workers": 6, "cohort": 3},
    "asgd, workers leave": {
        **{**TIMED, "policy": "asgd", "clock": {**TIMED["clock"], "departures": {"1": 8.0}}},
        "local": {"algorithm": "adam", "batch_size": 16, "steps": 3},
    },
    "fedbuff, worker state": {
        **{
            **TIMED,
            "policy": "fedbuff",
            "workers": 6,
            "cohort": 3,
            "local": {"algorithm": "tests.components:Counting"},
        },
        **{"model": "tests.models:Normalised", "buffers": "local"},
    },
    "fedbuff, personal parameters": {
        **{**TIMED, "policy": "fedbuff", "workers": 6, "cohort": 3},
        "local": {"algorithm": "fedper", "personal": ["*.bias"], "steps": 3},
    },
    "fedbuff, buffers": {**TIMED, "policy": "fedbuff", "model": "tests.models:Normalised"},
}
del ASYNCHRONOUS["sync"]


@pytest.fixture
def tables():
    return dict(BASE)


def records(folder):
    """Return the records of a run folder without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def broken_off(whole, folder, round):
    """Copy a run folder as it would be after a crash in the round after `round`, and return the copy."""
    shutil.copytree(whole, folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:round]) + "".join(lines[round : round + 1])[:40])
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("round-")) > round:
            path.unlink()
    for name in ("model.safetensors", "curve.png"):
        (folder / name).unlink(missing_ok=True)
    for part in (".environment.json.part", ".curve.svg.part", "checkpoints/.round-00002.safetensors.part"):
        (folder / part).write_text("half")
    return folder


def assert_the_same(ours, theirs, result=None, whole=None):
    assert records(ours) == records(theirs)
    our_tensors, their_tensors = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert our_tensors.keys() == their_tensors.keys()
    assert all(torch.equal(our_tensors[name], their_tensors[name]) for name in our_tensors)
    assert not list(ours.rglob(".*"))
    if result is not None:
        assert torch.equal(result.global_row, whole.global_row)
        assert len(result.history) == len(whole.history)


@pytest.mark.parametrize("case", CASES | ASYNCHRONOUS)
def test_a_resumed_run_has_bitwise_the_same_result(case, tables, tmp_path, session):
    tables |= (CASES | ASYNCHRONOUS)[case]
    if case == "eamsgd":
        tables["local"] = {**tables["local"], "momentum": 0.5}
    whole = fedsim.run(tables, tmp_path / "whole", session=session)
    round = random.Random(case).randrange(1, ROUNDS)
    folder = broken_off(tmp_path / "whole", tmp_path / "again", round)
    result = fedsim.run(tables, folder, resume=True, session=session)
    assert_the_same(folder, tmp_path / "whole", result, whole)
    assert json.loads((folder / "environment.json").read_text())["resumed"][0]["after_round"] == round


def test_a_run_that_starts_again_notes_how_it_is_computed_now(tables, tmp_path):
    """Without a checkpoint, nothing of the first attempt is left."""
    tables |= {"checkpoint": {"every": 0}, "engine": "serial"}
    fedsim.run(tables, tmp_path / "run", rounds=1)
    fedsim.run({**tables, "engine": "processes", "processes": 2}, tmp_path / "run", rounds=2, resume=True)
    metadata = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (metadata["engine"], metadata["processes"], metadata["resumed"][0]["after_round"]) == ("processes", 2, 0)


@in_turn(
    ("case", "engine"),
    ["rule with a state", "fedbuff, sampled", "feddyn", "scaffold"],
    [{"engine": "processes", "processes": 2}, {"engine": "batched", "processes": 1}],
)
def test_other_engines_resume_with_bitwise_the_same_result(case, engine, tables, tmp_path, session):
    tables |= {**(CASES | ASYNCHRONOUS)[case], **engine}
    whole = fedsim.run(tables, tmp_path / "whole", session=session)
    folder = broken_off(tmp_path / "whole", tmp_path / "again", 2)
    assert_the_same(folder, tmp_path / "whole", fedsim.run(tables, folder, resume=True, session=session), whole)


def test_without_a_checkpoint_the_run_starts_again(tables, tmp_path):
    tables["checkpoint"] = {"every": 0}
    whole = fedsim.run(tables, tmp_path / "whole")
    assert not (tmp_path / "whole" / "checkpoints").exists()
    (tmp_path / "whole" / "checkpoints").mkdir()
    folder = broken_off(tmp_path / "whole", tmp_path / "again", 3)
    with pytest.warns(FedsimWarning, match=r"again: has no checkpoint, so the run starts again from round 1; set"):
        result = fedsim.run(tables, folder, resume=True)
    assert_the_same(folder, tmp_path / "whole", result, whole)


LONGER = {
    **{name: (CASES | ASYNCHRONOUS)[name] for name in ("gradients, then parameters", "fedbuff")},
    "schedules": {"planned_rounds": 7, "local.schedule": "cosine", "server.schedule": "one_cycle"},
    "schedule by steps": {"local.schedule": {"name": "cosine", "per": "step"}},
    "tests of workers": {
        **{"data": {"name": "tests.components:tiny", "local_test_fraction": 0.2}, "worker_evaluation": {"every": 3}},
        **{"stop": {"metric": "worker_loss", "patience": 1, "min_delta": 9.0}, "records.updates": [4]},
    },
}


@pytest.mark.parametrize("experiment", LONGER)
def test_a_resumed_run_with_more_rounds_equals_the_longer_run(experiment, tables, tmp_path):
    tables |= LONGER[experiment]
    longer = fedsim.run(tables, tmp_path / "longer", rounds=7)
    shorter = fedsim.run(tables, tmp_path / "shorter", rounds=4)
    assert (shorter.stopped, shorter.worker_accuracy is None) == (None, experiment != "tests of workers")
    assert fedsim.load_run(tmp_path / "shorter", allow_imports=True).stopped is None

    def interrupt(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fedsim.run(tables, tmp_path / "shorter", rounds=7, resume=True, on_round=interrupt)
    result = fedsim.run(tables, tmp_path / "shorter", rounds=7, resume=True)
    assert_the_same(tmp_path / "shorter", tmp_path / "longer", result, longer)
    assert result.stopped == longer.stopped
    files = [{path.name for path in folder.glob("*-0*")} for folder in (tmp_path / "shorter", tmp_path / "longer")]
    assert files[0] == files[1]


def test_a_longer_run_keeps_the_plan_of_the_first_run(tables, tmp_path):
    tables |= {"local.schedule": "cosine", "server.schedule": {"name": "cosine", "warmup": 1}}
    fedsim.run(tables, tmp_path / "run", rounds=3)
    for rounds in (4, 6):
        line = (
            f"^rounds = {rounds}: planned_rounds stays 3 for local.schedule and server.schedule, as in the first run; "
            f"set planned_rounds={rounds} to change this$"
        )
        with pytest.warns(FedsimWarning, match=line):
            result = fedsim.run(tables, tmp_path / "run", rounds=rounds, resume=True)
    assert fedsim.run(tables, tmp_path / "run", rounds=6, resume=True).experiment.planned_rounds == 3
    fedsim.run(tmp_path / "run" / "experiment.toml", tmp_path / "again", allow_imports=True)
    assert_the_same(tmp_path / "again", tmp_path / "run")
    assert not torch.equal(result.global_row, fedsim.run(tables, rounds=6).global_row)


def test_ranks_are_asked_for_the_plan_of_the_first_run(tables, tmp_path):
    """Rank 0 alone reads the folder, so it must not change the plan."""
    tables |= {"local.schedule": "cosine"}
    fedsim.run(tables, tmp_path / "run", rounds=3)
    tables |= {"engine": "distributed", "rounds": 6}
    with RunFolder(tmp_path / "run", resume=True) as folder:
        line = "but only rank 0 reads this number from the folder; add planned_rounds=3$"
        with pytest.raises(fedsim.ExperimentError, match=line):
            ResumeState(folder, fedsim.load_experiment(tables))
        with pytest.warns(FedsimWarning, match="planned_rounds stays 3"):
            same = ResumeState(folder, planned := fedsim.load_experiment(tables | {"planned_rounds": 3})).experiment
        assert same.resolved() == planned.resolved()


def test_settings_of_the_plan_may_change_and_the_folder_says_so(tables, tmp_path):
    tables |= {"local.schedule": {"name": "cosine", "T_max": 5}, "server.schedule": "one_cycle"}
    fedsim.run(tables, tmp_path / "run", rounds=3)
    with (
        pytest.warns(FedsimWarning, match="planned_rounds stays 3 for server.schedule, as"),
        pytest.raises(fedsim.ExperimentError, match=r"server.schedule.name: .* set planned_rounds to the number of ro"),
    ):
        fedsim.run(tables, tmp_path / "run", rounds=6, resume=True)
    tables |= {"planned_rounds": 6, "local.schedule": {"name": "cosine", "T_max": 6}}
    lines = ["local.schedule.T_max: 5 there, 6 here", "planned_rounds: 3 there, 6 here"]
    with pytest.warns(FedsimWarning, match=f"changes after round 3: {'; '.join(lines)}$"):
        fedsim.run(tables, tmp_path / "run", rounds=6, resume=True)
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    assert event == {"event": "changed", "round": 3, "settings": lines}


def test_a_period_that_is_set_replaces_the_plan_without_a_warning_about_the_plan(tables, tmp_path):
    fedsim.run(tables, tmp_path / "run", rounds=3, local={"schedule": "cosine"}, planned_rounds=4)
    stored = fedsim.load_experiment(tmp_path / "run" / "experiment.toml", allow_imports=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        changes = {"rounds": 6, "local.schedule.T_max": 9}
        result = fedsim.run(stored.resolved() | changes, tmp_path / "run", resume=True, allow_imports=True)
    assert result.experiment.planned_rounds is None
    assert [str(warning.message) for warning in caught if "planned_rounds has no effect" in str(warning.message)] == []


def test_an_edited_experiment_is_refused_unless_the_command_line_restores_it(tmp_path, cli):
    words = "data=tests.components:tiny", "model=logistic", "workers=3", "rounds=2", "checkpoint.every=1"
    assert cli("run", *words, "--out", "run").exit_code == 0
    file = tmp_path / "run" / "experiment.toml"
    edited = file.read_text().replace("seed = 0", "seed = 5").replace("lr = 0.05", "lr = 0.5")
    file.write_text(edited.replace("rounds = 2", "rounds = 3"))
    lines = [
        f"run: holds another experiment: {line}" for line in ("seed: 0 there, 5 here", "local.lr: 0.05 there, 0.5 here")
    ]
    resumed = cli("run", "--resume", "run", "--allow-imports")
    assert (resumed.exit_code, resumed.stderr.splitlines()) == (2, [f"error: {line}" for line in lines])
    assert cli("run", "--resume", "run", "seed=0", "local.lr=0.05", "--allow-imports").exit_code == 0
    assert len(records(tmp_path / "run")) == 3


def test_resuming_a_finished_run_changes_nothing(tables, tmp_path):
    whole = fedsim.run(tables, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    again = fedsim.run(tables, tmp_path / "run", resume=True, on_round=pytest.fail)
    assert_the_same(tmp_path / "run", tmp_path / "before", again, whole)


def test_a_resumed_run_keeps_the_width_of_its_stacks(tables, tmp_path):
    """On a GPU, the default depends on the memory of the GPU."""
    tables |= {"engine": "batched", "processes": 1}
    whole = fedsim.run({**tables, "batched": {"stack_size": 3}}, tmp_path / "whole")
    folder = broken_off(tmp_path / "whole", tmp_path / "again", 2)
    result = fedsim.run(tables, folder, resume=True)
    assert torch.equal(result.global_row, whole.global_row)
    assert json.loads((folder / "environment.json").read_text())["width"] == 3


def test_a_width_that_is_set_is_that_of_the_resumed_run(tables, tmp_path):
    tables |= {"engine": "batched", "processes": 1}
    fedsim.run({**tables, "batched": {"stack_size": 3}}, tmp_path / "whole")
    folder, metadata = broken_off(tmp_path / "whole", tmp_path / "again", 2), []
    with pytest.warns(FedsimWarning, match=r"in stacks of 3, now in stacks of 2$"):
        fedsim.run({**tables, "batched": {"stack_size": 2}}, folder, resume=True, on_start=metadata.append)
    assert metadata[0].how["width"] == 2


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"ranks": 2}, {"ranks": 3}, "one by one on 2 ranks, now one by one on 3 ranks"),
        ({"ranks": 2}, {}, "one by one on 2 ranks, now one by one"),
        ({"width": 4}, {"width": 5}, "in stacks of 4, now in stacks of 5"),
        ({"width": 4}, {"width": 4, "ranks": 2}, "in stacks of 4, now in stacks of 4 on 2 ranks"),
    ],
)
def test_ranks_and_stacks_decide_how_sums_are_rounded(before, now, told):
    with pytest.warns(FedsimWarning, match=f"before, workers were trained {told}$"):
        _warn_of_other_rounding(before, now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_other_rounding(before, dict(before))


def test_another_experiment_is_refused_with_the_differences(tables, tmp_path):
    fedsim.run(tables, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run({**tables, "seed": 3, "server": "adam", "rounds": 2}, tmp_path / "run", resume=True)
    rounds = "rounds: 5 there, 2 here; a resumed run cannot have fewer rounds"
    for line in ("seed: 0 there, 3 here", 'server.name: "sgd" there, "adam" here', rounds):
        assert f"{tmp_path / 'run'}: holds another experiment: {line}" in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


class Pair(torch.nn.Linear):
    """A linear model of two inputs."""

    def __init__(self):
        super().__init__(9, 3)

    def forward(self, image, table):
        return super().forward(torch.cat([image, table], 1))


def brought(kind, change=None):
    """Return training and test data of one kind, after one change of the training data."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(80, 6, generator=generator), torch.arange(80) % 3
    inputs[5, 2] += change == "one input"
    targets[:40] = targets[:40].flip(0) if change == "targets" else targets[:40]
    table = inputs[:, :3] + (change == "second input")
    parts = [slice(36 if change == "samples" else 40), slice(40, None)]
    train, test = [
        {
            "arrays": (inputs[part].numpy(), targets[part].numpy()),
            "several inputs": ({"image": inputs[part], "table": table[part]}, targets[part]),
            "tensors": fedsim.TensorData(inputs[part], targets[part], 2.0 if change == "scale" else 1.0),
            "samples": list(zip(inputs[part], targets[part].tolist(), strict=True)),
        }[kind]
        for part in parts
    ]
    return train, test


INPUT, TARGETS = "training inputs", "training targets"


@pytest.mark.parametrize(
    ("kind", "change", "names"),
    [
        ("arrays", "one input", f"{INPUT} differ"),
        ("arrays", "samples", f"{INPUT}, {TARGETS}, shards"),
        ("several inputs", "second input", "training inputs.table, test inputs.table differ"),
        ("tensors", "scale", "training scaling, test scaling differ"),
        ("samples", "targets", f"{TARGETS} differ"),
    ],
)
def test_a_run_is_not_resumed_with_other_data(kind, change, names, tables, tmp_path):
    tables |= {"model": Pair if kind == "several inputs" else "mlp", "rounds": 2}
    fedsim.run({**tables, "data": brought(kind)}, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run({**tables, "data": brought(kind, change)}, tmp_path / "run", rounds=3, resume=True)
    (line,) = caught.value.lines
    assert f"holds a run with other data: {names}" in line
    assert line.endswith("differ; use the same data, or another folder")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    result = fedsim.run({**tables, "data": brought(kind)}, tmp_path / "run", rounds=3, resume=True)
    assert len(result.history) == 3


def test_a_changed_file_or_partition_is_noticed(tables, tmp_path):
    path = tmp_path / "data.npz"
    tables |= {"model": "mlp", "data": str(path), "rounds": 1}
    for change in (None, "one input"):
        (inputs, targets), _ = brought("arrays", change)
        np.savez(path, inputs=inputs, targets=targets)
        if change:
            with pytest.raises(fedsim.ExperimentError, match="holds a run with other data: "):
                fedsim.run(tables, tmp_path / "run", rounds=2, resume=True)
        else:
            fedsim.run(tables, tmp_path / "run")
    tables |= {"data": brought("arrays")}
    first = 0
    tables["partition"] = lambda labels, n_workers: np.array_split(np.roll(np.arange(len(labels)), first), n_workers)
    fedsim.run(tables, tmp_path / "other")
    first = 1
    with pytest.raises(fedsim.ExperimentError, match="holds a run with other data: shards differ"):
        fedsim.run(tables, tmp_path / "other", rounds=2, resume=True)


def test_a_checkpoint_without_hashes_of_the_data_is_resumed(tables, tmp_path):
    fedsim.run(tables, tmp_path / "run", rounds=1)
    for head in (tmp_path / "run" / "checkpoints").glob("*.json"):
        assert "data" in json.loads(head.read_text())["metadata"]
        signed(head, lambda said, state: said["metadata"].pop("data"))
    assert len(fedsim.run(tables, tmp_path / "run", rounds=2, resume=True).history) == 2


def test_on_another_cpu_other_data_is_only_told(tables, tmp_path, monkeypatch):
    tables |= {"model": "mlp", "rounds": 1}
    fedsim.run({**tables, "data": brought("arrays")}, tmp_path / "run")
    here = resume.describe_environment()
    monkeypatch.setattr(resume, "describe_environment", lambda: {**here, "cpu_capability": "ABACUS"})
    told = pytest.warns(FedsimWarning, match="processor was")
    with told, pytest.warns(FedsimWarning, match=f"other data: {INPUT} differ, perhaps only by rounding; the run"):
        fedsim.run({**tables, "data": brought("arrays", "one input")}, tmp_path / "run", rounds=2, resume=True)


def test_a_run_without_checkpoints_hashes_no_data(tables, tmp_path, monkeypatch):
    monkeypatch.setattr("fedsim.runs.live_run.digests_of", None)
    fedsim.run({**tables, "rounds": 1, "checkpoint": {"every": 0}}, tmp_path / "run")
    fedsim.run({**tables, "rounds": 1})


@pytest.mark.filterwarnings("always")
def test_another_engine_resumes_a_run_and_names_the_settings_that_it_does_not_use(tmp_path, cli):
    words = "data=tests.components:tiny", "model=logistic", "workers=4", "rounds=4", "checkpoint.every=1"
    words += ("checkpoint.keep=4",)
    pooled = "engine=processes", "processes=2", "process_timeout=100", "max_restarts=0"
    assert cli("run", *words, *pooled, "--out", "whole").exit_code == 0
    broken_off(tmp_path / "whole", tmp_path / "again", 2)
    resumed = cli("run", "--resume", "again", "engine=serial", "--allow-imports")
    keys = ("max_restarts", "process_timeout", "processes")
    unused = [f"warning: {key} has no effect with engine=serial; omit it" for key in keys]
    assert (resumed.exit_code, resumed.stderr.splitlines()) == (0, unused)
    assert_the_same(tmp_path / "again", tmp_path / "whole")
    stored = fedsim.load_experiment(tmp_path / "again" / "experiment.toml", allow_imports=True)
    assert stored.engine == "serial"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("names", [["letter.txt"], [".thesis.part", "notes"], [".experiment.toml.part", "notes"]])
def test_a_refused_folder_keeps_all_its_files(tables, tmp_path, names, resume):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(fedsim.RecordError, match="is not empty and has no experiment.toml"):
        fedsim.run(tables, tmp_path, resume=resume)
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_a_resumed_run_removes_only_unfinished_files_of_fedsim_in_its_folder(tables, tmp_path):
    fedsim.run({**tables, "checkpoint": {"every": 0}}, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mine")
    foreign_files = [tmp_path / "run" / ".thesis.part", tmp_path / "mine" / ".round-00002.json.part"]
    for path in foreign_files:
        path.touch()
    fedsim.run({**tables, "checkpoint": {"every": 0}}, tmp_path / "run", resume=True)
    assert all(path.exists() for path in foreign_files)


def test_resume_needs_a_folder_and_starts_the_run_in_a_new_one(tables, tmp_path):
    assert len(fedsim.run(tables, tmp_path / "new", resume=True).history) == ROUNDS
    with pytest.raises(fedsim.ExperimentError, match="resume = True: needs `out`"):
        fedsim.run(tables, resume=True)


def test_the_command_line_resumes_a_run(tmp_path, cli):
    words = "data=tests.components:tiny", "model=logistic", "workers=2", "engine=serial", "checkpoint.every=1"
    assert cli("run", *words, "rounds=2", "--out", "run").exit_code == 0
    result = cli("run", "--resume", "run", "rounds=5", "--allow-imports")
    assert result.exit_code == 0
    assert "continuing after round 2 of 5\n" in result.stdout
    assert "after 5 rounds, 3 of them in this session, in " in result.stdout
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    refused = cli("run", "--resume", "run", "seed=7", "--allow-imports")
    assert refused.stderr == "error: run: holds another experiment: seed: 0 there, 7 here\n"
    assert "error: nowhere: is not a run folder (no experiment.toml)" in cli("run", "--resume", "nowhere").stderr
    assert cli("run", "--resume", "run", "--out", "x").stderr.startswith("error: --resume and --out: ")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def signed(path, change):
    """Change the JSON file of a checkpoint and correct its checksums."""
    said = json.loads(path.read_text())
    del said["checksum"]
    tensors = path.with_suffix(".safetensors")
    state = load_file(tensors)
    change(said, state)
    tensors.write_bytes(save(state))
    said["sha256"] = checkpoints._sha256(tensors.read_bytes())
    path.write_text(json.dumps({**said, "checksum": checkpoints._checksum_of(said)}))


DAMAGE = {
    "a bit of the tensors": lambda head, tensors: flipped(tensors),
    "a bit of the head": lambda head, tensors: flipped(head),
    "half of the tensors": lambda head, tensors: tensors.write_bytes(tensors.read_bytes()[:100]),
    "an empty head": lambda head, tensors: head.write_bytes(b""),
    "no tensors": lambda head, tensors: tensors.unlink(),
    "a list": lambda head, tensors: head.write_text("[]"),
    "a format to come": lambda head, tensors: signed(head, lambda said, state: said.update(format=99)),
    "another model": lambda head, tensors: signed(head, lambda said, state: state.update(global_row=torch.ones(3))),
    "another dtype": lambda head, tensors: signed(
        head, lambda said, state: state.update(global_row=state["global_row"].double())
    ),
    "no metadata": lambda head, tensors: signed(head, lambda said, state: said.update(metadata={})),
    "metadata of another kind": lambda head, tensors: signed(head, lambda said, state: said.update(metadata=[1])),
    "no clock": lambda head, tensors: signed(head, lambda said, state: said["metadata"].update(clock=7)),
    "an unknown slot": lambda head, tensors: signed(
        head, lambda said, state: said["metadata"]["clock"]["dispatcher"].update(in_flight=[[99, 0, 1, None, None]])
    ),
    "time that runs back": lambda head, tensors: signed(
        head, lambda said, state: said["metadata"]["clock"].update(now=1e9)
    ),
    "all of another model": lambda head, tensors: [
        signed(each, lambda said, state: state.update(global_row=torch.ones(3))) for each in head.parent.glob("*.json")
    ],
    "no clock in any": lambda head, tensors: [  # found after the tensors have been restored
        signed(each, lambda said, state: said["metadata"].update(clock=7)) for each in head.parent.glob("*.json")
    ],
    "another number in a record": lambda head, tensors: edit_records(head.parents[1] / "metrics.jsonl"),
    "only two records": lambda head, tensors: cut_records(head.parents[1] / "metrics.jsonl"),
}


def edit_records(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"test_accuracy": 0.', '"test_accuracy": 0.0', 1)
    assert lines[1] != metrics.read_text().splitlines(keepends=True)[1]
    metrics.write_text("".join(lines))


def cut_records(metrics):
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, session):
    """Return the tables, the folder and the result of a fedbuff run, which must not be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return (tables := BASE | ASYNCHRONOUS["fedbuff"]), folder, fedsim.run(tables, folder, session=session)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage, whole_run, tmp_path, session):
    tables, whole_folder, whole = whole_run
    folder = broken_off(whole_folder, tmp_path / "again", 3)
    DAMAGE[damage](folder / "checkpoints/round-00003.json", folder / "checkpoints/round-00003.safetensors")
    instead = r"checkpoint of round \d: .*; the (checkpoint of round \d is tried instead|run starts from round 1)"
    with pytest.warns(FedsimWarning, match=instead) as caught:
        result = fedsim.run(tables, folder, resume=True, session=session)
    assert str(caught[0].message).startswith("checkpoint of round 3: ")
    assert_the_same(folder, whole_folder, result, whole)


def dies_at(operation, tables, folder):
    """Whether a forked process that runs or resumes an experiment died at its `operation`-th file operation."""
    child = os.fork()
    if child:
        return os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 9
    try:
        left = [operation]

        def counted(function):
            def call(*arguments, **options):
                left[0] -= str(folder) in str(arguments[0]) or not isinstance(arguments[0], (str, Path))
                if left[0] == 0:
                    os._exit(9)
                return function(*arguments, **options)

            return call

        os.fsync, os.replace, os.mkdir, os.unlink = map(counted, (os.fsync, os.replace, os.mkdir, os.unlink))
        fedsim.records.run_folder.to_line = counted(fedsim.records.run_folder.to_line)
        fedsim.run(tables, folder, resume=True)
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_a_run_that_dies_at_any_file_operation_resumes_to_the_same_result(tables, tmp_path):
    """The process dies before its first file operation, then before its second one, and so on until it finishes."""
    tables |= {"rounds": 2, "workers": 2, "records": {"curve": False}, "checkpoint": {"every": 1, "keep": 1}}
    whole = fedsim.run(tables, tmp_path / "whole")
    deaths = 0
    while dies_at(deaths + 1, tables, folder := tmp_path / f"dies {deaths}"):
        deaths += 1
        assert_the_same(folder, tmp_path / "whole", fedsim.run(tables, folder, resume=True), whole)
    assert deaths > 10  # 14 with Python 3.10
