from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.aggregation import Pipeline
from fedsim.aggregation.numerics import gram
from fedsim.asynchronous.combination import Combination
from fedsim.cli.main import app
from fedsim.cli.rule_replay import applicable_rules, load_round, replay, replay_table, stored_rounds
from fedsim.errors import ExperimentError, RecordError
from fedsim.rounds.parameter_server import ParameterServer


@pytest.fixture
def tables(tiny_experiment):
    return {
        **tiny_experiment,
        "workers": 9,
        "model": "logistic",
        "attack": {"name": "sign_flipping", "workers": [2, 5]},
        "aggregate": {"rule": "krum"},
        "records": {"updates": [1, 2], "curve": False, "model": False},
    }


@pytest.fixture
def run(tables, tmp_path):
    return fedsim.run(tables, tmp_path / "run")


def test_only_the_requested_rounds_are_stored(tables, tmp_path):
    fedsim.run({**tables, "rounds": 3, "records": {"updates": [2, 7], "curve": False}}, tmp_path / "other")
    assert stored_rounds(tmp_path / "other") == [2]


DIRICHLET = {"attack": {}, "partition": {"name": "dirichlet", "alpha": 0.3}, "aggregate": "weighted_mean"}
CENTRAL = {"mechanism": "central", "clip": 0.01, "noise": 0.2}


@pytest.mark.parametrize(
    "changes",
    [
        {**DIRICHLET, "aggregate": "mean", "privacy": CENTRAL, "cohort": 5, "sampling": "poisson"},
        {},
        {**DIRICHLET, "sync": "gradients"},  # only some workers have samples left for the last step
        {"sync": "gradients", "local": {"steps": 2}, "aggregate": [{"rule": "bucketing", "s": 2}, "median"]},
        {"aggregate": [{"rule": "bucketing", "s": 2}, "mean"]},
        {"aggregate": {"rule": "centered_clipping", "tau": 0.1}},  # starts at the previous result
        {"aggregate": {"rule": "fltrust", "root_samples": 10}},
        {"aggregate": {"rule": "qfedavg"}, "engine": "processes", "processes": 2},
        {"attack": {"name": "nan", "workers": [2, 5]}, "aggregate": {"rule": "mda", "f": 2, "nonfinite": "keep"}},
    ],
)
def test_a_replay_has_the_weights_and_the_result_of_the_run(changes, tables, tmp_path, monkeypatch):
    step, updates = ParameterServer.step, []

    def watched(server, aggregate, moment, cluster=0):
        updates.append(torch.cat([update for _, update in aggregate.parts]))
        step(server, aggregate, moment, cluster)

    if "engine" not in changes and "privacy" not in changes:  # the server would add noise
        monkeypatch.setattr(ParameterServer, "step", watched)
    result = fedsim.run({**tables, **changes}, tmp_path / "run")
    stored = load_round(tmp_path / "run", 2, allow_imports=True)
    rule, params = result.experiment.aggregate.rule, result.experiment.aggregate.params
    (replayed,) = replay(stored, [{"rule": rule, **params} if params else rule])
    if updates:
        assert torch.allclose(replayed.update, updates[-1], rtol=0, atol=1e-9, equal_nan=True)
    if result.history[1].weights and changes.get("sync") != "gradients":  # else they are means over the steps
        assert list(replayed.shares.values()) == pytest.approx(result.history[1].weights, rel=1e-12)


ADAPTIVE, LOCAL = {**CENTRAL, "mechanism": "adaptive"}, {**CENTRAL, "mechanism": "local"}


