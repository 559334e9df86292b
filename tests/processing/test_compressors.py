"""Compressors: encodings have the promised length and decode to the row of a run; statistical properties.

Statistical tests use a confidence of 1 - 1e-6 over all coordinates together (Bonferroni), and fixed seeds.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

import fedsim
from fedsim import Draws, ExperimentError
from fedsim.processing import apply_chain, initial_states, processor
from fedsim.processing.codec import Codec, Compressor, Sender, Spec, pack, unpack

CONFIDENCE = 1 - 1e-6


def bits(count, each):
    return math.ceil(count * each / 8)


def kept(d, k=None, ratio=0.01):
    return min(k or max(1, math.floor(ratio * d)), d)


def top_k_bytes(d, size, **choice):
    k = kept(d, **choice)
    return k * size + (min(bits(k, math.ceil(math.log2(d))), bits(d, 1)) if k < d else 0)


# parameters of each compressor, and its bytes for d numbers of `size` bytes
CASES = [
    ("top_k", {"k": 3}, lambda d, size: top_k_bytes(d, size, k=3)),
    ("top_k", {"ratio": 0.3}, lambda d, size: top_k_bytes(d, size, ratio=0.3)),
    ("top_k", {}, top_k_bytes),
    ("rand_k", {"k": 3}, lambda d, size: min(3, d) * size + 8),
    ("rand_k", {"ratio": 0.3, "scaled": False}, lambda d, size: kept(d, ratio=0.3) * size + 8),
    ("qsgd", {}, lambda d, size: size + bits(d, 6)),
    ("qsgd", {"levels": 1, "bucket": 6}, lambda d, size: math.ceil(d / 6) * size + bits(d, 2)),
    ("qsgd", {"levels": 2**15}, lambda d, size: size + bits(d, 17)),
    ("sign", {}, lambda d, size: size + bits(d, 1)),
    ("terngrad", {}, lambda d, size: size + bits(d, 2)),
    ("natural", {}, lambda d, size: bits(d, {4: 9, 8: 12}[size])),
    ("cast", {}, lambda d, size: 2 * d),
    ("cast", {"to": "fp16"}, lambda d, size: 2 * d),
    ("cast", {"to": "fp8"}, lambda d, size: d + size),
    ("powersgd", {"rank": 1}, lambda d, size: size * (d if d < 100 else d - 12 * 7 + 12 + 7)),
    ("sketch", {"columns": 13, "rows": 3, "k": 2}, lambda d, size: 3 * 13 * size + 8),
]
CHAINS = [
    (
        [("top_k", {"ratio": 0.3}), ("qsgd", {}), ("cast", {})],
        lambda d, size: top_k_bytes(d, 0, ratio=0.3) + bits(kept(d, ratio=0.3), 6) + 2,
    ),
    ([("rand_k", {"k": 3}), ("natural", {})], lambda d, size: 8 + bits(min(3, d), {4: 9, 8: 12}[size])),
    ([("powersgd", {"rank": 1}), ("cast", {})], lambda d, size: 2 * (d if d < 100 else d - 12 * 7 + 12 + 7)),
    ([("sketch", {"columns": 13, "rows": 3}), ("top_k", {"k": 5}), ("sign", {})], lambda d, size: 8 + 4 + size + 1),
]
ALL = [([(name, params)], nbytes) for name, params, nbytes in CASES] + CHAINS
ids = ["-".join(f"{name}{params or ''}" for name, params in steps) for steps, _ in ALL]


def chain_of(*steps, feedback=False):
    """Return a chain of processors. `feedback`: whether the first has error feedback."""
    pairs = [(step, {}) if isinstance(step, str) else step for step in steps]
    return [
        processor.bind(processor.get(name), params, error_feedback=feedback and not place)
        for place, (name, params) in enumerate(pairs)
    ]


def shapes_of(d):
    return [(12, 7), (d - 12 * 7,)] if d >= 100 else [(d,)]


def row_of(d, dtype=torch.float32, seed=0):
    row = Draws.of("row", seed=seed).normal(d, dtype=dtype) * 0.01
    row[::5] = 0
    return row


def test_every_compressor_has_a_case():
    compressors = {each.name for each in processor if isinstance(each.target, type)}
    assert compressors == {name for name, _, _ in CASES}
    assert all(issubclass(processor.get(name).target, Compressor) for name in compressors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 64, 65, 1000, 100_000])
@pytest.mark.parametrize(("steps", "nbytes"), ALL, ids=ids)
def test_the_encoding_has_the_promised_length_and_decodes_to_the_row_of_a_run(steps, nbytes, d, dtype):
    if steps[0][0] == "sketch" and len(steps) > 1 and d == 1:
        pytest.skip("bytes differ for so short a vector")
    chain, row, shapes = chain_of(*steps), row_of(d, dtype), shapes_of(d)
    codec = Codec(tuple(step.function for step in chain), Spec(d, dtype, shapes))
    senders = [Sender(Draws.of("process", 1, 2, place, seed=0), {}) for place in range(len(chain))]
    data = codec.encode(codec.parts(row, senders))
    sent = row.clone()
    assert len(data) == codec.nbytes == nbytes(d, dtype.itemsize)
    assert apply_chain(chain, sent, (1, 2), {}, seed=0, shapes=shapes) == len(data)
    assert torch.equal(codec.restore(codec.decode(data)), sent)
    assert sent.isfinite().all()


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 31, 33, 63])
def test_packing_keeps_the_lowest_bits(width):
    codes = Draws.of("codes", seed=0).integers(2**31, 50) * 2**31 + Draws.of("low", seed=0).integers(2**31, 50)
    assert torch.equal(unpack(pack(codes, width), 50, width), codes & (2**width - 1))
    assert torch.equal(unpack(pack(-codes, width), 50, width), -codes & (2**width - 1))


@pytest.mark.parametrize(("steps", "_"), ALL, ids=ids)
def test_zeros_stay_zeros_and_nan_does_not_vanish(steps, _):
    zeros = torch.zeros(300)
    apply_chain(chain_of(*steps), zeros, (1, 0), {}, seed=0, shapes=shapes_of(300))
    assert torch.equal(zeros, torch.zeros(300))
    for value in (torch.nan, torch.inf):
        bad = row_of(300)
        bad[7] = value
        apply_chain(chain_of(*steps), bad, (1, 0), {}, seed=0, shapes=shapes_of(300))
        assert not bad.isfinite().all()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["sign", ("top_k", {"k": 1})], "has nothing to compress after sign"),
        (["cast", "qsgd"], "has nothing to compress after cast"),
        ([("top_k", {"k": 1}), "qsgd", "qsgd"], r"name\[2\]"),
    ],
)
def test_a_compressor_with_nothing_to_compress_is_refused(steps, message):
    tables = [{"name": step} if isinstance(step, str) else {"name": step[0], **step[1]} for step in steps]
    with pytest.raises(ExperimentError, match=message):
        fedsim.compress(torch.ones(5), tables)
    with pytest.raises(ExperimentError, match=message.replace("name", "processors")):
        fedsim.Experiment(processors=tables)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("top_k", {"k": 1, "ratio": 0.5}, "both k = 1 and ratio = 0.5"),
        ("top_k", {"ratio": 0.0}, "ratio"),
        ("sketch", {"rows": 2}, "must be odd"),
        ("cast", {"to": "fp4"}, "to"),
        ("tpo_k", {}, "top_k"),
    ],
)
def test_an_invalid_parameter_is_one_plain_line(name, params, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.compress(torch.ones(5), name, **params)


def test_compress_keeps_the_structure_and_the_update():
    update = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([-9.0])}
    row, nbytes = fedsim.compress(update, "top_k", k=2)
    assert torch.equal(row["w"], torch.tensor([[0.0, 0, 0], [0, 0, 5]]))
    assert row["b"].item() == update["b"].item() == -9
    assert nbytes == 2 * 4 + 1
    assert update["w"][0, 1] == 1


def test_compress_without_processors_returns_the_update():
    row, nbytes = fedsim.compress(torch.arange(3.0), [])
    assert (row.tolist(), nbytes) == ([0, 1, 2], 3 * 4)


# -- Statistical properties


def samples(name, row, count, **params):
    chain = chain_of((name, params))
    drawn = row.repeat(count, 1)
    for number, each in enumerate(drawn):
        apply_chain(chain, each, (number,), {}, seed=0)
    return drawn


def largest_z(drawn, row):
    """Return the largest deviation of a coordinate's mean from `row`, in standard errors, and its allowed value."""
    errors = drawn.double() - row.double()
    spread = errors.std(0) / len(errors) ** 0.5
    z = errors.mean(0).abs() / spread.clamp(min=1e-12)
    return z.max().item(), NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * len(row)))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("rand_k", {"k": 8}),
        ("qsgd", {"levels": 2}),
        ("qsgd", {"levels": 4, "bucket": 7}),
        ("terngrad", {}),
        ("natural", {}),
    ],
)
def test_has_no_bias(name, params):
    row = row_of(40)
    row[3] = 1e-39  # below the smallest normal number of float32
    z, allowed = largest_z(samples(name, row, 4000, **params), row)
    assert z < allowed


