"""Every rule compared with its definition in tests/aggregation/reference.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import rule
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError
from tests.aggregation import reference

RULES = {
    "mean": {},
    "median": {},
    "trimmed_mean": {"f": 2},
    "meamed": {"f": 2},
    "phocas": {"f": 2},
    "krum": {"f": 2},
    "multi_krum": {"f": 2},
    "bulyan": {"f": 2},
    "mda": {"f": 3},
    "smea": {"f": 3},
    "medoid": {},
    "cge": {"f": 3},
    "aksel": {"f": 3},
    "monna": {"f": 3, "row": 2},
    "norm_clipping": {"c": 2.0},
    "arc": {"f": 3},
    "centered_clipping": {"tau": 1.5, "iterations": 3},
    "geometric_median": {},
    "foolsgold": {},
    "sign_vote": {},
    "caf": {"f": 3},
    "dnc": {"f": 3},
    "clipped_gossip": {"f": 3, "own": 2},
    "ios": {"f": 3, "own": 2},
    "bridge": {"f": 3, "own": 2},
}
# tested below, in test_rules.py or in test_filters.py
ELSEWHERE = {"weighted_mean", "qfedavg", "fltrust", "signguard", "zeno_plus_plus", "afl_guard", "kardam"}


def normal(n, d):
    return np.random.default_rng(n + d).standard_normal((n, d))


def outliers(n, d):
    x = normal(n, d)
    x[:3] += 1e6
    return x


def repeated(n, d):
    x = normal(n, d)
    x[-3:] = x[0]
    return x


def integers(n, d):
    """Return random integers [n, d] in which many values are equal."""
    return np.random.default_rng(n * d).integers(-2, 3, (n, d)).astype(float)


def offset(n, d):
    """Return rows that are close together and far from zero, where |a|^2 + |b|^2 - 2ab has no correct digit."""
    return 1e5 + normal(n, d) * 1e-3


def test_every_rule_has_a_reference():
    assert {registration.name for registration in rule} == set(RULES) | ELSEWHERE


@pytest.mark.parametrize(
    "shape", [(11, 5), (12, 1), (15, 300), pytest.param((20, 700), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_matches_its_definition(name, shape):
    for make in (normal, outliers, repeated, integers, offset):
        if name == "foolsgold" and (shape[1] == 1 or make is offset):
            continue  # all cosines are 1 up to rounding, so all weights are zero and the definition divides by zero
        x = make(*shape)
        expected = getattr(reference, name)(x, **RULES[name])
        ours = fedsim.aggregate(torch.from_numpy(x), name, **RULES[name]).numpy()
        scale = max(1.0, np.abs(expected).max())
        assert np.abs(ours - expected).max() <= 1e-9 * scale, make.__name__


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_krum_picks_the_right_row_in_float32_where_raw_products_do_not(seed):
    rng = np.random.default_rng(seed)
    x = (1 + 1e-4 * rng.standard_normal((12, 20_000))).astype(np.float32)
    expected = reference.krum(x.astype(np.float64), 3)
    assert np.array_equal(fedsim.aggregate(torch.from_numpy(x), "krum", f=3).numpy(), expected.astype(np.float32))


COLUMNWISE = {"median": {}, "trimmed_mean": {"f": 1}, "meamed": {"f": 1}, "phocas": {"f": 1}, "aksel": {"f": 1}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*COLUMNWISE, "bulyan", "sign_vote"])
def test_column_major_updates_are_not_sorted_in_place(name, dtype):
    single_column = torch.tensor([[3.0], [1], [2], [-5], [4], [9], [-2]], dtype=dtype)
    turned = torch.randn(6, 7, dtype=dtype, generator=torch.Generator().manual_seed(0)).t()
    for updates in (single_column, turned):
        before = updates.clone()
        params = {**COLUMNWISE, "bulyan": {"f": 1}}.get(name, {})
        result = fedsim.aggregate(updates, name, **params)
        assert torch.equal(updates, before)
        again = fedsim.aggregate(before.contiguous(), name, **params)
        assert torch.allclose(result, again, rtol=0, atol=1e-6)  # the summation order differs


def test_bulyan_with_f_1_scores_its_last_pick_by_one_neighbour():
    """Krum picks 13, 4, 10 and 18 first; of the remaining 20, 1 and 9, the rows 1 and 9 have the nearest neighbour."""
    updates = torch.tensor([18.0, 10, 20, 13, 1, 9, 4], dtype=torch.double).unsqueeze(1)
    # the tie between 1 and 9 goes to the first row; the three values nearest to the median 10 remain
    picked = np.array([13.0, 4, 10, 18, 1])
    assert reference.nearest_mean(picked, np.median(picked), 3) == 9
    assert fedsim.aggregate(updates, "bulyan", f=1).item() == pytest.approx(9)


@pytest.mark.parametrize("pre", [{"rule": "norm_clipping", "c": 1e300}, {"rule": "nnm", "f": 2}])
@pytest.mark.parametrize("name", ["geometric_median", "caf"])
def test_an_outlier_after_a_pre_aggregator_costs_no_digits(name, pre):
    x = torch.from_numpy(normal(10, 5))
    x[0] *= 1e8
    params = {"f": 2} if name == "caf" else {}
    mixed = fedsim.pre_aggregate(x, [pre])
    expected = fedsim.aggregate(mixed, name, **params)
    ours = fedsim.aggregate(x, [pre, {"rule": name, **params}])
    assert torch.allclose(ours, expected, rtol=1e-7, atol=1e-7)


def test_a_zero_row_among_distant_rows_costs_no_digits():
    x = offset(9, 20)
    x[4] = 0
    ours = fedsim.aggregate(torch.from_numpy(x), "geometric_median").numpy()
    assert np.abs(ours - reference.geometric_median(x)).max() <= 1e-9 * 1e5


@pytest.mark.parametrize("scale", [1.0, 3.0, 7.0, 10.0])
def test_foolsgold_gives_clones_no_weight(scale):
    x = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.3, -0.1], [0.3, -0.1]], dtype=torch.double) * scale
    assert not fedsim.aggregate(x, "foolsgold").any()


def test_caf_does_not_depend_on_the_order_of_rows():
    x = torch.tensor([-2.0, 2, -2, 1, -3, 3, -3, 0, 2, 3, 2, 3, 1, 3, 0], dtype=torch.double).unsqueeze(1)
    first, flipped = (fedsim.aggregate(rows, "caf", f=6) for rows in (x, x.flip(0)))
    assert torch.allclose(first, flipped, rtol=0, atol=1e-12)


def test_fltrust_matches_its_definition():
    x, root = normal(8, 10), normal(1, 10)[0]
    ours = fedsim.aggregate(torch.from_numpy(x), "fltrust", root=torch.from_numpy(root)).numpy()
    assert np.allclose(ours, reference.fltrust(x, root), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("q", "lr", "scale"), [(0.5, 0.1, 1), (1.0, 0.01, 1), (3.0, 1.0, 1), (1.0, 0.1, 1e-8)])
def test_qfedavg_matches_its_definition_for_small_losses_too(q, lr, scale):
    x, losses = normal(5, 7), np.array([0.5, 1.0, 2.0, 0.1, 0.7]) * scale
    ours = fedsim.aggregate(torch.from_numpy(x), "qfedavg", q=q, lr=lr, losses=torch.from_numpy(losses))
    expected = reference.qfedavg(x, losses, q, lr)
    assert np.abs(ours.numpy() - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("own", [0, 3])
@pytest.mark.parametrize("params", [{"f": 0}, {"f": 2}, {"f": 6}, {"f": 2, "tau": 1.5}])
@pytest.mark.parametrize("name", ["clipped_gossip", "ios"])
def test_a_rule_of_a_graph_uses_its_weights(name, params, own):
    x, weights = normal(7, 6), np.array([0.1, 0.05, 0.3, 0.2, 0.05, 0.2, 0.1])
    params = {"f": params["f"]} if name == "ios" else params
    ours = fedsim.aggregate(torch.from_numpy(x), name, weights=2 * weights, own=own, **params).numpy()
    assert np.allclose(ours, getattr(reference, name)(x, **params, own=own, weights=weights), rtol=0, atol=1e-12)


def test_mda_of_a_hundred_rows_finds_the_honest_ones():
    x = torch.randn(100, 50, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    x[::10] += 50
    honest = [row for row in range(100) if row % 10]
    assert torch.allclose(fedsim.aggregate(x, "mda", f=10), x[honest].mean(0), rtol=0, atol=1e-12)


def test_smea_minimises_the_spread_along_a_line_and_mda_the_diameter():
    """Rows 0 to 3 lie on a line of length 2 (variance 11 / 16); rows 0 and 4 to 6 form a tetrahedron with edges 2.2."""
    x = torch.zeros(7, 4, dtype=torch.double)
    x[1:4, 0] = torch.tensor([-1.0, 1, 1])
    x[4:, 1:] = 2.2 / 2**0.5 * (1 - torch.eye(3, dtype=torch.double))
    assert torch.allclose(fedsim.aggregate(x, "mda", f=3), x[:4].mean(0))
    assert torch.allclose(fedsim.aggregate(x, "smea", f=3), x[[0, 4, 5, 6]].mean(0))  # 2.2^2 / 8 < 11 / 16


def test_smea_leaves_out_rows_that_are_not_finite():
    x = torch.tensor([[0.0], [1], [2], [math.nan], [math.inf]], dtype=torch.double)
    assert fedsim.aggregate(x, "smea", f=2, nonfinite="keep").item() == 1


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_smea_finds_the_least_eigenvalue_exactly_of_many_subsets(scale):
    x = normal(13, 8) * scale
    ours = fedsim.aggregate(torch.from_numpy(x), "smea", f=4).numpy()
    assert np.allclose(ours / scale, reference.smea(x / scale, 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "params", [{}, {"start": "zeros"}, {"iterations": 1}, {"iterations": 4, "tol": 0.0}, {"nu": 0.1}]
)
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.0, 2.0, 5.0, 1.0, 1.0]])
def test_geometric_median_follows_weiszfeld_step_by_step(params, weights):
    x = normal(7, 6)
    ours = fedsim.aggregate(torch.from_numpy(x), "geometric_median", weights=weights, **params).numpy()
    assert np.allclose(ours, reference.geometric_median(x, **params, weights=weights), rtol=0, atol=1e-9)


@pytest.mark.parametrize("last", [None, normal(1, 4)[0]], ids=["first", "later"])
@pytest.mark.parametrize("params", [{}, {"start": "mean"}, {"tau": 0.1, "iterations": 5}])
def test_centered_clipping_starts_at_the_last_result(params, last):
    x = normal(6, 4)
    result = fedsim.aggregate(torch.from_numpy(x), "centered_clipping", last=last, **params)
    assert np.allclose(result.numpy(), reference.centered_clipping(x, **params, last=last), rtol=0, atol=1e-12)


def test_signguard_drops_other_norms_and_other_signs():
    x = np.abs(normal(12, 400)) * np.where(np.arange(400) < 300, 1, -1)
    x[0] *= 50  # a norm outside the allowed range
    x[1] *= -1  # opposite signs
    clipped = reference.clipped(x, float(np.quantile(np.linalg.norm(x, axis=1), 0.5)))
    ours = fedsim.aggregate(torch.from_numpy(x), "signguard", fraction=1.0).numpy()
    assert np.allclose(ours, clipped[2:].mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 3])
def test_dnc_uses_the_drawn_coordinates(iterations):
    x, draws = outliers(12, 300), Draws.of("aggregate", seed=1)
    drawn = [draws.choice(300, 20).numpy() for _ in range(iterations)]
    kept_rows = set.intersection(*(set(reference.dnc_kept(x[:, columns], 3)) for columns in drawn))
    result = fedsim.aggregate(torch.from_numpy(x), "dnc", f=3, b=20, iterations=iterations, seed=1)
    assert np.allclose(result.numpy(), x[sorted(kept_rows)].mean(0), rtol=0, atol=1e-9)


def test_signguard_uses_the_drawn_coordinates():
    """Check the drawn coordinates: only in these do rows 0 to 4 differ, so the other rows form the larger cluster."""
    x, columns = np.ones((12, 400)), Draws.of("aggregate", seed=2).choice(400, 40).numpy()
    x[:5, columns[:20]] = -1
    x[:, np.setdiff1d(np.arange(400), columns)] *= np.where(np.arange(12) % 2, 1, -1)[:, None]
    result = fedsim.aggregate(torch.from_numpy(x), "signguard", seed=2).numpy()
    assert np.allclose(result, x[5:].mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("krum", {"f": 4}, "krum: needs n >= 2f \\+ 3; here f = 4, n = 10"),
        ("multi_krum", {"f": 2, "m": 11}, "multi_krum: needs 1 <= m <= n; here m = 11, n = 10"),
        ("bulyan", {"f": 2}, "bulyan: needs n >= 4f \\+ 3; here f = 2, n = 10"),
        ("trimmed_mean", {"f": 5}, "trimmed_mean: needs 2f < n; here f = 5, n = 10"),
        ("monna", {"f": 1, "row": 10}, "row = 10: must be the ID of a worker in the cohort"),
        ("dnc", {"f": 5, "c": 2.0}, "c f < n"),
        ("krum", {}, "f: is required, such as f = 1"),
        ("qfedavg", {"losses": [1.0] * 9 + [-1.0]}, "losses must be >= 0; the smallest one is -1"),
        ("qfedavg", {"losses": ["a"] * 10}, r"losses: must be numbers of shape \(10,\), not"),
        (["bucketing", "qfedavg"], {"losses": [1.0] * 10}, "qfedavg: needs the loss of each worker, but a .* 5 rows"),
        ("clipped_gossip", {"f": 10, "own": 0}, "clipped_gossip: needs f < n; here f = 10, n = 10"),
        ("bridge", {"f": 5, "own": 0}, "bridge: needs n >= 2f \\+ 2; here f = 5, n = 10"),
        ("ios", {"f": 1}, "own: is required by this rule"),
        ("ios", {"f": 1, "own": 10}, "own = 10: must be the position of one of 10 updates, from 0 to 9"),
        ("ios", {"f": 9, "own": 0, "weights": [0] + [1] * 9}, "ios: needs a row with a weight > 0"),
        (["bucketing", "bridge"], {"f": 1, "own": 0}, "bridge: needs the own row, but a pre-aggregator .* 5 rows"),
        ("mda", {"f": 4, "nonfinite": "exclud"}, 'nonfinite = "exclud": did you mean "exclude"'),
    ],
)
def test_a_wrong_parameter_is_an_error_with_its_numbers(name, params, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.aggregate(torch.from_numpy(normal(10, 3)), name, **params)


@pytest.mark.parametrize(("rule", "n", "f", "subsets"), [("mda", 100, 40, r"1.37e\+28"), ("smea", 30, 6, r"5.94e\+05")])
def test_too_large_a_search_is_refused(rule, n, f, subsets):
    with pytest.raises(ExperimentError, match=rf"{rule}: {subsets} subsets of {n - f} of {n} updates are too many"):
        fedsim.aggregate(torch.ones(n, 3), rule, f=f)


@pytest.mark.parametrize("name", ["nnm", "arc", "norm_clipping"])
def test_a_pre_aggregator_matches_its_definition(name):
    x = outliers(11, 40)
    params = {"c": 2.0} if name == "norm_clipping" else {"f": 3}
    expected = reference.clipped(x, 2.0) if name == "norm_clipping" else getattr(reference, f"{name}_rows")(x, 3)
    rows = fedsim.pre_aggregate(torch.from_numpy(x), name, **params).numpy()
    assert np.allclose(rows, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_dnc_drops_exactly_c_f_rows():
    x = torch.arange(150.0, dtype=torch.double).unsqueeze(1) ** 2
    result = fedsim.aggregate(x, "dnc", f=100, c=0.29)
    away = (x - x.mean(0)).abs().flatten()
    assert torch.allclose(result, x[away.argsort()[: 150 - 29]].mean(0), rtol=1e-12)
