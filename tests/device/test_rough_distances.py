"""Distances in float32 on GPUs with slow float64: the error bound, and the selection of the same updates."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsim
from fedsim.aggregation import Gram
from fedsim.aggregation.numerics import gram as gram_module
from fedsim.aggregation.numerics import rough_distances as rough
from fedsim.aggregation.rules.pre_aggregators import nnm
from fedsim.aggregation.rules.selection import bulyan, krum, krum_scores, medoid, multi_krum, smea
from fedsim.aggregation.rules.spectral import caf
from fedsim.system.precision import tf32_allowed
from tests.device.agreement import some_gpu, to_gpu
from tests.device.pretend import pretend_gpu, upload
from tests.device.pretend.cards import LARGE, SMALL
from tests.device.test_aggregation import CASES, F, N, normal, updates_of

TERMS, UNIT = rough.TERMS, 2.0**-24
RULES = {"krum": krum, "multi_krum": multi_krum, "medoid": medoid, "nnm": nnm}


@pytest.fixture
def slow_float64(monkeypatch):
    """Yield a pretend GPU with slow float64, on which all float32 updates are worth an attempt in float32."""
    monkeypatch.setattr(rough, "WORTHWHILE", 0)
    with pretend_gpu(SMALL) as gpu:
        yield gpu


@pytest.fixture
def calls(monkeypatch):
    """Return a list of what is computed in float64: "float64" for all inner products, or a number of distances."""
    calls, wide, pairs = [], gram_module._products_on_gpu, rough._squared_differences
    monkeypatch.setattr(gram_module, "_products_on_gpu", lambda *args: calls.append("float64") or wide(*args))
    monkeypatch.setattr(
        rough, "_squared_differences", lambda x, first, second: calls.append(len(first)) or pairs(x, first, second)
    )
    return calls


def exact_squares(rows):
    """Return the exact squared distances of all pairs of rows, as fractions."""
    numbers = [[Fraction(value) for value in row] for row in rows.double().tolist()]
    return [[sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in numbers] for x in numbers]


def assert_within_errors(rows, squares, errors, least=0):
    """Check that errors are at most `errors`, and that the largest one is at least `least` of its bound."""
    shares = [0]
    for (i, line), j in itertools.product(enumerate(exact_squares(rows)), range(len(rows))):
        difference, bound = abs(Fraction(float(squares[i, j])) - line[j]), Fraction(float(errors[i, j]))
        assert difference <= bound, (i, j, float(difference), float(bound))
        shares.append(difference / bound if bound else 0)
    assert max(shares) >= least


def worst_products(rows, centre, smallest=0.0):
    """Return the inner products of rows minus the centre in float32, added one by one. Smaller numbers become zero."""
    rows = (rows - centre).numpy()
    terms = rows[:, None] * rows
    terms[np.abs(terms) < smallest] = 0
    blocks = terms.reshape(*terms.shape[:2], -1, TERMS)
    return np.add.accumulate(blocks, axis=-1, dtype=np.float32)[..., -1].astype(np.float64).sum(-1)


def test_the_error_bound_is_nearly_reached_in_the_worst_case():
    """Each small term is lost in the sum, and the first column is rounded when the centre is subtracted."""
    lost = 2.0**-12 * (1 - 2.0**-12)
    rows = torch.full((3, 2 * TERMS), lost)
    rows[1] = -lost
    rows[2] = 0  # the centre
    rows[:, ::TERMS] = torch.tensor([1.0, -1 - 2.0**-23, -(2.0**-24)])[:, None]
    assert_within_errors(rows, *rough.with_errors(worst_products(rows, rows[2]), 2 * TERMS), least=0.985)


def test_the_error_bound_covers_products_that_become_zero():
    rows = torch.full((3, TERMS), 2.0**-63 * (1 - 2.0**-20))  # their squares are just below the smallest normal number
    rows[1] *= -1
    rows[2] = 0
    computed = worst_products(rows, rows[2], smallest=2.0**-126)
    assert not computed.any()
    assert_within_errors(rows, *rough.with_errors(computed, TERMS), least=0.45)


@st.composite
def hard_rows(draw):
    """Draw float32 rows: any numbers, of very different sizes, that cancel, far from zero, or nearly equal."""
    n, d = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2, 40, TERMS, TERMS + 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low, high = sorted(draw(st.tuples(st.integers(-149, 45), st.integers(-149, 45))))
    rows = rng.choice([-1.0, 1.0], (n, d)) * rng.uniform(1, 2, (n, d)) * 2.0 ** rng.integers(low, high + 1, (n, d))
    rows += draw(st.sampled_from([0, 0, 1, 1000])) * 2.0**high * rng.uniform(size=d)
    if draw(st.booleans()):
        rows[1:] = rows[0] * (1 + 2.0 ** -draw(st.integers(10, 24)) * rng.integers(-3, 4, (n - 1, 1)))
    if draw(st.booleans()):
        rows[-1] = -rows[0]
    return torch.from_numpy(rows.astype(np.float32))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(hard_rows())
def test_float32_distances_are_within_the_error_bound(rows):
    assert_within_bound(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-38, 1e-22, 1.0, 1e15])
def test_float32_distances_on_a_gpu_are_within_the_error_bound(scale):
    """With random numbers, and with numbers whose sums lose many digits."""
    same = torch.full((2, 3 * TERMS + 5), 0.1)
    same[1] = -0.1
    assert_within_bound((torch.cat([normal(4, 3 * TERMS + 5).float(), same]).double() * scale).float())


def assert_within_bound(rows):
    with some_gpu():
        centre = to_gpu(rows.norm(dim=1).argmin().reshape(1))
        products = rough._products(to_gpu(rows), centre).cpu().numpy()
    assert_within_errors(rows, *rough.with_errors(products, rows.shape[1]))


def away_of(squares):
    return squares.clone().fill_diagonal_(-1)


def sums_of(squares):
    return squares.sqrt().sum(1)


@st.composite
def distances(draw):
    """Draw points, some of them equal, and squared distances with errors."""
    n = draw(st.integers(3, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    points = rng.standard_normal((n, 3)) if draw(st.booleans()) else rng.integers(0, 3, (n, 2)).astype(float)
    for _ in range(draw(st.integers(0, 3))):
        points[rng.integers(n)] = points[rng.integers(n)]
    exact = ((points[:, None] - points) ** 2).sum(-1)
    errors = draw(st.sampled_from([1e-6, 1e-3, 0.03, 0.3])) * rng.uniform(size=(n, n))
    errors = errors + errors.T
    np.fill_diagonal(errors, 0)
    noise = np.triu(rng.uniform(-1, 1, (n, n)))
    return exact, np.maximum(exact + (noise + noise.T) * errors, 0), errors


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(distances(), st.integers(0, 2), st.data())
def test_distances_that_decide_select_what_exact_distances_select(drawn, kind, data):
    exact, squares, errors = drawn
    n = len(exact)
    scores_of = (partial(krum_scores, f=data.draw(st.integers(0, n - 3))), away_of, sums_of)[kind]
    count = data.draw(st.integers(1, n))
    measured = []

    def measure(first, second):
        measured.extend(zip(first.tolist(), second.tolist(), strict=True))
        return exact[first, second]

    result = rough.RoughDistances(squares, errors, measure).deciding(scores_of, count)
    assert len(measured) <= 2 * n
    if result is None:
        return
    selected, expected = (
        gram_module.stable_order(scores_of(values))[..., :count].sort(-1).values
        for values in (result, torch.from_numpy(exact))
    )
    assert torch.equal(selected, expected)


def test_scores_that_differ_only_by_rounding_are_measured():
    """The neighbours 1 and 2 of update 0 count as equally near, so the first one is selected."""
    exact = np.array([[0, 1 + 5e-13, 1], [1 + 5e-13, 0, 3], [1, 3, 0]])
    squares, errors = exact.copy(), np.zeros((3, 3))
    squares[0, 1] = squares[1, 0] = 1 + 2e-12
    errors[0, 1] = errors[1, 0] = 1.6e-12
    decided = rough.RoughDistances(squares, errors, lambda first, second: exact[first, second]).deciding(away_of, 2)
    assert gram_module.stable_order(away_of(decided))[0].tolist() == [0, 1, 2]


def coefficients_of(name, updates):
    """Return the coefficients of the updates in the result of a rule or pre-aggregator."""
    return RULES[name](Gram(updates), **({} if name == "medoid" else {"f": F})).coefficients


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_a_rule_selects_the_same_updates_as_in_float64(name, monkeypatch):
    monkeypatch.setattr(gram_module, "pay_off", lambda updates: updates.dtype == torch.float32)
    for case in CASES:
        updates = updates_of(case, torch.float32)
        if updates.isfinite().all():
            expected = coefficients_of(name, updates.double())
            with some_gpu():
                assert torch.equal(coefficients_of(name, to_gpu(updates)), expected), case


def nearly_equal(count, step=2.0**-20):
    """Return 11 updates. The first `count` are in the middle of the others, and differ in one value."""
    updates = normal().float()
    updates[:count] = updates.mean(0) + 0.1 * normal(d=200)[0].float()
    updates[:count, 0] += step * torch.arange(count)
    return updates


@pytest.mark.parametrize(
    ("updates", "computed"),
    [
        (normal().float(), []),
        (nearly_equal(2), [19]),  # all distances of both updates
        (nearly_equal(4, 0.0), [3]),  # whether the updates are equal
        (nearly_equal(5), ["float64"]),
        (torch.ones(11, 5), [10]),
        (torch.ones(11, 0), [10]),
        (normal().float() * 1e20, ["float64"]),  # the squares overflow in float32
        (normal().float() * 1e-22, [10, "float64"]),  # products underflow, so all updates could be equal
    ],
    ids=["ordinary", "two near", "equal", "five near", "all equal", "no values", "large", "small"],
)
@pytest.mark.parametrize("name", ["krum", "medoid"])
def test_float64_is_used_only_if_float32_does_not_decide(name, updates, computed, slow_float64, calls):
    expected, actual = coefficients_of(name, updates.double()), coefficients_of(name, upload(updates))
    assert calls == computed
    assert torch.equal(actual, expected)


def test_only_the_distances_that_decide_are_computed_in_float64(slow_float64, calls):
    """For eight updates, the last of the n - f neighbours and the next update have nearly the same distance."""
    radii = torch.arange(float(N))
    radii[N - F] = radii[N - F - 1] * (1 - 2.0**-20)
    updates = torch.eye(N, 200) * radii[:, None]
    actual = coefficients_of("nnm", upload(updates))
    assert calls == [16]
    assert torch.equal(actual, coefficients_of("nnm", updates.double()))


def test_float64_is_used_at_once_where_it_is_fast_or_float32_saves_no_time(monkeypatch, calls):
    updates, many = normal().float(), normal(rough.MOST_ROWS + 1, 3).float()
    for card, worthwhile, x in (
        (LARGE, 0, updates),
        (SMALL, N * N * 200 + 1, updates),
        (SMALL, 0, updates.double()),
        (SMALL, 0, many),
    ):
        monkeypatch.setattr(rough, "WORTHWHILE", worthwhile)
        with pretend_gpu(card):
            coefficients_of("krum", upload(x))
    assert calls == 4 * ["float64"]
    with pretend_gpu(SMALL):
        coefficients_of("krum", upload(many[1:]))
        assert calls == 4 * ["float64"]
        krum(Gram(upload(updates), reduce=lambda values, how: values), f=F)  # as with ranks, whose GPUs may differ
        assert calls == 5 * ["float64"]


def test_rules_that_need_all_distances_use_float64_once(slow_float64, calls):
    fedsim.aggregate(upload(normal().float()), "geometric_median")
    gram = Gram(upload(normal().float()))
    for rule in (krum, bulyan, caf, smea, krum):
        rule(gram, f=F)
    assert calls == 2 * ["float64"]


@pytest.mark.parametrize(("updates", "launches", "waits"), [(normal(d=40_000), 9, 1), (nearly_equal(2), 15, 2)])
def test_distances_in_float32_take_few_launches_and_waits(updates, launches, waits, slow_float64):
    on_gpu = upload(updates.float())
    with slow_float64.counting() as counts:
        fedsim.aggregate(on_gpu, "krum", f=F)
    assert counts.launches <= launches, counts.table()
    assert counts.waits <= waits, counts.table()


def test_products_in_float32_never_use_tf32_or_autocast(slow_float64, monkeypatch):
    seen, blocks = [], rough.small_blocks

    def small_blocks(updates):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.is_autocast_enabled("cuda")))
        return blocks(updates)

    monkeypatch.setattr(rough, "small_blocks", small_blocks)
    with tf32_allowed(True), torch.autocast("cuda", torch.bfloat16):
        coefficients_of("krum", upload(normal().float()))
    assert seen == [(False, False)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_update_that_is_not_finite_is_an_error_or_excluded(value, slow_float64):
    updates = normal().float()
    updates[4, 123] = value
    with pytest.raises(fedsim.ExperimentError, match="1 of 11 updates contain NaN or infinity"):
        fedsim.aggregate(upload(updates), "krum", f=F)
    for nonfinite in ("exclude", "keep"):
        expected, actual = (fedsim.aggregate(x, "krum", f=F, nonfinite=nonfinite) for x in (updates, upload(updates)))
        assert torch.equal(actual.cpu(), expected)