@pytest.mark.parametrize(
    ("weights", "privacy", "divisor", "dropout"),  # coefficient of a worker: its weight, divided by their sum
    [
        (None, None, None, 0.3),
        (None, CENTRAL, 6, 0.3),  # ... or by the expected number of updates
        (None, ADAPTIVE, 6, 0.3),
        (None, LOCAL, None, 0.3),
        ("uniform", None, None, 0.3),
        ("uniform", CENTRAL, 6, 0.3),
        ("uniform", LOCAL, None, 0.3),
        ("samples", None, None, 0.3),
        ("samples", LOCAL, None, 0.3),
        ("list", None, None, 0.3),
        ("inverse_probability", None, 1, 0.3),
        (None, CENTRAL, 6, 0.0),
        ("samples", None, None, 0.0),
        ("inverse_probability", None, 1, 0.0),
    ],
)
def test_a_run_and_its_replay_have_the_coefficients_of_the_definition(
    weights, privacy, divisor, dropout, tables, tmp_path
):
    numbers = [float(worker) for worker in range(1, 10)]
    tables |= {"attack": {}, "partition": "tests.components:uneven", "cohort": 6, "seed": 3, "rounds": 1}
    tables |= {"sampling": {"name": "uniform", "dropout_rate": dropout}} | ({"privacy": privacy} if privacy else {})
    refused = weights is None and privacy in (CENTRAL, ADAPTIVE)  # weighted_mean in a run, not in a replay
    for rule, other in (("mean", "weighted_mean"), ("weighted_mean", "mean"))[: 1 if refused else 2]:
        aggregate = {"rule": rule} | ({"weights": numbers if weights == "list" else weights} if weights else {})
        record = fedsim.run({**tables, "aggregate": aggregate}, tmp_path / rule).history[0]
        stored = load_round(tmp_path / rule, 1, allow_imports=True)
        samples = stored.tensors["samples"].double()
        assert len(samples.unique()) > 1
        assert len(record.cohort) < 6 or not dropout
        weights_of_kind = {
            "uniform": torch.ones(len(samples)),
            "samples": samples,
            "list": torch.tensor(numbers)[record.cohort],
            "inverse_probability": samples / 203 * 9 / 6 / (1 - dropout),
        }

        def expected(rule, weights_of_kind=weights_of_kind):
            default = "samples" if rule == "weighted_mean" and privacy in (None, LOCAL) else "uniform"
            values = weights_of_kind[weights or default].double()
            return (values / {None: values.sum(), 6: 6 * (1 - dropout), 1: 1}[divisor]).tolist()

        assert record.weights == pytest.approx(expected(rule), rel=1e-12)
        for replayed, name in zip(replay(stored, [rule, other]), [rule, other], strict=True):
            assert list(replayed.shares.values()) == pytest.approx(expected(name), rel=1e-12)


BUFFER = {"name": "fedbuff", "k": 6}
ROOT = {"rule": "fltrust", "root_samples": 10}


@pytest.mark.parametrize(
    ("policy", "aggregate", "changes"),
    [
        (BUFFER, "median", {}),
        (BUFFER, "mean", {}),
        (BUFFER, [{"rule": "bucketing", "s": 2}, "geometric_median"], {}),  # draws
        (BUFFER, {"rule": "centered_clipping", "tau": 0.1}, {}),  # starts at the previous result
        (BUFFER, "foolsgold", {}),  # has a state
        (BUFFER, ROOT, {}),
        (BUFFER, {"rule": "cge", "nonfinite": "exclude"}, {"attack": {"name": "nan", "workers": [2, 5]}}),
        ({"name": "k_async", "k": 7}, "krum", {}),
        ("asgd", "kardam", {}),  # a filter with a state, which uses models
        ({"name": "basgd", "b": 3}, "median", {"attack": {"name": "ipm", "workers": [2, 8]}}),  # senders are buffers
        ({"name": "d_psgd", "topology": "complete"}, "mda", {"attack": {"name": "ipm", "workers": [2, 8]}}),
        ({"name": "d_psgd", "topology": "ring"}, "trimmed_mean", {}),  # each worker has its own f
        ("gossip", "weighted_mean", {}),
    ],
)
def test_a_replay_has_the_bits_of_the_last_combination_of_an_asynchronous_round(
    policy, aggregate, changes, tables, tmp_path, monkeypatch
):
    combined, apply = {}, Combination._apply

    def watched(self, server, rows, workers, moment, **more):
        result = apply(self, server, rows, workers, moment, **more)
        if more.get("remember", True) and more.get("place", -1) not in self.attackers(server.round):
            combined[server.round] = workers, more, result.update.clone()  # the policy may overwrite it
        return result

    monkeypatch.setattr(Combination, "_apply", watched)
    tables |= {"mode": "clock", "policy": policy, "aggregate": aggregate, "clock": {"slowdown": "linear"}, **changes}
    result = fedsim.run(tables, tmp_path / "run")
    rule, params = result.experiment.aggregate.rule, result.experiment.aggregate.params
    assert stored_rounds(tmp_path / "run") == sorted(combined)
    for round, (workers, more, update) in combined.items():
        stored = load_round(tmp_path / "run", round, allow_imports=True)
        (replayed,) = replay(stored, [{"rule": rule, **params} if params else rule])
        assert torch.equal(replayed.update, update)
        assert stored.workers == list(workers)
        of_policy = (lambda worker: worker % 3) if "basgd" in str(policy) else int
        assert set(stored.byzantine) == set(map(of_policy, result.experiment.byzantine)) & set(workers)
        on_graph = "place" in more
        assert ("staleness" in stored.tensors) != on_graph
        assert int(stored.tensors.get("receiver", -1)) == more.get("place", -1)
        assert more.get("place", -1) not in result.experiment.byzantine
        if on_graph:
            assert torch.equal(stored.tensors["weights"], more["weights"])
        assert "|honest mean|" in replay_table(stored, replay(stored))