@pytest.mark.parametrize(("name", "params"), [("rand_k", {"k": 8, "scaled": False}), ("cast", {}), ("sign", {})])
def test_the_test_of_bias_finds_a_bias(name, params):
    row = row_of(40)
    z, allowed = largest_z(samples(name, row, 4000, **params), row)
    assert z > allowed


@pytest.mark.parametrize("d", [10, 1000, 200_000])
def test_top_k_is_a_contraction_that_keeps_the_largest(d):
    for seed, k in enumerate((1, d // 100 + 1, d // 10 + 1, d // 2, d)):
        row = row_of(d, torch.float64, seed)
        sent, _ = fedsim.compress(row, "top_k", k=k)
        assert (row - sent).square().sum() <= (1 - k / d) * row.square().sum() * (1 + 1e-12)
        assert torch.equal(sent.abs().sort().values[-k:], row.abs().sort().values[-k:])


@pytest.mark.parametrize(("d", "index_bits"), [(63, 6), (64, 6), (65, 7)])
def test_an_index_takes_the_bits_of_the_largest_index(d, index_bits):
    assert fedsim.compress(torch.arange(d) + 1.0, "top_k", k=8)[1] == 8 * 4 + math.ceil(8 * index_bits / 8)


def test_a_ratio_keeps_the_decimal_number_of_coordinates():
    """In floating point, 0.29 * 100 is less than 29."""
    assert fedsim.compress(torch.arange(100) + 1.0, "top_k", ratio=0.29)[0].count_nonzero() == 29


def test_sign_multiplies_the_signs_by_the_mean_magnitude():
    sent, _ = fedsim.compress(torch.tensor([1.0, -3.0, 0.0, 8.0]), "sign")
    assert sent.tolist() == [3.0, -3.0, 3.0, 3.0]


def test_each_bucket_of_qsgd_has_its_own_norm_also_an_incomplete_last_one():
    update = torch.tensor([3.0, 0.0, 0.0, 4.0, -7.0])  # one number in each bucket, which is then exact
    assert torch.equal(fedsim.compress(update, "qsgd", bucket=2, levels=4)[0], update)


def test_rand_k_unscaled_is_a_contraction_on_average():
    row = row_of(50, torch.float64)
    errors = (samples("rand_k", row, 4000, k=10, scaled=False) - row).square().sum(1) / row.square().sum()
    margin = NormalDist().inv_cdf(CONFIDENCE) * errors.std() / len(errors) ** 0.5
    assert abs(errors.mean() - (1 - 10 / 50)) < margin


def test_the_variances_of_quantizers_are_below_their_bounds():
    row = row_of(100, torch.float64)
    d, squared = len(row), row.square().sum()
    bounds = {  # E |C(x) - x|^2 / |x|^2, in the papers
        ("natural",): 1 / 8,
        ("qsgd", 4): min(d / 16, d**0.5 / 4),
        ("terngrad",): float(row.abs().max() * row.abs().sum() / squared) - 1,
    }
    for (name, *levels), bound in bounds.items():
        params = {"levels": levels[0]} if levels else {}
        errors = (samples(name, row, 2000, **params) - row).square().sum(1) / squared
        margin = NormalDist().inv_cdf(CONFIDENCE) * errors.std() / len(errors) ** 0.5
        assert errors.mean() <= bound + margin, name


def test_the_error_of_a_sketch_is_bounded():
    """With probability >= 3/4, a row errs by at most 2 |x| / sqrt(columns) (Chebyshev), and 3 of 5 rows rarely err."""
    d, columns, rows, seeds = 2000, 50, 5, 20
    row = row_of(d, torch.float64)
    bound = 2 * row.norm() / columns**0.5
    estimates = torch.stack(
        [fedsim.compress(row, "sketch", columns=columns, rows=rows, k=d, seed=seed)[0] for seed in range(seeds)]
    )
    outside = ((estimates - row).abs() > bound).double().mean()
    allowed = sum(math.comb(rows, j) * 0.25**j * 0.75 ** (rows - j) for j in range(rows // 2 + 1, rows + 1))
    assert 0 < outside < allowed
    assert (estimates.mean(0) - row).abs().max() < 5 * bound / seeds**0.5


def test_collisions_in_fewer_than_half_of_the_rows_do_not_change_an_estimate():
    # A row has a collision with the probability 1/8, at least 3 of 5 rows with 0.016, and at least 1 row with 0.49.
    update = torch.tensor([1000.0, 1.0])
    sent = [fedsim.compress(update, "sketch", columns=8, rows=5, k=2, seed=seed)[0] for seed in range(100)]
    assert sum(torch.equal(row, update) for row in sent) >= 90


def test_a_sketch_finds_the_heavy_coordinates():
    row = 0.001 * row_of(5000)
    row[[3, 1000, 4999]] = torch.tensor([1.0, -2.0, 3.0])
    sent, nbytes = fedsim.compress(row, "sketch", columns=200, rows=5, k=3)
    assert sent.nonzero().view(-1).tolist() == [3, 1000, 4999]
    assert torch.allclose(sent[sent != 0], row[sent != 0], atol=0.01)
    assert nbytes == 5 * 200 * 4 + 8


def test_powersgd_is_exact_for_low_rank_and_improves_with_its_memory():
    draws = Draws.of("matrix", seed=0)
    low = draws.normal(30, 3, dtype=torch.float64) @ draws.normal(3, 20, dtype=torch.float64)
    (sent,), nbytes = fedsim.compress([low], "powersgd", rank=3)
    assert torch.allclose(sent, low)
    assert nbytes == 3 * (30 + 20) * 8
    full = draws.normal(30, 20, dtype=torch.float64)
    best = torch.linalg.svdvals(full)[2:].square().sum()
    chain, shapes = chain_of(("powersgd", {"rank": 2})), [(30, 20)]
    states, errors = initial_states(chain, full.view(-1), shapes), []
    for round in range(200):
        row = full.view(-1).clone()
        apply_chain(chain, row, (round, 0), {}, states, shapes, seed=0)
        errors.append((full.view(-1) - row).square().sum())
    assert states["memory_0"].shape == (2 * 20,)
    assert errors[-1] < errors[0]
    assert torch.isclose(errors[-1], best)


# -- Error feedback

EXACT = [  # whose errors x - C(x) are floating-point numbers
    [("top_k", {"k": 9})],
    [("rand_k", {"k": 9, "scaled": False})],
    ["natural"],
    ["cast"],
    [("cast", {"to": "fp16"})],
    [("top_k", {"k": 9}), "cast"],
    [("top_k", {"k": 9}), "natural"],
]


@pytest.mark.parametrize("steps", [*EXACT, ["sign"], ["qsgd"], [("top_k", {"k": 9}), "sign", "cast"]], ids=str)
def test_sent_plus_kept_equals_produced(steps):
    chain, d = chain_of(*steps, feedback=True), 200
    states = initial_states(chain, torch.zeros(d), [(d,)])
    assert list(states) == ["residual_0"]
    for round in range(5):
        update, before = row_of(d, seed=round), states["residual_0"].clone()
        sent, produced = update.clone(), before + update
        apply_chain(chain, sent, (round, 0), {}, states, seed=0)
        assert torch.equal(states["residual_0"], produced - sent)
        if steps in EXACT:
            assert torch.equal(sent + states["residual_0"], produced)


def test_a_step_that_does_not_compress_ends_the_group_of_a_residual():
    chain = chain_of(("top_k", {"k": 2}), "cast", ("clip", {"max_norm": 0.5}), feedback=True)
    row, states = torch.tensor([1.001, -3.0, 2.0, 0.5]), {"residual_0": torch.zeros(4)}
    nbytes = apply_chain(chain, row, (1, 0), {}, states, seed=0)
    assert states["residual_0"].tolist() == [pytest.approx(1.001), 0, 0, 0.5]
    assert row.norm() == pytest.approx(0.5)
    assert nbytes == 2 * 2 + 1  # a bitmap of 4 bits


def quadratic(steps, feedback, rounds=500, lr=0.05):
    """Return the distance from the optimum 0 of gradient descent on the example of Beznosikov et al. 2020.

    f_i(x) = <a_i, x>^2 + |x|^2 / 2, on which compressed gradients of top_1 lead away from the optimum.
    """
    chain = chain_of(*steps, feedback=feedback)
    directions = torch.full((3, 3), 2.0, dtype=torch.float64) - 5 * torch.eye(3, dtype=torch.float64)
    model = torch.ones(3, dtype=torch.float64)
    states = [initial_states(chain, model, [(3,)]) for _ in directions]
    for round in range(rounds):
        rows = 2 * (directions @ model)[:, None] * directions + model
        for worker, row in enumerate(rows):
            apply_chain(chain, row, (round, worker), {}, states[worker], seed=0)
        model = model - lr * rows.mean(0)
        if model.norm() > 1e6:
            break
    return model.norm().item()


@pytest.mark.parametrize("steps", [[("top_k", {"k": 1})], [("top_k", {"k": 1}), "natural"]], ids=str)
def test_top_1_converges_on_a_quadratic_only_with_error_feedback(steps):
    assert quadratic(steps, feedback=True) < 1e-6
    assert quadratic(steps, feedback=False) > 1
