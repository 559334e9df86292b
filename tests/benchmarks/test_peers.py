"""fedsim and other programs on the same work: `python -m benchmarks.peers`."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import tomli_w
import torch

import fedsim
from benchmarks.peers import __main__ as program
from benchmarks.peers import compare
from benchmarks.peers.bare import train
from benchmarks.peers.compare import DifferentWorkError, Run
from benchmarks.peers.export import without_fedsim, work_of
from benchmarks.peers.networks import NETWORKS
from benchmarks.peers.rivals import RIVALS, Rival
from tests.commands import ROOT

SMALL = {
    **{"workers": 6, "cohort": 3, "rounds": 2, "partition": "iid", "model": "2nn", "device": "cpu"},
    "data": {"name": "benchmarks.gpu.data:synthetic", "train": 60, "test": 400},
    "local": {"epochs": 2, "batch_size": 4, "lr": 0.1},
}
WRONG = ("fails", "takes smaller steps")


@pytest.fixture(autouse=True)
def threads():
    """Restore PyTorch's number of threads, because the tested programs set it to 1."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def result_of(work):
    result = train(work)
    return Run(1.0, 10, result.rounds, result.accuracies, result.last, result.samples, result.steps)


@pytest.fixture
def small():
    """Return a small work and a correct run of it."""
    work = work_of(fedsim.load_experiment(SMALL))
    return work, result_of(work)


def test_wrong_programs_are_found_and_get_no_figures(tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps({**SMALL, "data": "mnist5k"}))
    words = [str(path), *(f"data.{key}={value}" for key, value in SMALL["data"].items())]
    for how in WRONG:
        monkeypatch.setitem(RIVALS, how, Rival())
    wrong = [sys.executable, "-m", "tests.benchmarks.wrong_rival"]
    command_of = compare.command_of
    monkeypatch.setattr(compare, "command_of", lambda name: [*wrong, name] if name in WRONG else command_of(name))
    figures = compare.measure(words, ["bare", *WRONG], repeats=1)
    for name in ("fedsim", "bare"):
        assert figures[name]["peak_mb"] > 50
        assert figures[name]["run_seconds"] > 2 * figures[name]["round_seconds"] > 0
    assert figures["bare"]["round_over_fedsim"] == pytest.approx(1 / figures["fedsim"]["round_over_bare"], rel=0.01)
    assert figures["bare"]["difference_over_move"] < 1e-9
    errors = {how: figures[how]["error"] for how in WRONG}
    assert "RuntimeError: no such cohort" in errors["fails"]
    assert "its model differs from fedsim's by 0." in errors["takes smaller steps"]
    lines = program.table({"small": figures}).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["small", "fedsim"], ["small", "bare"]]
    assert lines[-1].endswith(errors["takes smaller steps"])


def test_a_run_with_another_accuracy_is_an_error(small):
    work, run = small
    compare.check_counts("bare", run, work)
    compare.check_accuracy("bare", run, run)
    with pytest.raises(DifferentWorkError, match="final accuracies of fedsim and of bare differ"):
        compare.check_accuracy("bare", run, run._replace(accuracies=[0.0]))


def test_a_program_that_skips_a_client_is_an_error(small):
    work, _ = small
    other = work._replace(cohorts=[each[1:] for each in work.cohorts], orders=[each[1:] for each in work.orders])
    with pytest.raises(
        DifferentWorkError, match=re.escape("(2, 80, 24) rounds, samples and steps instead of (2, 120, 36)")
    ):
        compare.check_counts("bare", result_of(other), work)


def test_a_program_that_tests_fewer_samples_is_an_error(small):
    work, _ = small
    run = result_of(work._replace(test_inputs=work.test_inputs[:5], test_targets=work.test_targets[:5]))
    with pytest.raises(DifferentWorkError, match="reported an accuracy of"):
        compare.check_counts("bare", run, work)


def test_the_work_names_the_steps_of_fedsim():
    experiment = fedsim.load_experiment({**SMALL, "local": {"steps": 7, "batch_size": 4, "lr": 0.1}})
    work = work_of(experiment)
    assert [[len(order) for order in orders] for orders in work.orders[0]] == [[10, 10, 4]] * 3
    assert [len(batch) for batch in work.batches(0, 0)] == [4, 4, 2, 4, 4, 2, 4]


def test_few_samples_are_those_of_the_training(small):
    work, _ = small
    few = compare.few_samples(work)
    assert len(few.inputs) == len(np.unique(np.concatenate([np.ravel(orders) for orders in work.orders])))
    for before, after in zip(work.batches(1, 2), few.batches(1, 2), strict=True):
        assert torch.equal(work.inputs[before], few.inputs[after])
    assert compare.difference(work, train(work).first, train(few).first) < 1e-6


