"""Updates that are hard to aggregate: near ties, large offsets, outliers, half precision, and NaN on a GPU."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, make_pipeline, resolve, rule
from tests.aggregation import reference
from tests.device.agreement import REAL, some_gpu, to_gpu
from tests.device.pretend import download, upload

N, F = 11, 2
NAMES = [registration.name for registration in rule]
LINEAR = ["mean", "weighted_mean"]
COLUMNWISE = ["median", "trimmed_mean", "meamed", "phocas", "sign_vote"]
SELECTIONS = ["krum", "multi_krum", "medoid", "mda", "smea", "cge", "aksel", "monna"]
UNREADABLE = ["qfedavg without q", "bucketing and median"]  # these read no numbers of the updates on the host


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


CASES = {
    "ordinary": normal,
    "near ties in float32": lambda: near_ties(2.0**-22),  # exact in float32, but float32 products would round them
    "near ties in float64": lambda: near_ties(1e-10),
    "far from zero": lambda: normal() * 1e-3 + 1e3,
    "an outlier": with_outlier,
    "equal updates": with_copies,
    "tiny": lambda: normal() * 1e-30,
    "large": lambda: normal() * 1e30,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def aggregated(name, updates, **inputs):
    """Return the aggregate of `updates` by the rule called `name`, or the message of its error."""
    accepted = fedsim.rules()[name].parameters if name in fedsim.rules() else {}
    params = {key: value for key, value in {"f": F, "c": 1.0}.items() if key in accepted}
    if name == "fltrust":
        inputs["root"] = updates[0].nan_to_num(0, 0, 0) + updates[1].nan_to_num(0, 0, 0)
    if name.startswith("qfedavg"):
        inputs["losses"] = torch.ones(len(updates))
    if name == "qfedavg without q":
        name, params = "qfedavg", {"q": 0.0}
    stages = ["bucketing", "median"] if name == "bucketing and median" else name
    return refusal_or(fedsim.aggregate, updates, rule=stages, **params, **inputs)


def refusal_or(function, *arguments, **inputs):
    """Return the result of a function, or the message of its error."""
    try:
        return function(*arguments, **inputs)
    except fedsim.ExperimentError as error:
        return str(error)


@functools.cache
def updates_of(case, dtype):
    return CASES[case]().to(dtype)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_rule_selects_the_same_updates_as_in_float64_on_a_cpu(name, gpu):
    pipeline = make_pipeline(resolve(name, {"f": F} if "f" in fedsim.rules()[name].parameters else {}))
    for case, dtype in itertools.product(CASES, DTYPES):
        updates = updates_of(case, dtype)
        if not updates.isfinite().all():  # too large for float16
            continue
        expected, of_cpu, of_gpu = (
            pipeline(AggregationInputs(each)).shares for each in (updates.double(), updates, upload(updates))
        )
        assert torch.equal(of_cpu, expected), (case, dtype)
        assert torch.equal(of_gpu, expected), (case, dtype)


@pytest.mark.parametrize("name", ["krum", "multi_krum", "cge", "monna"])
@pytest.mark.parametrize("case", ["near ties in float32", "ordinary", "an outlier"])
def test_a_rule_selects_the_updates_that_its_definition_selects(name, case, gpu):
    updates = updates_of(case, torch.float32)
    expected = torch.from_numpy(getattr(reference, name)(updates.double().numpy(), F))
    for each in (updates, upload(updates)):
        result = download(aggregated(name, each))
        assert torch.allclose(result.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("ordinary", torch.float16),
        ("far from zero", torch.float32),
        ("an outlier", torch.bfloat16),
        ("equal updates", torch.float32),
    ],
    ids=str,
)
def test_every_rule_agrees_with_the_cpu_on_difficult_updates(case, dtype):
    updates, tolerance = updates_of(case, dtype), 4 * torch.finfo(dtype).eps
    for name in NAMES:
        expected = aggregated(name, updates)
        with some_gpu():
            result = aggregated(name, to_gpu(updates))
        if isinstance(expected, str):
            assert result == expected, name
            continue
        scale = max(1e-30, float(expected.double().abs().max()), float(updates.double().abs().median()))
        assert float((result.cpu() - expected).double().abs().max()) <= tolerance * scale, name


@pytest.mark.gpu
def test_a_single_update_is_aggregated():
    for name, dtype in itertools.product(NAMES, DTYPES):
        if name in ("krum", "multi_krum", "bulyan", "foolsgold"):  # these need more updates
            continue
        updates = normal(1, 5).to(dtype)
        params = {"f": 0} if "f" in fedsim.rules()[name].parameters else {"c": 100.0} if name == "norm_clipping" else {}
        inputs = {"root": updates[0]} if name == "fltrust" else {"losses": [1.0]} if name == "qfedavg" else {}
        expected = fedsim.aggregate(updates, rule=name, **params, **inputs)
        with some_gpu():
            moved = {key: to_gpu(value) if key == "root" else value for key, value in inputs.items()}
            result = fedsim.aggregate(to_gpu(updates), rule=name, **params, **moved).cpu()
        assert torch.allclose(result.double(), expected.double(), rtol=4 * torch.finfo(dtype).eps, atol=1e-30), name


@pytest.mark.gpu
def test_updates_without_values_are_aggregated():
    for name in NAMES:
        expected = aggregated(name, normal(N, 0))
        with some_gpu():
            result = aggregated(name, to_gpu(normal(N, 0)))
        if name == "signguard":
            assert result == expected == "signguard: needs d >= 1; here d = 0"
        else:
            assert result.shape == expected.shape == (0,), name


def spoilt(value, dtype=torch.float32):
    updates = normal().to(dtype)
    updates[4, 123] = value
    return updates


BROKEN = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, *UNREADABLE])
def test_an_update_that_is_not_finite_is_never_ignored_in_silence(name):
    for value in BROKEN:
        with some_gpu():
            result = aggregated(name, to_gpu(spoilt(value)))
        if name in LINEAR:  # NaN or infinity where the update has it
            assert (~result.isfinite()).nonzero().flatten().tolist() == [123]
        elif name in [*COLUMNWISE, *UNREADABLE]:
            assert result.isnan().all()
        else:
            assert result == aggregated(name, spoilt(value))
            assert "1 of 11 updates hold NaN or infinity (from workers 4)" in result


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, *UNREADABLE])
def test_an_update_that_is_not_finite_is_excluded_as_on_a_cpu(name):
    for value, dtype in zip(BROKEN, (torch.float32, torch.float32, torch.float16), strict=True):
        updates = spoilt(value, dtype)
        expected = aggregated(name, updates, nonfinite="exclude")
        with some_gpu():
            result = aggregated(name, to_gpu(updates), nonfinite="exclude").cpu()
        assert torch.allclose(result.double(), expected.double(), rtol=0, atol=4 * torch.finfo(dtype).eps)


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
    expected = fedsim.aggregate(updates, rule=stages, nonfinite="exclude", **params)
    with some_gpu():
        result = fedsim.aggregate(to_gpu(updates), rule=stages, nonfinite="exclude", **params).cpu()
    assert torch.allclose(result, expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["error", "exclude"])
def test_draws_on_a_gpu_are_those_of_a_cpu_after_a_second_attempt(nonfinite):
    large = (0.1 * normal(12, 70_000) + 1.5).half()  # the sum of an update exceeds the maximum of float16
    for inputs in ({"rule": ["bucketing", "median"]}, {"rule": "dnc", "f": 1}):
        expected = fedsim.aggregate(large, nonfinite=nonfinite, **inputs)
        with some_gpu():
            result = fedsim.aggregate(to_gpu(large), nonfinite=nonfinite, **inputs)
        assert torch.allclose(result.cpu(), expected, rtol=2e-3, atol=0)  # up to rounding in float16
    for seed in (4, 5, 6, 21, 28, 29):  # with these draws, dnc keeps no update
        with some_gpu(), pytest.raises(fedsim.ExperimentError, match="no update is kept by all 4 iterations"):
            fedsim.aggregate(to_gpu(normal(6, 40)), rule="dnc", f=2, b=2, iterations=4, seed=seed, nonfinite=nonfinite)


@pytest.mark.gpu
@pytest.mark.parametrize("value", BROKEN)
def test_an_update_that_is_not_finite_is_kept_as_on_a_cpu(value):
    for name, shape in itertools.product(NAMES, ((N, 200), (N, 1))):
        updates = normal(*shape).float()
        updates[4, -1] = value
        expected = aggregated(name, updates, nonfinite="keep")
        with some_gpu():
            result = aggregated(name, to_gpu(updates), nonfinite="keep")
        if isinstance(expected, str):
            assert result == expected, name
        else:
            assert torch.allclose(result.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True), name


@pytest.mark.parametrize("name", ["krum", "multi_krum", "mda", "smea"])
def test_an_update_with_infinity_is_far_from_all_others(name):
    for value in (torch.inf, -torch.inf):
        updates = spoilt(value)
        shares = make_pipeline(resolve(name, {"f": F}))(AggregationInputs(updates)).shares
        assert shares[4] == 0


@pytest.mark.parametrize("name", ["caf", "dnc", "medoid"])
def test_a_rule_that_cannot_compare_an_update_says_so(name):
    message = aggregated(name, spoilt(torch.nan), nonfinite="keep")
    assert message == f'{name}: cannot compare updates that hold NaN or infinity; use nonfinite = "exclude"'


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_large_finite_updates_are_not_taken_for_infinity(name):
    """The sums of these float32 numbers overflow, which may be an error or infinity in the result, but not NaN."""
    updates = normal().float().clamp(-3, 3) * 1e38
    expected = aggregated(name, updates)
    with some_gpu():
        result = aggregated(name, to_gpu(updates))
    if isinstance(result, str):
        assert result == expected or "scale the updates down" in result
        return
    result = result.cpu()
    assert not result.isnan().any()
    if isinstance(expected, str):
        assert not result.isfinite().all()
    else:
        assert torch.allclose(result, torch.where(result.isinf(), result, expected), rtol=1e-5, atol=1e32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["root", "last"])
def test_an_input_that_is_not_finite_is_an_error(name):
    row = torch.ones(200)
    row[3] = torch.nan
    rule_of = {"root": "fltrust", "last": "centered_clipping"}
    with some_gpu(), pytest.raises(fedsim.ExperimentError, match=f"{name}: must be finite; 1 of its values"):
        fedsim.aggregate(to_gpu(normal().float()), rule=rule_of[name], **{name: to_gpu(row)})


@pytest.mark.gpu
def test_dnc_notices_nan_in_a_column_that_it_does_not_draw():
    updates = normal().float()
    updates[4, 7] = torch.nan
    with some_gpu(), pytest.raises(fedsim.ExperimentError, match="1 of 11 updates hold NaN"):
        fedsim.aggregate(to_gpu(updates), rule="dnc", f=1, b=1)


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
        assert fedsim.aggregate(updates, rule=own_median, nonfinite="exclude").isfinite().all()
        for call, stage in ((fedsim.aggregate, own_median), (fedsim.pre_aggregate, own_doubling)):
            with pytest.raises(fedsim.ExperimentError, match="1 of 11 updates hold NaN"):
                call(updates, rule=stage)


@pytest.mark.skipif(not REAL, reason="needs a real GPU")
@pytest.mark.gpu
def test_a_product_with_zero_passes_on_nan_on_a_real_gpu():
    """`add` with alpha=0 is how a result becomes NaN without a wait."""
    for value in BROKEN:
        assert torch.ones(3, device="cuda").add(torch.tensor(value, device="cuda"), alpha=0).isnan().all()
