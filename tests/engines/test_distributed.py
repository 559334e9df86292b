"""Launched ranks have the results of `serial` up to rounding, and end together."""

from __future__ import annotations

import json

import pytest
import torch

import fedsim
from fedsim.cli.rule_replay import load_round
from tests.commands import ROOT, ended, start_ranks
from tests.engines.test_contract import ALL_CASES, CHAIN, ROUNDING, assert_close, merged, without_times
from tests.engines.torch_post_local import TABLES

PROGRAM = ROOT / "tests" / "processes" / "rank_program.py"
TINY = {
    "rounds": 2,
    "workers": 3,
    "model": {"name": "2nn", "hidden": 20},
    "data": "tests.components:tiny",
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
DIVERGING = {"workers": 7, "attack": {"name": "inf", "workers": [2], "start_round": 2}}

FURTHER = {
    "a worker without weight, left out": {
        "attack": {"name": "nan", "workers": [1]},
        "aggregate": {"weights": [1.0, 0.0, 5.0], "nonfinite": "exclude"},
    },
    "worker state beside the server's own data": {
        **{"workers": 4, "rounds": 3, "local": {"algorithm": "tests.components:Counting", "batch_size": 16}},
        "aggregate": {"rule": "fltrust", "root_samples": 20},
    },
    "a worker with most of the samples": {
        "workers": 4,
        "partition": [list(range(140)), *(list(range(start, start + 20)) for start in (140, 160, 180))],
    },
    "privacy in empty rounds": {
        **{"workers": 9, "cohort": 1, "rounds": 6, "sampling": "poisson"},
        "privacy": {"mechanism": "central", "clip": 0.3, "noise": 0.1},
    },
    "a cohort smaller than the ranks": {"workers": 5, "cohort": 1, "rounds": 3},
    "multi_krum of mixed rows": {
        **{"workers": 7, "attack": {"name": "sign_flipping", "fraction": 0.3}},
        "aggregate": {"rule": ["nnm", "multi_krum"]},
    },
    "geometric median, weighted": {"workers": 5, "aggregate": {"rule": "geometric_median", "weights": "samples"}},
    "rows of equal workers": {"workers": 6, "attack": {"name": "mimic", "fraction": 0.4}, "aggregate": "medoid"},
    "an attack with a state": {
        **{"workers": 6, "attack": {"name": "mimic", "workers": [1, 4], "warmup": 2}, "aggregate": "trimmed_mean"}
    },
    "an attack tuned to losses": {
        **{"workers": 6, "model": "logistic", "attack": {"name": "opt_alie", "fraction": 0.3}},
        "aggregate": {"rule": "qfedavg", "lr": 0.05},
    },
    "data of the server's own, and workers that do not report": {
        **{"workers": 5, "cohort": 4, "rounds": 3, "sampling.dropout_rate": 0.4},
        "aggregate": {"rule": "fltrust", "root_samples": 20},
    },
    "stacked in each rank": {
        "workers": 5,
        "distributed": {"trainer": "batched"},
        "partition": "tests.components:uneven",
    },
    "a linear rule that draws": {"aggregate": "tests.components:drawn_mean"},
    "a linear rule that draws on the device": {"aggregate": "tests.components:drawn_on_device"},
    "a linear rule that asks for losses": {"aggregate": "tests.components:lossy_mean"},
    "draws at test time": {"model": "tests.models:AlwaysDropping", "data": "tests.components:tested_on_many"},
    "a forward pass that writes to parameters": {
        "model": "tests.models:Renormalised",
        "data": "tests.components:tokens",
    },
    "an empty part of the columns": {
        "model": "tests.models:Few",
        "data": "tests.components:few",
        "aggregate": "median",
    },
    "personal parameters under attack": {
        **{"workers": 5, "attack": {"name": "gaussian", "fraction": 0.4}, "aggregate": "tests.components:clipped_mean"},
        **{"local": {"algorithm": "fedper", "personal": ["*.bias"]}, "processors": CHAIN},
    },
    "a run that diverges": {**DIVERGING, "aggregate": {"rule": "mean", "nonfinite": "stop"}},
    "a run that diverges, by columns": {**DIVERGING, "aggregate": {"rule": "median", "nonfinite": "stop"}},
    "a run that diverges, by whole rows": {**DIVERGING, "aggregate": {"rule": "bulyan", "nonfinite": "stop"}},
    "an attacker whose message is NaN": {
        **{"local": {"algorithm": "scaffold", "lr": 0.05}, "data": "tests.components:with_a_hole_at_the_end"},
        **{"partition": "tests.components:in_blocks", "attack": {"name": "ipm", "workers": [2]}},
        "aggregate": {"rule": "mean", "nonfinite": "exclude"},
    },
    "updates kept": {"workers": 5, "records": {"updates": [2]}},
    "workers tested": {
        "workers": 5,
        "cohort": 3,
        "data.local_test_fraction": 0.3,
        "worker_evaluation": {"fine_tune": 1},
    },
    "another layer for each batch": {"workers": 5, "model": "tests.models:Branching"},
    "references beside parameters": {"model": "tests.models:Recurrent"},
    "several buckets": {"model": {"name": "tests.models:sized", "hidden": [400, 330]}, "rounds": 1},
    "all that PowerSGD can tell apart": {
        "model": "logistic",
        "distributed": {
            "hook": {
                **{"name": "powersgd", "matrix_approximation_rank": 10},
                **{"min_compression_rate": 0.0, "start_powerSGD_iter": 2},
            }
        },
    },
    "rows that may be left out": {"partition": "tests.components:uneven", "aggregate": {"nonfinite": "exclude"}},
    "steps of attackers alone": {
        **{"workers": 5, "partition": "tests.components:uneven", "aggregate": "mean"},
        **{"attack": {"name": "ipm", "workers": [4]}},
    },
}
BY_PARAMETERS = (  # two ranks run several cases as one experiment; a slow test with four ranks runs each case alone
    *(("uneven shards",), ("an adaptive server",), ("a rule on columns",), ("geometric median, weighted",)),
    *(("worker state of rows left out", "rows left out in turn"), ("drawn local work", "buffers kept by workers")),
    *(("scaffold with full gradients", "processed updates"), ("fednova", "clipped gradients"), ("mime",)),
    *(("feddyn of rows left out",), ("feddyn", "an adaptive server"), ("ditto with BatchNorm",)),
    *(("several global models", "processed updates"), ("several global models under attack",)),
    *(("gradients first, then parameters",), ("buffers averaged", "a rule on whole rows", "learning rates by round")),
    *(("a rule by distances, under attack", "draws at test time"), ("pre-aggregators", "buffers of rows left out")),
    *(("updates and broadcasts compressed",), ("an attack that passes through the chain",)),
    *(("a rule with a state", "an attack that remembers"), ("a rule that starts where it ended",)),
    *(("a rule that draws", "rows left out"), ("rows left out of a rule by distances",)),
    *(("data of the server's own, and workers that do not report",), ("multi_krum of mixed rows",)),
    *(("an attack tuned to a rule by distances of clipped rows",), ("an attack tuned to losses",)),
    *(("rows of equal workers",), ("an attack with a state",), ("updates quantized after an attack",)),
    *(("a server that broadcasts something else",), ("virtual shards of uneven sizes, under attack",)),
    *(("a cohort smaller than the ranks",), ("stacked in each rank",), ("an empty part of the columns",)),
    *(("a linear rule that draws on the device",), ("a linear rule that asks for losses", "dropout")),
    *(("personal parameters under attack",), ("an attacker whose message is NaN",)),
    *(("a run that diverges, by columns",), ("a run that diverges, by whole rows",), ("updates kept",)),
    *(("workers tested",), ("workers with the highest losses",)),
    *(("private updates, processed, under attack",), ("privacy whose norm adapts", "server momentum")),
    *(("privacy of the workers, with a rule on whole rows",), ("privacy in empty rounds",)),
    *(("unbiased weights, and workers that do not report",), ("a worker with most of the samples",)),
    *(("groups",), ("groups with states, drawn rules, and attacks on both levels",)),
    *(("buffers and momentum in groups",), ("fragments of workers that keep their models",)),
    *(("fragments, processed, under attack",), ("muon",)),
    *(("a worker without weight, left out",), ("worker state beside the server's own data",)),
)
AVERAGED = (  # as above, for gradients that are averaged during the backward pass
    *(("uneven shards",), ("partial cohorts of uneven shards", "dropout"), ("adam", "given weights")),
    *(("buffers averaged",), ("buffers kept by workers",), ("state that no row holds",)),
    *(("shared and unused parameters",), ("a cohort smaller than the ranks",), ("another layer for each batch",)),
    *(("references beside parameters",), ("several buckets",), ("all that PowerSGD can tell apart",)),
)
ROWS_OF_GRADIENTS = (
    *(("a rule by distances, under attack",), ("rows that may be left out",), ("buffers of rows left out",)),
    *(("a run that diverges",), ("steps of attackers alone",), ("a linear rule that draws",)),
    *(("stacked in each rank",), ("another loss",), ("next token",), ("processed gradients",)),
    *(("workers with the highest losses",), ("unbiased weights, and workers that do not report",)),
)
ALONE = (  # on four ranks only
    *("one worker", "plain averaging", "worker state and messages", "scaffold", "personal parameters", "regression"),
    *("personal parameters first", "personal normalisation layers", "features of three models", "an attack on data"),
    *("a rule with data of the server's own", "a rule that asks for losses"),
    *("an attack tuned to the rule", "a forward pass that writes to parameters", "a linear rule that draws"),
)
IN_WAVES = (  # of `BY_PARAMETERS`, without storing all updates
    *(("worker state of rows left out", "rows left out in turn"), ("drawn local work", "buffers kept by workers")),
    *(("scaffold with full gradients", "processed updates"), ("ditto with BatchNorm",), ("an adaptive server",)),
    *(
        ("buffers averaged", "learning rates by round"),
        ("updates and broadcasts compressed",),
        ("an attack that remembers",),
    ),
    *(("a cohort smaller than the ranks",), ("stacked in each rank",), ("workers tested",)),
    *(("privacy whose norm adapts", "server momentum"), ("unbiased weights, and workers that do not report",)),
    *(("a worker without weight, left out",),),
)
LEARNING = {
    **{"rounds": 3, "workers": 4, "model": "2nn", "data": "tests.components:tiny", "sync": "gradients"},
    "local": {"batch_size": 10, "lr": 0.1, "epochs": 2},
}
HOOKS = {
    "hook allreduce": {"name": "allreduce"},
    "hook fp16": {"name": "fp16"},
    "hook bf16": {"name": "bf16"},
    "hook powersgd": {"name": "powersgd", "matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
}
NOT_FINITE = {"model": "tests.models:OneIsTooFew", "partition": "tests.components:ending_in_one", "sync": "gradients"}


def cases_of(count):
    """Return the experiments of a group of `count` ranks, by name."""
    by_parameters, by_gradients = BY_PARAMETERS, (*AVERAGED, *ROWS_OF_GRADIENTS)
    if count == 1:
        by_parameters, by_gradients = BY_PARAMETERS[:2], ()
    if count == 4:
        names = dict.fromkeys((*(name for names in BY_PARAMETERS for name in names), *ALONE))
        by_parameters = [(name,) for name in names]
    cases = {" and ".join(names): case_of(names) for names in by_parameters}
    if count > 1:
        cases |= {f"{' and '.join(names)}, in waves": {**case_of(names), "in waves": True} for names in IN_WAVES}
    return cases | {name_by_gradients(names): {**case_of(names), "sync": "gradients"} for names in by_gradients}


def case_of(names):
    return {**TINY, **merged(*names, cases={**ALL_CASES, **FURTHER}), "precision": "float64"}


def name_by_gradients(names):
    return f"{' and '.join(names)}, by gradients"


def others_of(count):
    """Return further experiments of the group without a serial reference. The last one ends the group."""
    if count != 2:
        return {}
    hooked = {name: {**LEARNING, "distributed": {"hook": table}} for name, table in HOOKS.items()}
    return {**hooked, "post-local": TABLES, "not finite": {**TINY, **NOT_FINITE}}


def all_cases():
    slow = {1: pytest.mark.slow, 4: pytest.mark.slow}
    return [pytest.param(count, name, marks=slow.get(count, ())) for count in (1, 2, 4) for name in cases_of(count)]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Return a function that returns (results of each rank, folder) for a number of ranks."""
    results_by_count = {}

    def run(count):
        if count not in results_by_count:
            folder = tmp_path_factory.mktemp(f"ranks{count}")
            (folder / "cases.json").write_text(json.dumps({**cases_of(count), **others_of(count)}))
            codes, outs, errors = ended(start_ranks(count, PROGRAM, folder / "cases.json", folder, cwd=ROOT), 300)
            results_by_count[count] = "".join(outs + errors)  # a failed group is not started again
            if not any(codes):
                results_by_count[count] = (
                    [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)],
                    folder,
                )
        assert not isinstance(results_by_count[count], str), results_by_count[count]
        return results_by_count[count]

    return run


@pytest.fixture(scope="module")
def serial():
    """Return a function that returns the result of a case with the engine `serial`, computed once."""
    results = {}

    def run(tables):
        tables = {key: value for key, value in tables.items() if key not in ("distributed", "in waves")}
        key = json.dumps(tables, sort_keys=True)
        if key not in results:
            results[key] = fedsim.run({**tables, "engine": "serial"})
        return results[key]

    return run


class Row:
    """Adapter that gives a rank's results the attributes of a `Result`."""

    def __init__(self, left):
        self.history, self.global_row = left["history"], left["row"]
        self.model = self
        self.state_dict = lambda: left["state"]


@pytest.mark.filterwarnings("ignore:round 1. no honest")
@pytest.mark.parametrize(("count", "name"), all_cases())
def test_ranks_agree_with_serial_up_to_rounding(count, name, groups, serial):
    reference = serial(cases_of(count)[name])
    ranks, _ = groups(count)
    assert not torch.equal(reference.global_row, torch.zeros_like(reference.global_row))
    for left in ranks:
        assert_close(reference, Row(left[name]), ROUNDING)
        assert torch.equal(left[name]["row"], ranks[0][name]["row"])
        assert without_times(left[name]["history"]) == without_times(ranks[0][name]["history"])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_keeps_its_own_rows_and_its_part_of_the_optimizers_state(count, groups):
    ranks, _ = groups(count)
    d = len(ranks[0]["an adaptive server"]["row"])
    shapes = [left["an adaptive server"]["shapes"] for left in ranks]
    assert [shape["rows"] for shape in shapes] == [[4 // count, d]] * count  # rows per rank
    assert {len(shape["states"]) for shape in shapes} == {4}  # m, v and the weights of both layers
    assert all(length <= d / count + 8 for shape in shapes for length in shape["states"])
    assert sum(shape["states"][0] for shape in shapes) == d


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_averaged_in_one_row_unless_rows_are_needed(count, groups):
    left = groups(count)[0][0]
    for names in AVERAGED:
        how = left[name_by_gradients(names)]["how"]["gradients"]
        assert how.startswith("averaged during the backward pass"), names
    reasons = {name: left[name_by_gradients([name])]["how"]["gradients"] for (name,) in ROWS_OF_GRADIENTS}
    assert (
        reasons["a rule by distances, under attack"]
        == 'stored per worker, because of the rule: aggregate.rule = "krum"'
    )
    assert reasons["rows that may be left out"].endswith('aggregate.nonfinite = "exclude"')
    assert reasons["stacked in each rank"].endswith('distributed.trainer = "batched"')
    assert "gradients" not in left["uneven shards"]["how"]
    d = len(left["uneven shards"]["row"])
    assert left["uneven shards, by gradients"]["shapes"] == {"rows": [0, d], "states": [d]}


def test_a_hook_sends_fewer_bytes_and_training_still_learns(groups):
    ranks, _ = groups(2)
    plain = ranks[0]["hook allreduce"]
    d, steps = len(plain["row"]), 3 * 2 * 6
    losses = {name: ranks[0][name]["history"][-1]["train_loss"] for name in HOOKS}
    for name, table in HOOKS.items():
        assert ranks[0][name]["how"]["gradients"] == f"averaged during the backward pass, hook {table['name']}"
        assert torch.equal(ranks[0][name]["row"], ranks[1][name]["row"])
        assert losses[name] < ranks[0][name]["history"][0]["train_loss"] / 1.5
    for name in ("hook fp16", "hook bf16"):
        assert losses[name] == pytest.approx(losses["hook allreduce"], rel=0.02)
        assert not torch.equal(ranks[0][name]["row"], plain["row"])
    wire = {name: sum(left[name]["wire"] for left in ranks) for name in HOOKS}
    if not plain["wire"]:
        pytest.skip("this system does not count the bytes sent by a connection")
    once = wire["hook allreduce"] - steps * 2 * d * 4  # sent once at the start, with any hook
    assert 0 < once < 0.1 * wire["hook allreduce"]
    low_rank = 4 * (784 + 200 + 200 + 200 + 200 + 10) + 200 + 200 + 10  # low-rank factors of three matrices, and biases
    numbers = {"hook fp16": steps * d / 2, "hook bf16": steps * d / 2, "hook powersgd": 2 * d + (steps - 2) * low_rank}
    for name, count in numbers.items():
        assert wire[name] - once == pytest.approx(2 * 4 * count, rel=0.05), name


def test_post_local_equals_pytorchs_own_optimizer(groups, serial):
    """Equal shards and plain SGD: PostLocalSGDOptimizer over a PeriodicModelAverager, with PyTorch's DDP hook."""
    ranks, _ = groups(2)
    reference = next(iter(ranks[0].values()))["post_local"]  # computed after the first case
    assert torch.allclose(ranks[0]["post-local"]["row"], reference, rtol=0, atol=ROUNDING)
    assert torch.allclose(serial(TABLES).global_row, reference, rtol=0, atol=ROUNDING)


def test_no_trainer_outlives_its_run(groups):
    assert [left["trainers left"] for left in groups(2)[0]] == [0, 0]


def test_workers_whose_gradients_are_not_finite_are_named_as_by_serial(groups, serial):
    with pytest.raises(fedsim.ExperimentError, match="from workers 2") as raised:
        serial({**TINY, **NOT_FINITE})
    assert [left["not finite"]["error"] for left in groups(2)[0]] == [str(raised.value)] * 2


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_send_the_bytes_of_the_formulas(count, groups):
    """Bytes of all ranks together, in units of a row, as in the docstring of `DistributedEngine`."""
    ranks, _ = groups(count)
    d, rounds = len(ranks[0]["uneven shards"]["row"]), 2

    def sent(name):
        return sum(left[name]["wire"] for left in ranks) / 8 / d - (count - 1)  # without the initial row

    if not ranks[0]["uneven shards"]["wire"]:
        pytest.skip("this system does not count the bytes sent by a connection")
    by_columns = rounds * (5 * (count - 1) / count + (count - 1))
    assert sent("uneven shards") == pytest.approx(rounds * 2 * (count - 1), rel=0.1)
    assert sent("an adaptive server") == pytest.approx(3 * 2 * (count - 1), rel=0.1)
    assert sent("geometric median, weighted") == pytest.approx(by_columns, rel=0.1)


def test_the_first_rank_keeps_the_updates_of_all(groups):
    _, folder = groups(2)
    stored = load_round(folder / "updates-kept", allow_imports=True)
    assert stored.tensors["updates"].shape[0] == 5
    assert bool(stored.tensors["updates"].any(1).all())


def test_without_a_launcher_the_error_shows_the_command(cli, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = cli("run", "engine=distributed")
    assert result.exit_code == 2
    assert "start it with a launcher: torchrun --standalone --nproc-per-node 2" in result.stderr
