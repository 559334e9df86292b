"""Rules, pre-aggregators, attacks and server optimizers on GPU tensors, compared with CPU tensors.

Also updates that are hard to aggregate: near ties, large offsets, outliers, half precision, and NaN.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, make_pipeline, resolve, rule
from fedsim.aggregation.rule import pre_aggregator
from fedsim.byzantine.base import attack_strategy
from fedsim.server.optimizer import server_optimizer
from tests.device.agreement import COLUMNS, REAL, every, settings_of, some_gpu, to_gpu
from tests.device.pretend import upload

pytestmark = pytest.mark.filterwarnings("ignore:.* poisons data, not updates")

N, F = 11, 2
RULES = fedsim.components("rules")
NAMES = [registration.name for registration in rule if "models" not in registration.takes]
LINEAR = ["mean", "weighted_mean"]
COLUMNWISE = ["median", "trimmed_mean", "meamed", "phocas", "sign_vote", "bridge"]
SELECTIONS = ["krum", "multi_krum", "medoid", "mda", "smea", "cge", "aksel", "monna"]
OF_GRAPHS = [registration.name for registration in rule if "own" in registration.takes]
NEED_MORE = ["krum", "multi_krum", "bulyan", "foolsgold"]  # need more than one update
UNREADABLE = ["qfedavg without q", "bucketing and median"]  # these read no numbers of the updates on the host
BROKEN = [torch.nan, torch.inf, -torch.inf]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# rounding errors that rules may make in each dtype, in units of its precision
ROUNDING = {torch.float64: 1e6, **({torch.float32: 1e3, torch.bfloat16: 6.0} if REAL else {})}


def normal(n=N, d=200, seed=0):
    return torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def near_ties(gap):
    """Updates on a circle around zero, whose radii and distances differ by about `gap`, relative to their size."""
    updates = torch.zeros(N, 200, dtype=torch.double)
    updates[:, :N].fill_diagonal_(1.0)
    return updates * (1 + gap * torch.tensor([6, 2, 9, 4, 1, 8, 3, 10, 7, 5, 0])[:, None])


def with_outlier():
    updates = normal()
    updates[7] *= 1e9
    return updates


def with_copies():
    updates = normal()
    updates[8:] = updates[3]
    return updates


def spoilt(value, dtype=torch.float32):
    updates = normal().to(dtype)
    updates[4, 123] = value
    return updates


CASES = {
    "ordinary": normal,
    "near ties in float32": lambda: near_ties(2.0**-22),  # exact in float32, but float32 products would round them
    "near ties in float64": lambda: near_ties(1e-10),
    "far from zero": lambda: normal() * 1e-3 + 1e3,
    "an outlier": with_outlier,
    "equal updates": with_copies,
    "tiny": lambda: normal() * 1e-30,
    "large": lambda: normal() * 1e30,
    "many columns": lambda: normal(d=COLUMNS),
    "very large": lambda: with_copies() * 1e140,  # the fourth power of these numbers exceeds float64
}


@functools.cache
def updates_of(case, dtype):
    return CASES[case]().to(dtype)


def aggregated(name, updates, **inputs):
    """Return the aggregate of `updates` by the rule called `name`. `inputs` may also contain parameters of the rule."""
    accepted = RULES[name].parameters if name in RULES else {}
    params = {
        key: value for key, value in {"f": F, "c": 1.0, "lam": 1.5}.items() if key in accepted and key not in inputs
    }
    if name in ("fltrust", "zeno_plus_plus", "afl_guard") and "root" not in inputs:
        inputs["root"] = updates[0].nan_to_num(0, 0, 0) + updates[-1].nan_to_num(0, 0, 0)
    if name.startswith("qfedavg"):
        inputs["losses"] = torch.arange(1.0, len(updates) + 1)
    if name in OF_GRAPHS and len(updates):
        inputs["own"] = 0
    if name == "qfedavg without q":
        name, params = "qfedavg", {"q": 0.0}
    stages = ["bucketing", "median"] if name == "bucketing and median" else name
    return fedsim.aggregate(updates, stages, **params, **inputs)


def refusal_or(function, *tensors):
    """Return the result of a function, or the message of its error."""
    try:
        return function(*tensors)
    except fedsim.ExperimentError as error:
        return str(error)


def on_both(function, *tensors):
    """Return the result of a function, or the message of its error, for tensors on the CPU and on a GPU."""
    expected = refusal_or(function, *tensors)
    with some_gpu():
        actual = refusal_or(function, *map(to_gpu, tensors))
        assert isinstance(actual, str) or actual.is_cuda
    return expected, actual if isinstance(actual, str) else actual.cpu()


def assert_same_on_gpu(function, *tensors, rounding=None, scale=None):
    """Check that a function returns the same on a GPU as on the CPU, or raises the same error. Return the result.

    Values may differ by `rounding` times the machine precision (default: 4, in float64 10**6), relative to `scale`, or
    to the largest value.
    """
    expected, actual = on_both(function, *tensors)
    if isinstance(expected, str):
        assert actual == expected
        return expected
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if scale is None:
        scale = float(expected.double().nan_to_num(posinf=0, neginf=0).abs().max()) if expected.numel() else 0.0
    rounding = rounding or (1e6 if actual.dtype == torch.float64 else 4)
    tolerance = rounding * torch.finfo(actual.dtype).eps * max(1e-30, scale)
    assert torch.allclose(actual.double(), expected.double(), rtol=0, atol=tolerance, equal_nan=True)
    return expected


each_precision = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(("many columns", dtype) for dtype in ROUNDING),
        ("ordinary", torch.float16),
        *(("far from zero", torch.float32), ("an outlier", torch.bfloat16), ("equal updates", torch.float32)),
        ("very large", torch.float64),
    ],
    ids=str,
)
def test_every_rule_agrees_with_the_cpu_on_difficult_updates(case, dtype):
    updates = updates_of(case, dtype)
    for name in NAMES:
        expected = refusal_or(functools.partial(aggregated, name), updates)
        largest = 0.0 if isinstance(expected, str) else float(expected.double().abs().max())
        scale = max(largest, float(updates.double().abs().median()))
        assert_same_on_gpu(lambda x, name=name: aggregated(name, x), updates, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [registration.name for registration in rule if "weights" in registration.takes])
def test_a_rule_with_weights(name):
    weights = torch.arange(1.0, N + 1)
    assert_same_on_gpu(lambda x: aggregated(name, x, weights=weights), normal(d=COLUMNS))
    assert_same_on_gpu(lambda x, w: aggregated(name, x, weights=w), normal(d=COLUMNS), weights)


@pytest.mark.gpu
@each_precision
@every(pre_aggregator)
def test_a_pre_aggregator(registration, dtype):
    settings, updates = settings_of(registration), normal(d=COLUMNS).to(dtype)
    name = settings.pop("name")
    for last in ("median", {"rule": "krum", "f": 1}):
        chain = [{"rule": name, **settings}, last]
        assert_same_on_gpu(lambda x, chain=chain: fedsim.aggregate(x, chain), updates, rounding=ROUNDING[dtype])
    assert_same_on_gpu(lambda x: fedsim.pre_aggregate(x, name, **settings), updates, rounding=ROUNDING[dtype])


def attacked(registration, honest, last, own_updates=None):
    """Return three Byzantine rows."""
    settings = settings_of(registration)
    inputs = {"own_updates": own_updates, "last": last, "aggregate": lambda x: x.median(0).values}
    return fedsim.attack(honest, settings.pop("name"), 3, **inputs, **settings)


@pytest.mark.gpu
@each_precision
@every(attack_strategy)
def test_an_attack(registration, dtype):
    honest, own_updates, last = normal(d=COLUMNS).to(dtype).split([7, 3, 1])
    for tensors in ((honest, last[0], own_updates), (honest, last[0])):
        assert_same_on_gpu(functools.partial(attacked, registration), *tensors, rounding=ROUNDING[dtype])


@every(attack_strategy)
def test_an_attack_makes_its_rows_on_the_gpu_in_one_block_of_columns(registration, gpu):
    launches = []
    for d, own in itertools.product((10, 40_000), (True, False)):
        honest, last, own_updates = (to_gpu(normal(*shape)) for shape in ((8, d), (1, d), (3, d)))
        with gpu.counting() as counts:
            attacked(registration, honest, last[0], own_updates if own else None)
        assert counts.uploads == 0, counts.table()
        assert counts.waits == 0 or "aggregate" in registration.takes, counts.table()
        launches.append(counts.launches)
    assert launches[:2] == launches[2:], counts.table()


@pytest.mark.gpu
def test_updates_in_which_tensors_of_the_gpu_lie_beside_arrays():
    def aggregated_entries(x):
        updates = [{"a": row[:150], "b": np.array([float(index)])} for index, row in enumerate(x)]
        result = fedsim.aggregate(updates, "median")
        assert result["b"].tolist() == [(N - 1) / 2]
        return result["a"]

    assert_same_on_gpu(aggregated_entries, normal())


@pytest.mark.gpu
def test_updates_in_which_parameters_lie_on_two_devices():
    with some_gpu():
        updates = [{"a": torch.ones(2), "b": torch.ones(3, device="cuda") * index} for index in range(4)]
        result = fedsim.aggregate(updates, "mean")
        assert not result["a"].is_cuda
        assert result["b"].is_cuda


@pytest.mark.gpu
@every(server_optimizer)
def test_a_server_optimizer(registration):
    def moved(row, updates):
        settings = settings_of(registration)
        server = fedsim.ServerOptimizer(settings.pop("name"), **settings)
        for update in updates:
            row = server.step(row, update)
        return torch.cat([row, server.broadcast(row), *server.state.values()])

    assert_same_on_gpu(moved, normal()[0], normal()[1:4])


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_rule_selects_the_same_updates_as_in_float64_on_a_cpu(name, gpu):
    pipeline = make_pipeline(resolve(name, {"f": F} if "f" in RULES[name].parameters else {}))
    for case, dtype in itertools.product(CASES, DTYPES):
        updates = updates_of(case, dtype)
        if case == "very large" or not updates.isfinite().all():  # too large for float16
            continue
        expected, of_cpu, of_gpu = (
            pipeline(AggregationInputs(each)).shares for each in (updates.double(), updates, upload(updates))
        )
        assert torch.equal(of_cpu, expected), (case, dtype)
        assert torch.equal(of_gpu, expected), (case, dtype)


@pytest.mark.gpu
def test_a_single_update_and_updates_without_values_are_aggregated():
    for name, dtype in itertools.product(NAMES, DTYPES):
        single = assert_same_on_gpu(lambda x, name=name: aggregated(name, x, **few(name)), normal(1, 5).to(dtype))
        assert isinstance(single, str) == (name in NEED_MORE), (name, single)
    for name in NAMES:
        nothing = assert_same_on_gpu(lambda x, name=name: aggregated(name, x), normal(N, 0))
        if name == "signguard":
            assert nothing == "signguard: needs d >= 1; here d = 0"
        else:
            assert nothing.shape == (0,), name


def few(name):
    """Return parameters of a rule that allow a single update."""
    return {key: value for key, value in {"f": 0, "c": 100.0, "lam": 1.5}.items() if key in RULES[name].parameters}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, *UNREADABLE])
def test_an_update_that_is_not_finite_is_never_ignored_in_silence(name):
    for value in BROKEN:
        expected, result = on_both(functools.partial(aggregated, name), spoilt(value))
        if name in LINEAR:  # NaN or infinity where the update has it
            assert (~result.isfinite()).nonzero().flatten().tolist() == [123]
        elif name in [*COLUMNWISE, *UNREADABLE]:
            assert result.isnan().all()
        else:
            assert result == expected
            assert "1 of 11 updates contain NaN or infinity (from workers 4)" in result


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, *UNREADABLE])
def test_an_update_that_is_not_finite_is_excluded_as_on_a_cpu(name):
    for value, dtype in zip(BROKEN, (torch.float32, torch.float32, torch.float16), strict=True):
        assert_same_on_gpu(lambda x: aggregated(name, x, nonfinite="exclude"), spoilt(value, dtype), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stages", "params"),
    [
        ("trimmed_mean", {"f": 2}),
        ("meamed", {"f": 2}),
        (["arc", "median"], {"f": 2}),
        ("mda", {"f": 2}),
        (["bucketing", "qfedavg"], {"s": 1, "losses": [1.0, 2.0, 3.0, 4.0]}),
    ],
    ids=str,
)
def test_a_constraint_on_n_and_f_applies_to_the_updates_that_are_not_excluded(stages, params):
    updates = normal(4, 5)
    updates[1] = torch.nan
    expected = assert_same_on_gpu(lambda x: fedsim.aggregate(x, stages, nonfinite="exclude", **params), updates)
    assert expected.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["error", "exclude"])
def test_draws_on_a_gpu_are_those_of_a_cpu_after_a_second_attempt(nonfinite):
    large = (0.1 * normal(12, 70_000) + 1.5).half()  # the sum of an update exceeds the maximum of float16
    for inputs in ({"name": ["bucketing", "median"]}, {"name": "dnc", "f": 1}):
        result = assert_same_on_gpu(lambda x, inputs=inputs: fedsim.aggregate(x, nonfinite=nonfinite, **inputs), large)
        assert result.isfinite().all()
    for seed in (4, 5, 6, 21, 28, 29):  # with these draws, dnc keeps no update
        with some_gpu(), pytest.raises(fedsim.ExperimentError, match="no update is kept by all 4 iterations"):
            fedsim.aggregate(to_gpu(normal(6, 40)), "dnc", f=2, b=2, iterations=4, seed=seed, nonfinite=nonfinite)


@pytest.mark.gpu
@pytest.mark.parametrize("value", BROKEN)
def test_an_update_that_is_not_finite_is_kept_as_on_a_cpu(value):
    for name, shape in itertools.product(NAMES, ((N, 200), (N, 1))):
        updates = normal(*shape).float()
        updates[4, -1] = value
        assert_same_on_gpu(lambda x, name=name: aggregated(name, x, nonfinite="keep"), updates, rounding=99, scale=1.0)


@pytest.mark.parametrize("name", ["krum", "multi_krum", "mda", "smea"])
def test_an_update_with_infinity_is_far_from_all_others(name):
    for value in (torch.inf, -torch.inf):
        shares = make_pipeline(resolve(name, {"f": F}))(AggregationInputs(spoilt(value))).shares
        assert shares[4] == 0


@pytest.mark.parametrize("name", ["caf", "dnc", "medoid"])
def test_a_rule_that_cannot_compare_an_update_says_so(name):
    message = refusal_or(lambda x: aggregated(name, x, nonfinite="keep"), spoilt(torch.nan))
    assert message == (
        f"{name}: cannot compare updates that contain NaN or infinity; exclude such updates with "
        'aggregate.nonfinite=exclude (fedsim.aggregate: nonfinite="exclude")'
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_large_finite_updates_are_not_taken_for_infinity(name):
    """The sums of these float32 numbers overflow, which may be an error or infinity in the result, but not NaN."""
    expected, result = on_both(functools.partial(aggregated, name), normal().float().clamp(-3, 3) * 1e38)
    if isinstance(result, str):
        assert result == expected or "scale the updates down" in result
        return
    assert not result.isnan().any()
    if isinstance(expected, str):
        assert not result.isfinite().all()
    else:
        assert torch.allclose(result, torch.where(result.isinf(), result, expected), rtol=1e-5, atol=1e32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"name": "fltrust", "root": spoilt(torch.nan)[4]}, "root: must be finite; 1 of its values"),
        ({"name": "centered_clipping", "last": spoilt(torch.nan)[4]}, "last: must be finite; 1 of its values"),
        ({"name": "dnc", "f": 1, "b": 1}, "1 of 11 updates contain NaN"),  # in a column that it does not draw
    ],
)
def test_an_input_that_is_not_finite_is_an_error(inputs, message):
    updates = spoilt(torch.nan) if inputs["name"] == "dnc" else normal().float()
    with some_gpu():
        on_gpu = {key: to_gpu(value) if key in ("root", "last") else value for key, value in inputs.items()}
        with pytest.raises(fedsim.ExperimentError, match=message):
            fedsim.aggregate(to_gpu(updates), **on_gpu)


def own_median(updates):
    assert updates.isfinite().all(), "a rule that is not fedsim's receives checked updates"
    return updates.median(0).values


def own_doubling(updates):
    assert updates.isfinite().all()
    return 2 * updates


@pytest.mark.gpu
def test_an_own_rule_receives_finite_updates_only():
    with some_gpu():
        updates = to_gpu(spoilt(torch.nan))
        assert fedsim.aggregate(updates, own_median, nonfinite="exclude").isfinite().all()
        for call, stage in ((fedsim.aggregate, own_median), (fedsim.pre_aggregate, own_doubling)):
            with pytest.raises(fedsim.ExperimentError, match="1 of 11 updates contain NaN"):
                call(updates, stage)


@pytest.mark.skipif(not REAL, reason="needs a real GPU")
@pytest.mark.gpu
def test_a_product_with_zero_passes_on_nan_on_a_real_gpu():
    """`add` with alpha=0 is how a result becomes NaN without a wait."""
    for value in BROKEN:
        assert torch.ones(3, device="cuda").add(torch.tensor(value, device="cuda"), alpha=0).isnan().all()