@pytest.mark.parametrize("name", [*NETWORKS, "w4"])
def test_a_network_has_the_parameters_and_outputs_of_fedsims_model(name):
    words = program.WORKLOADS["w4"] if name == "w4" else [{**SMALL, "model": name}]
    experiment = fedsim.load_experiment(words[0], [*words[1:]])
    network, model = without_fedsim(experiment)(), experiment.model.component()
    network.load_state_dict(model.state_dict())
    images = torch.randn(2, *((3, 32, 32) if name == "w4" else (1, 28, 28)))
    assert torch.equal(network.eval()(images), model.eval()(images))


def test_w4_is_the_network_and_the_work_of_the_benchmark_of_pfl():
    words = program.WORKLOADS["w4"]
    experiment = fedsim.load_experiment(words[0], words[1:])
    local = experiment.local
    assert (experiment.workers, experiment.cohort_size) == (1000, 50)
    assert (local.epochs, local.batch_size, local.params["lr"]) == (1, 10, 0.1)
    network = experiment.model.component()
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_626_442
    assert [module.p for module in network.modules() if isinstance(module, torch.nn.Dropout)] == [0.25, 0.5]


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_w4_and_the_bare_loop_do_the_same_work(engine, tmp_path):
    words = program.WORKLOADS["w4"]
    changes = ("rounds=1", "workers=4", "cohort=2", "data.train=24", "data.test=10", f"data.root={tmp_path}")
    exact = ("precision=float64", "model.dropout=0.0", f"engine={engine}", "processes=1")
    experiment = fedsim.load_experiment(words[0], [*words[1:], *changes, *exact])
    work = work_of(experiment)
    assert compare.difference(work, fedsim.run(experiment).model.state_dict(), train(work).first) < 1e-9


@pytest.mark.parametrize(
    ("name", "parameters", "changes"),
    [
        ("flute_lr", 7_850, ("workers=20", "data.name=benchmarks.gpu.data:synthetic", "data.train=600", "data.test=9")),
        ("flute_lstm", 822_570, ("local.steps=2", "data.test_windows=2")),
        ("blazefl", 62_006, ("workers=5", "data.train=60", "data.test=9")),
    ],
)
def test_published_workloads_are_the_same_work_for_other_programs(name, parameters, changes, tmp_path):
    words = program.WORKLOADS[name]
    small = ("rounds=1", "cohort=2", "precision=float64", "engine=serial", f"data.root={tmp_path}", *changes)
    experiment = fedsim.load_experiment(words[0], [*(w for w in words[1:] if not w.startswith("rounds=")), *small])
    work = work_of(experiment, make=without_fedsim(experiment))
    assert sum(value.numel() for value in work.state.values()) == parameters
    assert compare.difference(work, fedsim.run(experiment).model.state_dict(), train(work).first) < 1e-9


def test_shards_by_a_power_law_have_two_classes_and_unequal_sizes():
    labels = np.repeat(np.arange(10), 600)
    shards = fedsim.partition(labels, "benchmarks.peers.published:power_law", 100)
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(len(labels)))
    assert [np.unique(labels[shard]).tolist() for shard in shards[8:11]] == [[8, 9], [0, 9], [0, 1]]
    sizes = np.array([len(shard) for shard in shards])
    assert sizes.min() >= 10
    assert sizes.max() > 5 * np.median(sizes)


def test_programs_do_not_import_fedsim():
    for name in ("work", "networks", *RIVALS):
        text = (ROOT / "benchmarks" / "peers" / f"{name}.py").read_text()
        assert not re.search(
            r"^ *(from|import) (fedsim|common|benchmarks\.(?!peers\.(work|networks)))", text, re.MULTILINE
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rivals", "bare,tff"], "--rivals: tff: must be of bare, pfl"),
        (["--workloads", "w9"], "--workloads: w9: must be of w1, w2"),
        (["--rounds", "1"], "--rounds: 1: must be at least 2"),
        (["--rivals", "missing"], "--rivals: missing: not installed; run python -m benchmarks.peers setup"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setitem(RIVALS, "missing", Rival(("missing==1.0",)))
    with pytest.raises(SystemExit):
        program.options_of(["--rivals", "bare", *words])
    assert message in capsys.readouterr().err


def test_the_table_of_the_page_names_its_figures():
    def figures(ratio):
        return {"run_seconds": 6.0, "round_seconds": 1.5, "peak_mb": 457.0} | {
            f"{key}_over_fedsim": ratio for key in ("run", "round", "peak")
        }

    programs = {"fedsim": figures(1.0), "bare": figures(2.5), "pfl": {"error": "pfl failed: no port"}}
    stored = {"versions": {"bare": [], "pfl": []}, "date": "2026-11-29", "machine": "CPU, 2 cores", "w1": programs}
    first, *_, last, _, comment = program.markdown(stored).splitlines()[:-1]
    assert first == "Measured on 29 November (CPU, 2 cores):"
    assert last == "|w1, memory|0.46|2.50|-|"
    assert comment.startswith("<!-- figures: peers-cpu.json: w1/fedsim/run_seconds; w1/(bare)/run_over_fedsim;")
