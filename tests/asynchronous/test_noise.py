from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.asynchronous.delays import BLOCK
from fedsim.errors import ExperimentError
from tests.asynchronous.timing import delays_of, factors_of, noise_of


def test_constant_noise_is_1_for_every_unit():
    assert set(factors_of("constant", workers=3, units=600)) == {1.0}


@pytest.mark.parametrize("shift", [0.0, 0.3, 0.9])
def test_shifted_exponential_noise_has_mean_1_beyond_its_shift(shift):
    factors = factors_of("shifted_exponential", shift=shift)
    scale = 1 - shift
    assert factors.min() == pytest.approx(shift, abs=1e-3)
    assert factors.mean() == pytest.approx(1, abs=4 * scale / math.sqrt(len(factors)))
    assert factors.std() == pytest.approx(scale, rel=0.015)
    assert np.median(factors) == pytest.approx(shift + scale * math.log(2), abs=0.01)


def test_a_shift_of_1_leaves_nothing_to_chance():
    assert set(factors_of("shifted_exponential", workers=2, shift=1.0)) == {1.0}


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_lognormal_noise_has_mean_1_and_the_median_of_its_formula(sigma):
    factors = factors_of("lognormal", sigma=sigma)
    deviation = math.sqrt(math.exp(sigma**2) - 1)
    assert factors.mean() == pytest.approx(1, abs=4 * deviation / math.sqrt(len(factors)))
    assert np.median(factors) == pytest.approx(math.exp(-(sigma**2) / 2), rel=0.015)
    assert np.log(factors).std() == pytest.approx(sigma, rel=0.01)


def test_pareto_noise_has_mean_1_and_the_quantiles_of_its_formula():
    assert factors_of("pareto", alpha=3.0).mean() == pytest.approx(1, abs=0.006)
    factors = factors_of("pareto", alpha=1.5)
    assert factors.min() == pytest.approx(1 / 3, rel=1e-3)
    for share in (0.25, 0.5, 0.9):
        assert np.quantile(factors, share) == pytest.approx(1 / 3 * (1 - share) ** (-1 / 1.5), rel=0.02)


@pytest.mark.parametrize("name", ["shifted_exponential", "lognormal", "pareto"])
def test_units_and_workers_have_nothing_to_do_with_each_other(name):
    ranks = factors_of(name, workers=200, units=1000).argsort().argsort().reshape(200, 1000) / 200_000 - 0.5
    bound = 4 / 12 / math.sqrt(199_000)  # a product of two uniform ranks has variance 1 / 144
    assert abs((ranks[:, 1:] * ranks[:, :-1]).mean()) < bound
    assert abs((ranks[1:] * ranks[:-1]).mean()) < bound


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("shifted_exponential", {"shift": 1.1}, "clock.noise.shift = 1.1: must be less than or equal to 1"),
        ("shifted_exponential", {"shift": -0.1}, "clock.noise.shift = -0.1: must be greater than or equal to 0"),
        ("lognormal", {"sigma": 0.0}, "clock.noise.sigma = 0.0: must be greater than 0"),
        ("pareto", {"alpha": 1.0}, "clock.noise.alpha = 1.0: must be greater than 1"),
        ("trace", {}, "clock.noise.path: is required"),
        ("constant", {"sigma": 1.0}, "clock.noise.sigma = 1.0: unknown key .*sigma goes with lognormal"),
        ("exponential", {}, 'clock.noise.name = "exponential": no such noise; did you mean "shifted_exponential"'),
    ],
)
def test_impossible_noise_is_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        noise_of(name, **params)


def one_too_many(size):
    return np.ones(size + 1)


def back_in_time(size, worker, start):
    factors = np.ones(size)
    if (worker, start) == (1, BLOCK):
        factors[2] = -1.0
    return factors


def never_ready(size):
    return np.full(size, math.nan)


def worker_and_unit(size, worker, start):
    return 1000 * worker + np.arange(start, start + size)


def test_what_a_noise_of_ones_own_gives_is_checked():
    with pytest.raises(ExperimentError, match=rf"one_too_many.: must give factors of time \[{BLOCK}\], not of shape"):
        delays_of(2, f"{__name__}:one_too_many")
    with pytest.raises(ExperimentError, match="gave unit 0 of worker 0 the factor nan; it must be finite and at least"):
        delays_of(2, f"{__name__}:never_ready")
    unit = delays_of(2, f"{__name__}:back_in_time")
    with pytest.raises(ExperimentError, match=f"gave unit {BLOCK + 2} of worker 1 the factor -1.0; it must be finite"):
        unit.seconds(1, BLOCK, 1)


def test_a_noise_that_needs_no_generator_is_told_whose_units_it_is_asked_for():
    unit = delays_of(3, f"{__name__}:worker_and_unit")
    for worker, k in ((0, 0), (2, 1), (1, BLOCK - 1), (1, BLOCK), (1, 3 * BLOCK + 5), (2, 0)):
        assert unit.seconds(worker, k, 1) == 1000 * worker + k


# Traces


@pytest.fixture
def traced(tmp_path):
    def traced(text, n_workers=3):
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return delays_of(n_workers, "trace", path=str(path))

    return traced


def test_a_trace_of_one_column_is_the_same_for_all_workers_and_goes_round(traced):
    unit = traced("0.5\n2\n1e1\n")
    for worker in range(3):
        for k in (0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7):
            assert unit.seconds(worker, k, 1) == [0.5, 2.0, 10.0][k % 3]


@pytest.mark.parametrize("text", ["1,2,3\n4,5,6\n", "# a b c\n1 2\t3\n\n4 5  6 # last", "\ufeff1, 2, 3\r\n4, 5, 6\r\n"])
def test_a_trace_may_have_a_column_for_each_worker(traced, text):
    unit = traced(text)
    assert [unit.seconds(worker, k, 1) for k in range(3) for worker in range(3)] == [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_a_trace_longer_than_a_block_is_read_from_end_to_end(traced):
    unit = traced("\n".join(map(str, range(2 * BLOCK + 10))))
    assert [unit.seconds(0, k, 1) for k in range(3 * BLOCK)] == [k % (2 * BLOCK + 10) for k in range(3 * BLOCK)]


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
        ("1\nfast\n", 'line 2: "fast": must be a finite number of at least 0'),
        ("1\n\n-2\n", 'line 3: "-2": must be a finite number of at least 0'),
        ("1,2,3\n4,inf,6\n", 'line 2: "inf": must be a finite'),
        ("1,nan,3\n", 'line 1: "nan": must be a finite'),
        ("1,,3\n", 'line 1: "": must be a finite'),
        ("# none\n1,2,3\n4,5\n", "line 3 has 2 factors, line 2 has 3"),
        ("1,2\n", "has 2 columns for 3 workers; give one for all workers, or one for each"),
        ("# nothing\n", "holds no factors of time"),
        (b"\xff\xfe\x00", "cannot be read: it is not text in UTF-8"),
    ],
)
def test_bad_traces_are_refused_in_one_line_that_names_the_file(traced, text, message):
    with pytest.raises(ExperimentError) as caught:
        traced(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("clock.noise.path = ")
    assert "trace.csv" in str(caught.value)
    assert len(caught.value.lines) == 1


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(ExperimentError, match="clock.noise.path = .*: cannot be read: Is a directory"):
        delays_of(2, "trace", path=str(tmp_path))
