from __future__ import annotations

import math
import pickle
import time

import numpy as np
import pytest

from fedsim.asynchronous import delays
from fedsim.asynchronous.calendar import Calendar
from fedsim.asynchronous.delays import BLOCK, Delays, bind_noise, draw_speeds, noise, speed
from fedsim.errors import ExperimentError
from fedsim.randomness import numpy_generator
from fedsim.tables import PlugTable


class Speed(PlugTable):
    place, named_by, registry = "clock.speed", "name", speed
    name: str = "equal"


class Noise(PlugTable):
    place, named_by, registry = "clock.noise", "name", noise
    name: str = "constant"


def speeds_of(n_workers, name, seed=0, **params):
    table = Speed(name=name, **params)
    return draw_speeds(table.plug, table.params, n_workers, seed)


def noise_of(name, **params):
    table = Noise(name=name, **params)
    return bind_noise(table.plug, table.params)


def delays_of(n_workers, name, seed=0, *, base=1.0, latency=0.0, bandwidth=None, **params):
    return Delays(np.ones(n_workers), noise_of(name, **params), seed, base, latency, bandwidth)


def factors_of(name, seed=0, *, workers=200, units=1000, **params):
    """The factors of many units of many workers, in one array."""
    unit = delays_of(workers, name, seed, **params)
    return np.array([unit.seconds(worker, k, 1) for worker in range(workers) for k in range(units)])


# Speeds


def test_equal_workers_have_the_factor_1():
    assert speeds_of(3, "equal").tolist() == [1.0, 1.0, 1.0]


def test_a_list_is_taken_as_it_is():
    assert speeds_of(3, "list", values=[1, 2.5, 0.5]).tolist() == [1.0, 2.5, 0.5]


def test_factors_are_evenly_spaced_or_have_an_even_quotient():
    assert speeds_of(4, "linear", ratio=7.0).tolist() == pytest.approx([1, 3, 5, 7], abs=1e-12)
    assert speeds_of(4, "geometric", ratio=8.0).tolist() == pytest.approx([1, 2, 4, 8], abs=1e-12)
    assert speeds_of(1, "linear").tolist() == speeds_of(1, "geometric").tolist() == [1.0]


@pytest.mark.parametrize("name", ["linear", "geometric"])
def test_shuffled_factors_are_the_same_ones_in_another_order(name):
    in_order, shuffled = speeds_of(50, name), speeds_of(50, name, shuffle=True)
    assert in_order[0] == 1
    assert in_order[-1] == 8
    assert sorted(shuffled) == in_order.tolist()
    assert shuffled.tolist() != in_order.tolist() != speeds_of(50, name, seed=1, shuffle=True).tolist()


def test_stragglers_are_as_many_as_the_fraction_says_and_drawn():
    factors = speeds_of(10, "stragglers", fraction=0.3, factor=5.0)
    assert sorted(factors) == [1.0] * 7 + [5.0] * 3
    assert len({tuple(speeds_of(10, "stragglers", seed, fraction=0.3)) for seed in range(20)}) > 10
    assert speeds_of(4, "stragglers", fraction=0.0).tolist() == [1.0] * 4
    assert speeds_of(4, "stragglers", fraction=1.0, factor=2.0).tolist() == [2.0] * 4


def test_lognormal_speeds_have_median_1_and_logarithms_of_deviation_sigma():
    logs = np.log(speeds_of(100_000, "lognormal", sigma=0.7))
    assert np.median(logs) == pytest.approx(0, abs=0.015)  # four standard errors: 1.2533 * 0.7 / sqrt(100,000) each
    assert logs.mean() == pytest.approx(0, abs=0.009)
    assert logs.std() == pytest.approx(0.7, rel=0.01)


def test_pareto_speeds_have_mean_1_and_the_quantiles_of_their_formula():
    factors = speeds_of(200_000, "pareto", alpha=3.0)  # standard deviation 1 / sqrt(alpha (alpha - 2)) = 0.58
    assert factors.mean() == pytest.approx(1, abs=0.006)
    factors = speeds_of(200_000, "pareto", alpha=1.5)
    assert factors.min() == pytest.approx(1 / 3, rel=1e-3)
    for share in (0.25, 0.5, 0.9):
        assert np.quantile(factors, share) == pytest.approx(1 / 3 * (1 - share) ** (-1 / 1.5), rel=0.02)


