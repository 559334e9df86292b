from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.asynchronous.clock.delays import BLOCK
from fedsim.errors import ExperimentError
from tests.asynchronous.clock_tables import delays_of, factors_of, noise_of


@pytest.mark.parametrize(("name", "params"), [("constant", {}), ("shifted_exponential", {"shift": 1.0})])
def test_factors_without_randomness_are_1(name, params):
    assert set(factors_of(name, workers=3, units=600, **params)) == {1.0}


@pytest.mark.parametrize("shift", [0.0, 0.3, 0.9])
def test_shifted_exponential_factors_have_mean_1(shift):
    factors = factors_of("shifted_exponential", shift=shift)
    scale = 1 - shift
    assert factors.min() == pytest.approx(shift, abs=1e-3)
    assert factors.mean() == pytest.approx(1, abs=4 * scale / math.sqrt(len(factors)))
    assert factors.std() == pytest.approx(scale, rel=0.015)
    assert np.median(factors) == pytest.approx(shift + scale * math.log(2), abs=0.01)


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_lognormal_factors_have_mean_1_and_the_median_of_the_formula(sigma):
    factors = factors_of("lognormal", sigma=sigma)
    deviation = math.sqrt(math.exp(sigma**2) - 1)
    assert factors.mean() == pytest.approx(1, abs=4 * deviation / math.sqrt(len(factors)))
    assert np.median(factors) == pytest.approx(math.exp(-(sigma**2) / 2), rel=0.015)
    assert np.log(factors).std() == pytest.approx(sigma, rel=0.01)


def test_pareto_factors_have_mean_1_and_the_quantiles_of_the_formula():
    assert factors_of("pareto", alpha=3.0).mean() == pytest.approx(1, abs=0.006)
    factors = factors_of("pareto", alpha=1.5)
    assert factors.min() == pytest.approx(1 / 3, rel=1e-3)
    for share in (0.25, 0.5, 0.9):
        assert np.quantile(factors, share) == pytest.approx(1 / 3 * (1 - share) ** (-1 / 1.5), rel=0.02)


@pytest.mark.parametrize("name", ["shifted_exponential", "lognormal", "pareto"])
def test_units_and_workers_are_independent(name):
    ranks = factors_of(name, workers=200, units=1000).argsort().argsort().reshape(200, 1000) / 200_000 - 0.5
    bound = 4 / 12 / math.sqrt(199_000)  # a product of two uniform ranks has variance 1 / 144
    assert abs((ranks[:, 1:] * ranks[:, :-1]).mean()) < bound
    assert abs((ranks[1:] * ranks[:-1]).mean()) < bound


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("shifted_exponential", {"shift": 1.1}, "clock.noise.shift = 1.1: must be less than or equal to 1"),
        ("lognormal", {"sigma": 0.0}, "clock.noise.sigma = 0.0: must be greater than 0"),
        ("pareto", {"alpha": 1.0}, "clock.noise.alpha = 1.0: must be greater than 1"),
        ("trace", {}, "clock.noise.path: is required"),
    ],
)
def test_impossible_noise_is_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        noise_of(name, **params)


def one_too_many(size):
    return np.ones(size + 1)


def negative(size, worker, start):
    factors = np.ones(size)
    if (worker, start) == (1, BLOCK):
        factors[2] = -1.0
    return factors


def not_a_number(size):
    return np.full(size, math.nan)


def worker_and_unit(size, worker, start):
    return 1000 * worker + np.arange(start, start + size)


def test_the_factors_of_an_imported_noise_are_checked():
    with pytest.raises(ExperimentError, match=rf"one_too_many.: must return factors of shape \[{BLOCK}\], not \[257\]"):
        delays_of(2, f"{__name__}:one_too_many")
    with pytest.raises(ExperimentError, match="returned factor nan for unit 0 of worker 0; it must be finite"):
        delays_of(2, f"{__name__}:not_a_number")
    delays = delays_of(2, f"{__name__}:negative")
    with pytest.raises(ExperimentError, match=f"returned factor -1.0 for unit {BLOCK + 2} of worker 1"):
        delays.seconds(1, BLOCK, 1)


def test_a_noise_without_a_generator_knows_its_units():
    delays = delays_of(3, f"{__name__}:worker_and_unit")
    for worker, unit in ((0, 0), (2, 1), (1, BLOCK - 1), (1, BLOCK), (1, 3 * BLOCK + 5), (2, 0)):
        assert delays.seconds(worker, unit, 1) == 1000 * worker + unit


# Traces


@pytest.fixture
def traced(tmp_path):
    def traced(text, n_workers=3):
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return delays_of(n_workers, "trace", path=str(path))

    return traced


def test_a_trace_of_one_column_is_the_same_for_all_workers_and_repeats(traced):
    length = 2 * BLOCK + 10
    delays = traced("\n".join(map(str, range(length))))
    for worker in range(3):
        assert [delays.seconds(worker, unit, 1) for unit in range(3 * BLOCK)] == [
            unit % length for unit in range(3 * BLOCK)
        ]


@pytest.mark.parametrize(
    "text",
    ["1,2,3\n4,5,6\n", "# a b, c\n1 2\t3\n\n4 5  6 # last", "\ufeff1, 2, 3\r\n4, 5, 6\r\n", "# x\n1,2,3\n  \n4,5,6"],
)
def test_a_trace_may_have_a_column_for_each_worker(traced, text):
    delays = traced(text)
    assert [delays.seconds(worker, unit, 1) for unit in range(3) for worker in range(3)] == [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_a_trace_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "trace.txt").write_text("3\n")
    monkeypatch.chdir(tmp_path)
    assert delays_of(2, "trace", path="trace.txt").seconds(1, 0, 1) == 3
    (tmp_path / "trace.txt").unlink()
    assert delays_of(2, "trace", path="trace.txt").seconds(0, 1, 1) == 3
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ExperimentError, match='clock.noise.path = "trace.txt": no such file'):
        delays_of(2, "trace", path="trace.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nfast\n", "cannot be read: could not convert string 'fast' to float64"),
        ("1,,3\n", "cannot be read: could not convert string '' to float64"),
        ("1,2,3\n4,5\n", "cannot be read: the number of columns changed from 3 to 2"),
        ("1\n\n-2\n", "must hold finite numbers of at least 0"),
        ("1,2,3\n4,inf,6\n", "must hold finite numbers of at least 0"),
        ("1,nan,3\n", "must hold finite numbers of at least 0"),
        ("1,2\n", "has 2 columns for 3 workers; give one for all workers, or one for each"),
        ("# nothing\n", "must hold finite numbers of at least 0"),
        (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line_that_names_the_file(traced, text, message):
    with pytest.raises(ExperimentError) as caught:
        traced(text)
    (line,) = caught.value.lines
    assert message in line
    assert line.startswith("clock.noise.path = ")
    assert "trace.csv" in line
