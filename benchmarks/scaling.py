"""The cost of a round depends on the size of the cohort but not on the size of the population.

Workers train `2nn` for one epoch on virtual shards of 60 MNIST images with engine=batched and processes=1. Time is that
of a whole round without the test of the global model, which depends on neither size. Populations take turns within one
process. Memory is the largest resident set of a run in a separate process. Before the timing, the rows of the timed
engine are compared with those of the engine `serial`.

    python benchmarks/scaling.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import report

import fedsim
from fedsim import Session

COHORTS, POPULATION = (1, 3, 10, 30, 100, 300, 1000), 10**4
POPULATIONS, COHORT = (10**2, 10**3, 10**4, 10**5, 10**6), 10
ALLOWED = 1.5  # allowed ratio of round times, largest to smallest population
TOLERANCE = 1e-9  # allowed difference between rows of engines, in float64
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "scaling_cpu.png"
COLOURS = ("#0072B2", "#D55E00")  # blue and vermilion of Okabe and Ito, distinguishable with colour blindness


def experiment(population: int, cohort: int, rounds: int, **changes: Any) -> dict[str, Any]:
    return {
        "workers": population,
        "cohort": cohort,
        "rounds": rounds,
        "engine": "batched",
        "processes": 1,
        "model": "2nn",
        "partition": {"name": "virtual", "samples": 60, "alpha": 0.5},
        "local": {"batch_size": 10, "lr": 0.1},
        **changes,
    }


def check_work(population: int, cohort: int, rounds: int) -> float:
    """Return the largest difference between rows of `batched` and `serial`, which must be due to rounding."""
    row, reference = (
        fedsim.run(experiment(population, cohort, rounds, engine=engine, precision="float64")).global_row
        for engine in ("batched", "serial")
    )
    difference = float((row - reference).abs().max())
    assert difference <= TOLERANCE, f"{population} workers: rows differ by {difference}"
    return difference


def round_seconds(population: int, cohort: int, rounds: int, session: Session) -> float:
    """Return the median seconds of a round without its test. The first round is ignored."""
    ends: list[float] = []
    tests: list[float] = []

    def note(record: Any) -> None:
        ends.append(time.perf_counter())
        tests.append(record["seconds"]["test"])

    fedsim.run(experiment(population, cohort, rounds + 1), on_round=note, session=session)
    spans = [end - start - test for start, end, test in zip(ends, ends[1:], tests[1:], strict=False)]
    return statistics.median(spans)


def start_seconds(population: int, session: Session) -> float:
    """Return the seconds from the call to the first round."""
    begun = time.perf_counter()
    started: list[float] = []
    fedsim.run(
        experiment(population, COHORT, 1), on_start=lambda _: started.append(time.perf_counter()), session=session
    )
    return started[0] - begun


def peak_megabytes(population: int, cohort: int) -> float:
    """Return the largest resident set in MB of a run of two rounds in a separate process."""
    command = [sys.executable, __file__, "--alone", str(population), str(cohort)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_alone(population: int, cohort: int) -> None:
    """Run two rounds and print the largest resident set of this process in MB, as counted by the kernel."""
    fedsim.run(experiment(population, cohort, 2))
    marks = Path("/proc/self/status").read_text().splitlines()
    print(next(1024 * int(line.split()[1]) for line in marks if line.startswith("VmHWM:")) / 1e6)


def draw(figures: dict[str, Any]) -> None:
    """Draw four curves (time and memory, by cohort and by population) and store them as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    columns = (
        ("cohort", figures["cohorts"], f"workers in a round (population {POPULATION:,})"),
        ("population", figures["populations"], f"workers in all ({COHORT} in a round)"),
    )
    for column, (name, sizes, label) in enumerate(columns):
        seconds, megabytes = figures[f"{name}_seconds"], figures[f"{name}_peak_mb"]
        time_panel, memory_panel = panels[:, column]
        time_panel.loglog(sizes, [1000 * each for each in seconds], "o-", color=COLOURS[0])
        memory_panel.semilogx(sizes, megabytes, "s-", color=COLOURS[1])
        memory_panel.set_xlabel(label)
        for panel in (time_panel, memory_panel):
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set(ylabel="milliseconds a round")
    panels[1, 0].set(ylabel="peak memory, MB", ylim=(0, None))
    figure.suptitle("A round costs by its cohort, not by the population (2nn, 60 samples each, one process on a CPU)")
    figure.savefig(PICTURE, dpi=120)


def measure_cohorts(repeats: int, session: Session) -> list[float]:
    """Return the seconds of a round for each cohort size, as medians over the repetitions."""
    times: list[list[float]] = [[] for _ in COHORTS]
    for _ in range(repeats):
        for cohort, seconds in zip(COHORTS, times, strict=True):
            seconds.append(round_seconds(POPULATION, cohort, max(2, min(20, 300 // cohort)), session))
    return [statistics.median(seconds) for seconds in times]


def measure_populations(repeats: int, session: Session) -> tuple[list[float], float]:
    """Return the seconds of a round for each population, and the ratio of the last to the first (medians)."""
    times: list[list[float]] = [[] for _ in POPULATIONS]
    for _ in range(repeats):
        for population, seconds in zip(POPULATIONS, times, strict=True):
            seconds.append(round_seconds(population, COHORT, 30, session))
    ratios = [last / first for first, last in zip(times[0], times[-1], strict=True)]
    return [statistics.median(seconds) for seconds in times], statistics.median(ratios)


def significant(values: Sequence[float]) -> list[float]:
    """Return the values rounded to three significant digits."""
    return [float(f"{value:.3g}") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", type=int, nargs=2, metavar=("POPULATION", "COHORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.alone:
        return run_alone(*arguments.alone)
    difference = max(check_work(POPULATIONS[-1], COHORT, rounds=2), check_work(POPULATION, 100, rounds=1))
    with Session() as session:
        start = start_seconds(POPULATIONS[-1], session)
        population_seconds, ratio = measure_populations(arguments.repeats, session)
        cohort_seconds = measure_cohorts(math.ceil(arguments.repeats / 2), session)
    figures = {
        "cohorts": COHORTS,
        "cohort_seconds": significant(cohort_seconds),
        "cohort_peak_mb": significant([peak_megabytes(POPULATION, cohort) for cohort in COHORTS]),
        "populations": POPULATIONS,
        "population_seconds": significant(population_seconds),
        "population_peak_mb": significant([peak_megabytes(population, COHORT) for population in POPULATIONS]),
    }
    draw(figures)
    report(
        "scaling",
        **figures,
        ratio_million_to_hundred=round(ratio, 3),
        seconds_to_start_with_a_million=round(start, 2),
        greatest_difference_to_serial=difference,
        load=[round(each, 1) for each in os.getloadavg()],
        repeats=arguments.repeats,
    )
    assert ratio <= ALLOWED, f"a round takes {ratio:.2f} times as long with {POPULATIONS[-1]} workers"


if __name__ == "__main__":
    main()