@pytest.mark.parametrize("plug", [plug for plug in speed if plug.name != "list"], ids=lambda plug: plug.name)
def test_speeds_are_positive_and_a_pure_function_of_the_seed(plug):
    first, again = (draw_speeds(plug, plug.check({}), 1000, 3) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.dtype == np.float64
    assert first.min() > 0


def test_speeds_are_drawn_as_documented():
    drawn = numpy_generator(5, "speed").standard_normal(4)
    assert speeds_of(4, "lognormal", 5, sigma=0.5).tolist() == [math.exp(0.5 * z) for z in drawn]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("list", {"values": [1.0, 2.0]}, r"clock.speed.values: 2 values for 3 workers; give one for each worker"),
        ("list", {"values": [1.0, 0.0, 2.0]}, r"clock.speed.values\[1\] = 0.0: must be greater than 0"),
        ("list", {"values": [1.0, math.inf, 2.0]}, r"clock.speed.values\[1\] = inf: must be a finite number"),
        ("list", {}, "clock.speed.values: is required"),
        ("lognormal", {"sigma": 0.0}, "clock.speed.sigma = 0.0: must be greater than 0"),
        ("lognormal", {"sigma": 11.0}, "clock.speed.sigma = 11.0: must be less than or equal to 10"),
        ("pareto", {"alpha": 1.0}, "clock.speed.alpha = 1.0: must be greater than 1"),
        ("geometric", {"ratio": 0.5}, "clock.speed.ratio = 0.5: must be greater than or equal to 1"),
        ("stragglers", {"fraction": 1.5}, "clock.speed.fraction = 1.5: must be less than or equal to 1"),
        ("stragglers", {"factor": 0.0}, "clock.speed.factor = 0.0: must be greater than 0"),
        ("lognormal", {"sgima": 1.0}, 'clock.speed.sgima = 1.0: unknown key .*did you mean "sigma"'),
        ("log_normal", {}, 'clock.speed.name = "log_normal": no such speed; did you mean "lognormal"'),
    ],
)
def test_impossible_speeds_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        speeds_of(3, name, **params)


def too_few_speeds(n_workers):
    return np.ones(n_workers - 1)


def standing_still(n_workers):
    return np.array([1.0, math.nan, 0.0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few_speeds", r'clock.speed.name = ".*": must give factors of time \[3\], not of shape \(2,\)'),
        ("standing_still", 'clock.speed.name = ".*": gave worker 1 the factor nan; it must be positive and finite'),
    ],
)
def test_what_a_speed_of_ones_own_gives_is_checked(name, message):
    with pytest.raises(ExperimentError, match=message):
        speeds_of(3, f"{__name__}:{name}")


# Noise


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


# Delays


def test_a_unit_takes_what_the_formula_says():
    """Twice as slow, 10 steps of 0.25 s, latency 0.5 s, 3,000 bytes at 1,000 a second."""
    unit = Delays(np.array([1.0, 2.0]), noise_of("constant"), base=0.25, latency=0.5, bandwidth=1000.0)
    assert unit.seconds(0, 0, 10) == 2.5  # nothing is sent
    assert unit.seconds(1, 0, 10, 0) == 5.0
    assert unit.seconds(1, 7, 10, 3000) == 8.5
    assert isinstance(unit.seconds(1, 0, 10), float)
    unlimited = Delays(np.array([1.0, 2.0]), noise_of("constant"))
    assert unlimited.seconds(1, 0, 3, 10**15) == 6.0


@pytest.mark.parametrize("name", ["shifted_exponential", "lognormal", "pareto"])
def test_a_unit_takes_what_the_documented_draws_give(name):
    params = noise.get(name).check({})
    unit = Delays(np.array([3.0, 0.5]), noise_of(name), seed=4, base=0.1, latency=0.2, bandwidth=50.0)
    for worker, k in ((0, 0), (1, 0), (1, BLOCK - 1), (1, BLOCK), (0, 10 * BLOCK + 3)):
        rng, size = numpy_generator(4, "delay", worker, k // BLOCK), BLOCK
        if name == "shifted_exponential":
            factor = rng.standard_exponential(size)[k % BLOCK]
        elif name == "lognormal":
            sigma = params["sigma"]
            factor = math.exp(sigma * rng.standard_normal(size)[k % BLOCK] - sigma * sigma / 2)
        else:
            alpha = params["alpha"]
            factor = (rng.pareto(alpha, size)[k % BLOCK] + 1) * (alpha - 1) / alpha
        expected = 7 * 0.1 * [3.0, 0.5][worker] * factor + 0.2 + 20 / 50.0
        assert unit.seconds(worker, k, 7, 20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "shifted_exponential", "lognormal", "pareto"])
def test_a_unit_takes_as_long_whenever_it_is_asked_for(name):
    asked = [(worker, k) for worker in range(4) for k in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)]
    in_order = {each: delays_of(4, name, 1).seconds(*each, 1) for each in asked}
    kept = delays_of(4, name, 1)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(asked).tolist()
        assert all(kept.seconds(worker, k, 1) == in_order[worker, k] for worker, k in order)
    if name != "constant":
        assert len(set(in_order.values())) == len(asked)
        assert delays_of(4, name, 2).seconds(0, 0, 1) != in_order[0, 0]


def test_a_unit_takes_as_long_however_many_workers_there_are():
    few, many = delays_of(3, "lognormal"), delays_of(1000, "lognormal")
    assert [few.seconds(worker, 5, 1) for worker in range(3)] == [many.seconds(worker, 5, 1) for worker in range(3)]


