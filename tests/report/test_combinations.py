"""The summary table of the page: differences from the best row, and weights of Byzantine workers."""

from __future__ import annotations

import pytest

from fedsim.comparison.results import read_records
from fedsim.core.confidence import estimate
from fedsim.records.formatting import MISSING
from fedsim.report.comparison_page import comparison_page
from tests.report.folders import add_to_rounds, invent_run, write_points

# The final accuracies of each (rule, attack), one per seed. None: the run has not begun.
FINAL = {
    ("mean", "none"): [0.9, 0.8, 0.7],
    ("median", "none"): [0.88, 0.78, 0.68],
    ("krum", "none"): [0.7, 0.8, 0.9],
    ("mean", "alie"): [0.1, 0.2, 0.3],
    ("median", "alie"): [0.6, 0.5, None],
    ("krum", "alie"): [None, None, None],
}


def test_a_row_has_statistics_over_the_seeds_and_its_paired_difference_to_the_best(tmp_path):
    """Mean and Krum are equal, so both are the best. Under alie only the mean has all its runs."""

    def make(path, point):
        final = FINAL[point["aggregate.rule"], point["attack.name"]][point["seed"]]
        if final is not None:
            invent_run(path, [0.05, final])
            add_to_rounds(path, lambda record: {"weights": [0.25, 0.75]})
            (path / "partition.json").write_text('{"byzantine": [1]}')

    axes = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none", "alie"], "seed": [0, 1, 2]}
    plan = read_records(write_points(tmp_path / "comparison", axes, make))
    assert [(row.position, row.score) for row in plan.summary] == [
        *(((index, 0), estimate(FINAL[rule, "none"])) for index, rule in enumerate(axes["aggregate.rule"])),
        *(((index, 1), score) for index, score in enumerate([estimate([0.1, 0.2, 0.3]), estimate([0.6, 0.5]), None])),
    ]
    table = comparison_page(plan)[0]["table"]
    cells = [dict(zip(table["head"], row["cells"], strict=True)) for row in table["rows"]]
    assert [each["test accuracy"].mark for each in cells] == ["★", "", "★", "★", "", ""]
    assert [each["difference to best"].sort for each in cells] == [
        *(None, pytest.approx(-0.02), pytest.approx(0.0), None),
        pytest.approx((0.6 - 0.1 + 0.5 - 0.2) / 2),  # over the two seeds that both have
        None,
    ]
    assert [each["Byzantine weight"].text for each in cells] == ["75 %"] * 5 + [MISSING]
    assert [each["runs"].text for each in cells] == ["3"] * 4 + ["2 of 3", "0 of 3"]
