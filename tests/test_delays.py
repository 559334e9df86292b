"""Slowdowns of workers, noise of work items (also from a trace file), and the delays computed from both."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.config.schema import Noise, Slowdown
from fedsim.core.randomness import numpy_generator
from fedsim.delays import BLOCK, Delays, slowdown
from fedsim.errors import ExperimentError


def slowdowns_of(n_workers, name, seed=0, **params):
    return Slowdown(name=name, **params).component(n_workers, seed)


def noise_of(name, **params):
    return Noise(name=name, **params).component


def delays_of(n_workers, name, seed=0, **params):
    return Delays(np.ones(n_workers), noise_of(name, **params), seed)


# Delays


def test_seconds_are_the_formula():
    """A worker is twice as slow: 10 steps of 0.25 s, latency 0.5 s, 3,000 bytes at 1,000 bytes per second."""
    delays = Delays(np.array([1.0, 2.0]), noise_of("constant"), base=0.25, latency=0.5, bandwidth=1000.0)
    assert delays.seconds(0, 0, 10) == 2.5  # nothing is sent
    assert delays.seconds(1, 0, 10, 0) == 5.0
    assert delays.seconds(1, 7, 10, 3000) == 8.5
    assert Delays(np.array([1.0, 2.0]), noise_of("constant")).seconds(1, 0, 3, 10**15) == 6.0


@pytest.mark.parametrize(
    ("name", "params", "factors"),
    [
        ("shifted_exponential", {}, lambda rng: rng.standard_exponential(BLOCK)),
        ("shifted_exponential", {"shift": 0.3}, lambda rng: 0.3 + 0.7 * rng.standard_exponential(BLOCK)),
        ("shifted_exponential", {"shift": 1.0}, lambda rng: np.ones(BLOCK)),
        ("lognormal", {"sigma": 0.7}, lambda rng: np.exp(0.7 * rng.standard_normal(BLOCK) - 0.7**2 / 2)),
        ("pareto", {"alpha": 1.5}, lambda rng: (rng.pareto(1.5, BLOCK) + 1) / 3),
    ],
)
def test_noise_is_drawn_as_documented(name, params, factors):
    delays = Delays(np.array([3.0, 0.5]), noise_of(name, **params), seed=4, base=0.1, latency=0.2, bandwidth=50.0)
    for worker, unit in ((0, 0), (1, 0), (1, BLOCK - 1), (1, BLOCK), (0, 10 * BLOCK + 3)):
        factor = factors(numpy_generator(4, "delay", worker, unit // BLOCK))[unit % BLOCK]
        expected = 7 * 0.1 * [3.0, 0.5][worker] * factor + 0.2 + 20 / 50.0
        assert delays.seconds(worker, unit, 7, 20) == pytest.approx(expected, rel=1e-12)


# Slowdowns


@pytest.mark.parametrize("name", ["linear", "geometric"])
def test_shuffle_permutes_the_factors(name):
    in_order, shuffled = slowdowns_of(50, name), slowdowns_of(50, name, shuffle=True)
    assert sorted(shuffled) == in_order.tolist()
    assert shuffled.tolist() != in_order.tolist() != slowdowns_of(50, name, seed=1, shuffle=True).tolist()
    assert slowdowns_of(1, name).tolist() == [1.0]


@pytest.mark.parametrize(("fraction", "slow"), [(0.0, 0), (0.3, 3), (1.0, 10)])
def test_stragglers_are_a_drawn_fraction(fraction, slow):
    assert sorted(slowdowns_of(10, "stragglers", fraction=fraction, factor=5.0)) == [1.0] * (10 - slow) + [5.0] * slow


@pytest.mark.parametrize(
    "registration",
    [registration for registration in slowdown if registration.name != "list"],
    ids=lambda registration: registration.name,
)
def test_slowdowns_are_positive_and_a_pure_function_of_the_seed(registration):
    first, again = (slowdown.bind(registration, registration.check({}))(1000, 3) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.min() > 0


@pytest.mark.parametrize(
    ("name", "params", "factors"),
    [
        ("lognormal", {"sigma": 0.7}, lambda rng: np.exp(0.7 * rng.standard_normal(4))),
        ("pareto", {"alpha": 1.5}, lambda rng: (rng.pareto(1.5, 4) + 1) / 3),
    ],
)
def test_slowdowns_are_drawn_as_documented(name, params, factors):
    assert slowdowns_of(4, name, 5, **params).tolist() == pytest.approx(factors(numpy_generator(5, "speed")).tolist())


# Errors


@pytest.mark.parametrize(
    ("of", "name", "params", "message"),
    [
        (Slowdown, "list", {"values": [1.0, 2.0]}, r"clock.slowdown.values: contains 2 values for 3 workers"),
        (Slowdown, "list", {"values": [1.0, 0.0, 2.0]}, r"clock.slowdown.values\[1\] = 0.0: must be greater than 0"),
    ],
)
def test_impossible_parameters_are_an_error(of, name, params, message):
    with pytest.raises(ValueError, match=message):
        noise_of(name, **params) if of is Noise else slowdowns_of(3, name, **params)


def one_too_many(size):
    return np.ones(size + 1)


def negative(size, worker, start):
    factors = np.ones(size)
    if (worker, start) == (1, BLOCK):
        factors[2] = -1.0
    return factors


def worker_and_unit(size, worker, start):
    return 1000 * worker + np.arange(start, start + size)


def zero(n_workers):
    return np.array([1.0, 0.0, 1.0])


def test_the_factors_of_imported_components_are_checked():
    with pytest.raises(ExperimentError, match=rf"one_too_many.: must return factors of shape \[{BLOCK}\], not \[257\]"):
        delays_of(2, f"{__name__}:one_too_many")
    delays = delays_of(2, f"{__name__}:negative")
    with pytest.raises(ExperimentError, match=f"returned factor -1.0 for work item {BLOCK + 2} of worker 1"):
        delays.seconds(1, BLOCK, 1)
    with pytest.raises(ExperimentError, match="returned a factor of 0; factors must be positive"):
        slowdowns_of(3, f"{__name__}:zero")


def test_a_noise_without_a_generator_knows_its_units():
    delays = delays_of(3, f"{__name__}:worker_and_unit")
    for worker, unit in ((0, 0), (2, 1), (1, BLOCK - 1), (1, BLOCK), (1, 3 * BLOCK + 5)):
        assert delays.seconds(worker, unit, 1) == 1000 * worker + unit


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


def test_each_run_reads_its_trace_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ("3", "4"):
        (tmp_path / "trace.txt").write_text(content)
        delays = delays_of(2, "trace", path="trace.txt")
        assert delays.seconds(1, 0, 1) == float(content)
        (tmp_path / "trace.txt").unlink()
        assert delays.seconds(0, BLOCK, 1) == float(content)
    with pytest.raises(ExperimentError, match='clock.noise.path = "trace.txt": no such file'):
        delays_of(2, "trace", path="trace.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nfast\n", "cannot be read: could not convert string 'fast' to float64"),
        ("1,2,3\n4,5\n", "cannot be read: the number of columns changed from 3 to 2"),
        ("1\n\n-2\n", "must contain at least one number, and all numbers must be finite and at least 0"),
        ("1,2\n", "has 2 columns for 3 workers; must have one column for all workers, or one column"),
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