def test_numbers_may_be_numpys():
    unit = delays_of(3, "lognormal")
    assert unit.seconds(np.int64(2), np.int64(BLOCK), 1) == delays_of(3, "lognormal").seconds(2, BLOCK, 1)


def test_a_pickled_one_gives_the_same():
    unit = Delays(np.array([1.0, 2.0]), noise_of("pareto"), 3, 0.5, 0.1, 100.0)
    unit.seconds(0, 0, 1)
    again = pickle.loads(pickle.dumps(unit))
    assert [again.seconds(worker, k, 2, 5) for worker in (0, 1) for k in (0, BLOCK)] == [
        unit.seconds(worker, k, 2, 5) for worker in (0, 1) for k in (0, BLOCK)
    ]


def test_speeds_are_left_as_they_are():
    speeds = np.array([1.0, 2.0])
    Delays(speeds, noise_of("lognormal"), base=3.0).seconds(1, 0, 1)
    assert speeds.tolist() == [1.0, 2.0]


def test_only_so_many_blocks_are_kept_and_none_is_needed(monkeypatch):
    monkeypatch.setattr(delays, "KEPT", 3)
    unit, reference = delays_of(10, "lognormal"), delays_of(10, "lognormal")
    expected = {worker: reference.seconds(worker, 0, 1) for worker in (0, 1, 2)}
    for worker in (0, 1, 2, 0, 9, 1, 5, 0, 7, 2):
        seconds = unit.seconds(worker, 0, 1)
        assert seconds == expected.get(worker, seconds)
        assert len(unit._blocks) <= 3


def test_of_a_million_workers_only_those_asked_for_cost_anything():
    unit = delays_of(10**6, "lognormal")
    assert len(unit._blocks) == 0
    for worker in range(0, 10**6, 10_000):
        unit.seconds(worker, 0, 1)
    assert len(unit._blocks) == 100


@pytest.mark.parametrize(
    ("worker", "unit", "message"),
    [
        (-1, 0, "worker = -1: must be between 0 and 2"),
        (3, 0, "worker = 3: must be between 0 and 2"),
        (0, -1, "unit = -1: must be at least 0"),
    ],
)
def test_there_is_no_other_worker_or_unit(worker, unit, message):
    with pytest.raises(ValueError, match=message):
        delays_of(3, "lognormal").seconds(worker, unit, 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"base": 0.0}, "clock.base = 0.0: must be a finite number of seconds, greater than 0"),
        ({"base": math.nan}, "clock.base = nan"),
        ({"latency": -1.0}, "clock.latency = -1.0: must be a finite number of seconds, at least 0"),
        ({"latency": math.inf}, "clock.latency = inf"),
        ({"bandwidth": 0.0}, "clock.bandwidth = 0.0: must be greater than 0, in bytes per second"),
        ({"bandwidth": math.nan}, "clock.bandwidth = nan"),
    ],
)
def test_impossible_clocks_are_refused(params, message):
    with pytest.raises(ExperimentError, match=message):
        delays_of(2, "constant", **params)


def test_tables_of_an_experiment_hold_them():
    assert Speed.model_validate("equal").params == {}
    table = Speed.model_validate({"name": "lognormal", "sigma": 1})
    assert table.model_dump(mode="json") == {"name": "lognormal", "sigma": 1.0}
    table = Noise.model_validate({"name": "trace", "path": "later.csv"})  # read when it is needed, and not before
    assert table.model_dump(mode="json") == {"name": "trace", "path": "later.csv"}


@pytest.mark.parametrize("plug", [*speed, *noise], ids=lambda plug: f"{plug.kind}-{plug.name}")
def test_every_plug_says_in_a_line_what_it_is(plug):
    assert plug.summary.endswith(".")


@pytest.mark.parametrize(("n", "k", "rate"), [(10, 1, 2.0), (10, 6, 0.5), (10, 10, 1.0)])
def test_the_kth_of_n_exponential_arrivals_comes_when_theory_says(n, k, rate):
    """E[T] = (H_n - H_(n-k)) / rate, and the variance is the sum of 1 / (j rate)^2 over j = n-k+1, ..., n."""
    unit, rounds, times = delays_of(n, "shifted_exponential", base=1 / rate), 3000, []
    for round in range(rounds):
        calendar = Calendar()
        for worker in range(n):
            calendar.add(worker, unit.seconds(worker, round, 1))
        arrived = []
        while len(arrived) < k:
            arrived += calendar.next()
        times.append(calendar.now)
    expected = sum(1 / j for j in range(n - k + 1, n + 1)) / rate
    variance = sum(1 / j**2 for j in range(n - k + 1, n + 1)) / rate**2
    assert np.mean(times) == pytest.approx(expected, abs=4 * math.sqrt(variance / rounds))


def test_a_unit_takes_less_than_microseconds_to_ask_for():
    unit = delays_of(100, "lognormal", latency=0.1, bandwidth=1e6)
    start = time.process_time()
    for k in range(1000):
        for worker in range(100):
            unit.seconds(worker, k, 10, 1000)
    assert time.process_time() - start < 0.5  # 0.04 where nothing else runs
