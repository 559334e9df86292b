"""Privacy mechanisms: norms, noise, neighbouring sets of workers, and the order of clipping, attacks and processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import SettingWarning
from fedsim.privacy import clip_update
from fedsim.privacy.mechanisms import AdaptiveCentralPrivacy
from fedsim.records.reader import Run
from fedsim.report.run_page import facts
from fedsim.runs.setup import task_of
from fedsim.system.precision import PRECISIONS

D = 7850  # number of parameters of the model "logistic"
FLAT = {"model": "logistic", "rounds": 1, "workers": 5, "local": {"steps": 1, "batch_size": 16}}
UNCLIPPED = {"mechanism": "central", "clip": 1e6, "noise": 0.0}

received = []  # norms of the updates that the rule has received


def watched_mean(updates, weights=None, weight_total=None):
    """A linear rule that notes the norms of the updates."""
    if updates.shape[1] > len(updates):  # not the dry run on unit rows
        received.append(updates.double().norm(dim=1).tolist())
    weights = torch.ones(len(updates)) if weights is None else weights
    return (weights / (weight_total or weights.sum())).to(updates.dtype) @ updates


watched_mean.columnwise = watched_mean.linear = True


def longer(update):
    return 3 * update


def after(tables, **changes):
    """Return the parameters before and after a run."""
    result = fedsim.run({**tables, **changes})
    start = fedsim.run({**tables, **changes, "local": {"steps": 1, "lr": 0.0}, "privacy": "none", "processors": []})
    return result.global_row.double() - start.global_row.double()


def central(clip=0.01, noise=0.0, **more):
    return {"mechanism": "central", "clip": clip, "noise": noise, **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 0.3, 1.0, 1e4, 1e19])
def test_no_clipped_norm_exceeds_the_maximum(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    for d in (1, 2, 1000, 100_003):
        update = torch.randn(d, dtype=dtype, generator=generator) * scale
        before = update.clone()
        was_longer = clip_update(update, 0.7)
        assert np.linalg.norm(update.double().numpy()) <= 0.7
        assert bool(was_longer) == (np.linalg.norm(before.double().numpy()) > 0.7)
        assert was_longer or torch.equal(update, before) or before.double().norm() > 0.7 * (1 - 1e-5)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "tf32"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_in_every_precision_and_in_stacks_no_received_norm_exceeds_the_maximum(precision, engine, tiny_experiment):
    received.clear()
    tables = {**tiny_experiment, **FLAT, "precision": precision, "engine": engine, "processes": 1}
    fedsim.run({**tables, "aggregate": "tests.privacy.test_mechanisms:watched_mean", "privacy": central(0.01)})
    norms = np.array(received[-1])
    assert norms.shape == (5,)
    assert (norms <= 0.01).all()
    assert (norms > 0.0099).all()


def test_the_default_rule_names_what_central_privacy_computes(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, **FLAT, "privacy": UNCLIPPED}, tmp_path)
    assert result.experiment.aggregate.rule == "mean"
    assert ("rule", "mean") in facts(Run.read(tmp_path))
    with pytest.warns(SettingWarning, match="do not apply"):
        again = fedsim.load_experiment(result.experiment, ["privacy.mechanism=none"])
    assert again.aggregate.rule == "weighted_mean"  # the default is not taken along
    named = fedsim.load_experiment({"aggregate": {"nonfinite": "exclude"}, "privacy": UNCLIPPED})
    assert named.aggregate.rule == "mean"


@pytest.mark.parametrize("rule", ["mean", "weighted_mean"])
def test_the_divisor_is_the_expected_number_of_updates(rule, tiny_experiment):
    tables = {**tiny_experiment, **FLAT, "workers": 10, "cohort": 5, "rounds": 4, "sampling": "poisson"}
    tables["aggregate"] = {"rule": rule, "weights": "uniform"}
    history = fedsim.run({**tables, "privacy": UNCLIPPED}).history
    assert len({len(record.cohort) for record in history}) > 1
    assert all(record.weights == pytest.approx([1 / 5] * len(record.cohort)) for record in history)
    history = fedsim.run(
        {**tables, "privacy": central(1e-6)}
    ).history  # all updates of a cohort of any size are clipped
    assert [record.metrics["clipped_updates"] for record in history] == [1.0] * 4


@pytest.mark.parametrize("mechanism", ["central", "adaptive", "local"])
def test_noise_has_its_standard_deviation_and_new_numbers_in_each_round(mechanism, tiny_experiment):
    clip, noise = 0.5, 0.3
    privacy = {"mechanism": mechanism, "clip": clip, "noise": noise}
    more = {"count_noise": 0.2} if mechanism == "adaptive" else {}
    tables = {**tiny_experiment, **FLAT, "local": {"steps": 1, "lr": 0.0}, "privacy": {**privacy, **more}}
    first = after(tables)
    second = after({**tables, "rounds": 2}) - first
    expected = {
        "central": noise * clip / 5,
        "adaptive": noise / math.sqrt(1 - (noise / 0.4) ** 2) * clip / 5,
        "local": noise * clip / math.sqrt(5),
    }[mechanism]
    if mechanism == "adaptive":
        second /= fedsim.run({**tables, "rounds": 2}).history[-1].metrics["clip_norm"] / clip
    for drawn in (first, second):  # the standard error of a standard deviation of D numbers is 1 / sqrt(2 D) = 0.8 %
        assert drawn.std() == pytest.approx(expected, rel=0.04)
        assert abs(drawn.mean()) < 5 * expected / math.sqrt(D)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / math.sqrt(D)
    other_seed = after({**tables, "seed": 1})
    assert abs(torch.corrcoef(torch.stack([first, other_seed]))[0, 1]) < 5 / math.sqrt(D)


def test_adding_a_worker_changes_the_sum_by_at_most_the_maximum_norm(tiny_experiment):
    tables = {**tiny_experiment, **FLAT, "workers": 6, "cohort": 5, "precision": "float64", "privacy": central(0.02)}
    fixed = {"name": "fixed", "workers": [0, 1, 2, 3, 4]}
    with_worker = after({**tables, "sampling": fixed})
    for left_out in range(5):
        kept = [worker for worker in range(5) if worker != left_out]
        without = after({**tables, "cohort": 4, "sampling": {**fixed, "workers": kept}})
        distance = (5 * with_worker - 4 * without).norm()  # of the sums; the divisor is the cohort size
        assert distance <= 0.02 * (1 + 1e-9)
        assert distance > 0.0199


def test_an_empty_round_still_adds_noise(tiny_experiment):
    tables = {**tiny_experiment, **FLAT, "workers": 20, "cohort": 1, "rounds": 8, "sampling": "poisson"}
    result = fedsim.run({**tables, "privacy": central(0.5, 1.0)})
    empty = [record.round for record in result.history if not record.cohort]
    assert empty
    assert all(record.metrics["epsilon"] > 0 for record in result.history)
    first = next(round for round in empty if round > 1)
    private = {**tables, "privacy": central(0.5, 1.0)}
    before, including = (after({**private, "rounds": rounds}) for rounds in (first - 1, first))
    assert (including - before).std() == pytest.approx(0.5, rel=0.04)
    losses = [record.test_loss for record in fedsim.run(tables).history]
    assert losses[first - 1] == losses[first - 2]  # without privacy, the model stays unchanged
    assert fedsim.run({**private, "mode": "clock"}).history[first - 1].cohort == []


@pytest.mark.parametrize(("seed", "size"), [(0, 0), (1, 1), (3, 3)])
def test_feddyn_uses_the_expected_number_of_updates(seed, size, tiny_experiment):
    # In round 1, FedDyn trains like FedProx. The aggregate D then moves the model by D - h / alpha = D (1 + m / N).
    alpha, m, n = 0.5, 1, 10
    tables = {**tiny_experiment, **FLAT, "seed": seed, "workers": n, "cohort": m, "sampling": "poisson"}
    tables |= {"precision": "float64", "privacy": central(0.05, 1.0)}
    local = {"steps": 3, "lr": 0.05}
    by_algorithm = {"fedprox": {"mu": alpha}, "feddyn": {"alpha": alpha}}
    moves = {}
    for name, params in by_algorithm.items():
        result = fedsim.run({**tables, "local": {"algorithm": name, **params, **local}})
        start = fedsim.run({**tables, "local": {"lr": 0.0, "steps": 1}, "privacy": "none"})
        moves[name] = result.global_row - start.global_row
    assert len(result.history[0].cohort) == size
    assert torch.allclose(moves["feddyn"], moves["fedprox"] * (1 + m / n), rtol=1e-9, atol=1e-12)


def dividing_by_its_rows(updates):
    """A linear rule that always divides by the actual number of updates."""
    return updates.mean(0)


dividing_by_its_rows.columnwise = dividing_by_its_rows.linear = True


def test_the_norm_adapts_as_in_the_paper(tiny_experiment):
    privacy = {"mechanism": "adaptive", "clip": 0.05, "noise": 0.5, "quantile": 0.7, "lr": 0.5, "count_noise": 2.0}
    tables = {**tiny_experiment, **FLAT, "workers": 8, "cohort": 5, "rounds": 4, "privacy": privacy}
    history = fedsim.run(tables).history
    clip = 0.05
    for record in history:
        assert record.metrics["clip_norm"] == pytest.approx(clip)
        below = [1.0] * round(5 * (1 - record.metrics["clipped_updates"]))
        centred = sum(below) - 5 / 2  # each update counts as 1/2 or -1/2
        noisy = centred + 2.0 * numpy_generator(0, "clip_count", record.round).normal()
        clip *= math.exp(-0.5 * (noisy / 5 + 1 / 2 - 0.7))
    assert len({record.metrics["clip_norm"] for record in history}) == 4


def test_an_empty_round_adapts_the_norm_by_the_noise_of_the_count_alone(tiny_experiment):
    privacy = {"mechanism": "adaptive", "clip": 0.05, "noise": 0.5, "quantile": 0.7, "lr": 0.5, "count_noise": 2.0}
    tables = {**tiny_experiment, **FLAT, "workers": 10, "cohort": 1, "sampling": "poisson", "rounds": 2}
    empty, following = fedsim.run({**tables, "privacy": privacy}).history
    assert not empty.cohort
    assert "clipped_updates" not in empty.metrics
    assert empty.metrics["clip_norm"] == pytest.approx(0.05)
    noise = 2.0 * numpy_generator(0, "clip_count", 1).normal()
    assert following.metrics["clip_norm"] == pytest.approx(0.05 * math.exp(-0.5 * (noise + 1 / 2 - 0.7)))


def test_the_server_clips_to_the_norm_of_the_round_not_of_the_next(tiny_experiment):
    privacy = {"mechanism": "adaptive", "clip": 0.01, "noise": 0.0, "quantile": 0.9, "lr": 2.0, "count_noise": 1e-9}
    tables = {**tiny_experiment, **FLAT, "aggregate": "tests.privacy.test_mechanisms:watched_mean", "rounds": 2}
    attack = {"name": "tests.privacy.test_mechanisms:far", "workers": [0]}
    received.clear()
    history = fedsim.run({**tables, "attack": attack, "privacy": privacy}).history
    for record, norms in zip(history, received, strict=True):
        assert norms[0] == pytest.approx(record.metrics["clip_norm"], rel=1e-4)  # of the attacker, who does not clip
    assert history[1].metrics["clip_norm"] > 2 * history[0].metrics["clip_norm"]


def test_the_default_noise_of_the_count_is_a_twentieth_of_the_cohort():
    mechanism = AdaptiveCentralPrivacy(clip=1.0, noise=1.0)
    assert mechanism.noise_of_sum(cohort=100) == pytest.approx(1 / math.sqrt(1 - (1 / (2 * 100 / 20)) ** 2))
    with pytest.raises(fedsim.ExperimentError, match=r"must be less than 0\.5"):
        mechanism.check(5)


def test_the_norm_of_a_resumed_run_continues(tiny_experiment, tmp_path):
    privacy = {"mechanism": "adaptive", "clip": 0.05, "noise": 0.1, "lr": 1.0}
    tables = {**tiny_experiment, **FLAT, "privacy": privacy, "checkpoint": {"every": 1}}
    fedsim.run({**tables, "rounds": 2}, tmp_path / "run")
    resumed = fedsim.run({**tables, "rounds": 4}, tmp_path / "run", resume=True)
    whole = fedsim.run({**tables, "rounds": 4})
    assert [record.metrics for record in resumed.history] == [record.metrics for record in whole.history]
    assert torch.equal(resumed.global_row, whole.global_row)


def test_attackers_see_clipped_updates_and_the_server_clips_theirs(tiny_experiment):
    seen.clear()
    received.clear()
    tables = {**tiny_experiment, **FLAT, "aggregate": "tests.privacy.test_mechanisms:watched_mean"}
    attack = {"name": "tests.privacy.test_mechanisms:far", "workers": [0]}
    fedsim.run({**tables, "attack": attack, "privacy": central(0.01)})
    assert all(0.0099 < norm <= 0.01 for norm in seen[-1])
    assert all(0.0099 < norm <= 0.01 for norm in received[-1])  # of the attacker too
    received.clear()
    fedsim.run({**tables, "attack": attack, "privacy": {"mechanism": "local", "clip": 0.01, "noise": 0.0}})
    assert max(received[-1]) > 1  # with local privacy nobody clips the updates of attackers


def mean_that_notes_the_root(updates, root):
    received.append([float(root.norm()), *updates.norm(dim=1).tolist()])
    return updates.mean(0)


def test_the_update_of_the_server_is_not_clipped(tiny_experiment):
    rule = {"rule": "tests.privacy.test_mechanisms:mean_that_notes_the_root", "root_samples": 20}
    privacy = {"mechanism": "local", "clip": 0.01, "noise": 0.0}
    (record,) = fedsim.run({**tiny_experiment, **FLAT, "aggregate": rule, "privacy": privacy}).history
    root, *norms = received[-1]
    assert root > 0.02
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
    assert record.metrics["clipped_updates"] == 1


def test_processors_follow_the_clipping_of_the_workers(tiny_experiment):
    tables = {**tiny_experiment, **FLAT, "aggregate": "tests.privacy.test_mechanisms:watched_mean"}
    tables |= {"processors": ["tests.privacy.test_mechanisms:longer"]}
    received.clear()
    fedsim.run({**tables, "privacy": central(0.01)})
    assert all(0.0099 < norm <= 0.01 for norm in received[-1])  # clipped again
    fedsim.run({**tables, "privacy": {"mechanism": "local", "clip": 0.01, "noise": 0.0}})
    assert received[-1] == pytest.approx([0.03] * 5, rel=1e-3)


@pytest.mark.parametrize(("before_processors", "norm"), [(False, 0.03), (True, 0.01)])
def test_attackers_see_clipped_updates_after_or_before_the_processors(before_processors, norm, tiny_experiment):
    seen.clear()
    attack = {"name": "tests.privacy.test_mechanisms:far", "workers": [0], "before_processors": before_processors}
    processors = ["tests.privacy.test_mechanisms:longer"]
    fedsim.run({**tiny_experiment, **FLAT, "attack": attack, "processors": processors, "privacy": central(0.01)})
    assert seen[-1] == pytest.approx([norm] * 4, rel=1e-3)


def test_the_count_changes_by_a_half_for_a_missing_worker_and_by_one_for_a_replaced_worker():
    mechanism = AdaptiveCentralPrivacy(clip=1.0, noise=0.0, lr=1.0)

    def count(clipped, updates):  # m b, up to the same noise
        return -10 * math.log(mechanism.next_clip(1.0, clipped, updates, 10.0, 0, 1))

    for clipped in range(10):
        assert abs(count(clipped, 10) - count(clipped, 9)) == pytest.approx(1 / 2)  # one unclipped update less
        assert abs(count(clipped + 1, 10) - count(clipped, 9)) == pytest.approx(1 / 2)  # one clipped update less
        assert abs(count(clipped + 1, 10) - count(clipped, 10)) == pytest.approx(1)


seen = []


def far(honest, own_updates):
    """An attack that notes the norms of the honest updates."""
    seen.append(honest.double().norm(dim=1).tolist())
    return own_updates + 1


def test_personal_parameters_get_no_noise(tiny_experiment):
    local = {"algorithm": "fedper", "personal": ["*.bias"], "lr": 0.0, "steps": 1}
    privacy = central(1.0, 1.0)
    noisy = after({**tiny_experiment, **FLAT, "local": local, "privacy": privacy})
    assert (noisy == 0).sum() == 10


PROTECTIONS = [
    {"privacy": central(1.0, 1.0)},
    {"privacy": {"mechanism": "local", "clip": 1.0, "noise": 1.0}},
    {"local": {"algorithm": "dp_sgd", "lr": 0.1, "clip": 1.0, "noise": 1.0}},
]


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize(
    "metric",
    ["train_loss", "worker_loss", "metrics.clipped_updates", "metrics.worker_accuracy_std", "metrics.of_my_rule"],
)
def test_private_values_decide_no_end_of_a_run(metric, protection):
    tables = {"stop": {"metric": metric, "mode": "min", "patience": 2}, "data": {"local_test_fraction": 0.2}}
    with pytest.raises(fedsim.ExperimentError, match=r"^stop.metric = .* reveal") as caught:
        fedsim.Experiment(**protection, **tables)
    assert len(caught.value.lines) == 1
    fedsim.Experiment(**tables)


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("metric", ["test_loss", "validation_loss", "metrics.macro_f1", "metrics.epsilon"])
def test_tests_and_epsilon_may_decide_the_end_of_a_run(metric, protection):
    stop = {"metric": metric, "mode": "min", "patience": 2}
    fedsim.Experiment(**protection, stop=stop, metrics=["macro_f1"], data={"validation_fraction": 0.1})


def test_an_update_with_nan_decides_no_end_of_a_run():
    stopping = {"aggregate": {"rule": "mean", "nonfinite": "stop"}}
    for protection in PROTECTIONS[:2]:
        with pytest.raises(fedsim.ExperimentError, match=r"^aggregate.nonfinite = .*exclude$"):
            fedsim.Experiment(**stopping, **protection)
    fedsim.Experiment(**stopping)


def test_buffers_without_protection_are_refused(tiny_experiment):
    tables = {**tiny_experiment, "model": "tests.models:Normalised", "privacy": central(1.0, 1.0)}
    remedy = "use a model without buffers, such as a ResNet with model.norm=group$"
    with pytest.raises(fedsim.ExperimentError, match=f"^buffers = .* {remedy}"):
        fedsim.run(tables)
    with pytest.warns(SettingWarning, match=f'^buffers = "frozen": .* {remedy}'):
        fedsim.run({**tables, "rounds": 1, "buffers": "frozen"})
    task_of(fedsim.Experiment(**{**tables, "model": {"name": "resnet20", "norm": "group"}}), torch.device("cpu"))


@pytest.mark.parametrize("clipped", [0, 5])
def test_the_adaptive_norm_stays_positive_and_finite(clipped):
    mechanism, clip = AdaptiveCentralPrivacy(clip=1.0, noise=0.0, lr=1e4), 1.0
    for round in range(1, 20):
        clip = mechanism.next_clip(clip, clipped, 5, 5, 0, round)
    assert 0 < torch.tensor(clip, dtype=torch.float32) < torch.inf