def test_several_updates_of_a_worker_share_one_entry(tables, tmp_path):
    tables |= {"mode": "clock", "policy": {**BUFFER, "k": 8}, "aggregate": "median", "clock": {"slowdown": "linear"}}
    fedsim.run(tables, tmp_path / "run")
    stored = load_round(tmp_path / "run", allow_imports=True)
    (mean,) = replay(stored, ["mean"])
    assert len(set(stored.workers)) < 8
    assert mean.shares == pytest.approx({worker: stored.workers.count(worker) / 8 for worker in stored.workers})
    assert mean.byzantine_share == pytest.approx(sum(worker in (2, 5) for worker in stored.workers) / 8)


def test_a_resumed_run_stores_the_same_vectors(tables, tmp_path):
    tables |= {"mode": "clock", "policy": BUFFER, "aggregate": "foolsgold", "clock": {"slowdown": "linear"}}
    fedsim.run(tables, tmp_path / "whole")
    for rounds in (1, 2):
        fedsim.run(tables, tmp_path / "resumed", rounds=rounds, resume=rounds > 1)
    whole, resumed = ((tmp_path / name / "updates-00002.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert resumed == whole


def test_each_rule_does_what_aggregate_does_with_the_stored_rows(run):
    stored = load_round(run.folder, 1, allow_imports=True)
    updates = stored.tensors["updates"]
    rules = ["median", "krum", ["nnm", "trimmed_mean"], {"rule": "norm_clipping", "c": 0.1}]
    median, krum, mixed, clipped = replay(stored, rules)
    assert torch.equal(median.update, fedsim.aggregate(updates, "median"))
    assert torch.equal(krum.update, fedsim.aggregate(updates, "krum", f=2))
    assert torch.equal(mixed.update, fedsim.aggregate(updates, ["nnm", "trimmed_mean"], f=2))
    assert torch.equal(clipped.update, fedsim.aggregate(updates, "norm_clipping", c=0.1))


def test_distance_angle_and_shares_by_hand(run):
    stored = load_round(run.folder, 1, allow_imports=True)
    honest = [row for row, worker in enumerate(stored.workers) if worker not in (2, 5)]
    centre = stored.tensors["updates"][honest].double().mean(0)
    assert stored.byzantine == [2, 5]
    (mean,) = replay(stored, ["mean"])
    update = mean.update.double()
    assert mean.distance == pytest.approx(float((update - centre).norm()))
    assert mean.angle == pytest.approx(math.degrees(math.acos(float(update @ centre / update.norm() / centre.norm()))))
    assert mean.byzantine_share == pytest.approx(2 / 9)
    assert mean.chosen == stored.workers
    (krum,) = replay(stored, ["krum"])
    assert len(krum.chosen) == 1
    assert krum.byzantine_share == 0
    line, _ = (line.partition("  worker")[2] for line in replay_table(stored, [krum, mean]).splitlines()[2:])
    assert line == f" {krum.chosen[0]}"  # a bare number would look like a count


def test_rules_that_use_distances_share_one_gram_matrix(run, monkeypatch):
    stored, made, whole = load_round(run.folder, allow_imports=True), [], gram._products
    monkeypatch.setattr(gram, "_products", lambda rows, *more: made.append(len(rows)) or whole(rows, *more))
    monkeypatch.setattr(Pipeline, "dry_run", lambda self, n, **more: None)
    replay(stored, ["krum", "multi_krum", "medoid", "geometric_median", ["nnm", "krum"]])
    assert made == [9]


def test_a_rule_that_keeps_nan_shares_no_gram_matrix_with_rules_that_exclude_it(tables, tmp_path):
    tables |= {"attack": {"name": "nan", "workers": [2]}, "rounds": 1}
    fedsim.run({**tables, "aggregate": {"rule": "geometric_median", "nonfinite": "keep"}}, tmp_path / "run")
    own, krum = replay(load_round(tmp_path / "run", allow_imports=True), ["geometric_median", "krum"])
    assert own.update.isnan().all()
    assert krum.update.isfinite().all()


def test_the_default_is_all_applicable_rules(run):
    names = applicable_rules(load_round(run.folder, allow_imports=True))
    assert {"mean", "median", "krum", "caf"} <= set(names)
    # these need a root, losses, c or more rows
    assert not {"fltrust", "qfedavg", "norm_clipping", "bulyan"} & set(names)


def test_rules_that_trust_a_worker_outside_the_cohort_are_no_default(tables, tmp_path):
    sampled = {"workers": 9, "cohort": 5, "aggregate": "median", "attack": "none"}
    fedsim.run(
        {**tables, **sampled, "records": {"updates": [1, 2, 3, 4], "curve": False}, "rounds": 4}, tmp_path / "run"
    )
    of_rounds = [load_round(tmp_path / "run", number, allow_imports=True) for number in stored_rounds(tmp_path / "run")]
    assert {0 in stored.workers for stored in of_rounds} == {False, True}
    for stored in of_rounds:
        names = applicable_rules(stored)
        assert ("monna" in names) == (0 in stored.workers)
        assert len(replay(stored, names)) == len(names)


def test_the_table_wraps_in_a_narrow_terminal(run):
    stored = load_round(run.folder, 1, allow_imports=True)
    results = replay(stored, ["geometric_median", [{"rule": "bucketing", "s": 2}, "median"]])
    whole, narrow = replay_table(stored, results), replay_table(stored, results, 80)
    assert len(whole.splitlines()) == 4 < len(narrow.splitlines())
    assert whole.split() == narrow.split()
    assert "bucketing (s = 2) + median" in whole
    assert max(map(len, narrow.splitlines())) <= 90  # 20 for the workers, however long the rule names are


def test_the_command_shows_a_table_or_json(run):
    rules = 'median,krum,["nnm","median"],{rule="multi_krum",m=3}'
    words = ["replay", str(run.folder), "--allow-imports", "--rules", rules, "--round", "1"]
    names = ["median", "krum", "nnm + median", "multi_krum (m = 3)"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:]] == names
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["byzantine"] == [2, 5]
    assert [rule["rule"] for rule in told["rules"]] == names


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("medan", 'did you mean "median"'),
        (3, '3 must be a name such as "krum", or a list'),
        ({"rule": "krum", "f": 4}, "with a cohort of 9: krum: needs n >= 2f"),
        ("fltrust", r"root: is required by this rule"),
    ],
)
def test_a_rule_that_cannot_be_applied_gives_a_one_line_error(run, rule, message):
    with pytest.raises(ExperimentError, match=message):
        replay(load_round(run.folder, allow_imports=True), [rule])


def test_a_folder_without_stored_updates_gives_a_one_line_error(run, tables, tmp_path):
    fedsim.run({**tables, "records": {"curve": False}}, tmp_path / "bare")
    (run.folder / "updates-00002.safetensors").write_bytes(b"x" * 40)
    for folder, round, message in [
        (tmp_path, None, "is not a run folder"),
        (run.folder, 9, "has no updates of round 9; stored rounds: 1, 2"),
        (tmp_path / "bare", None, "has no stored updates"),
        (run.folder, 2, r"updates-00002.safetensors: cannot be read"),
    ]:
        with pytest.raises(RecordError, match=message):
            load_round(folder, round, allow_imports=True)
