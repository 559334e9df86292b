"""The distribution of the tests of single workers in a comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedsim
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.on_paper import draw_worker_comparison
from fedsim.records.worker_results import workers_csv
from tests.comparison.made_up import grid_of, results_of


def test_a_row_holds_the_workers_of_all_seeds_from_their_newest_tables(tmp_path):
    grid = grid_of({"local.solver": ["sgd", "ditto"], "seed": [0, 1]})
    runs = results_of(grid, lambda point: [0.5, 0.6])
    for index, run in enumerate(runs):
        folder = tmp_path / run.id
        folder.mkdir()
        for round in (1, 2, 3):  # the run has two rounds: a table of the third is not its own
            accuracy = {"global": [round / 10, round / 10 + index / 100]}
            accuracy |= {"personal": [0.9, 0.8]} if index > 1 else {}
            results = WorkerResults(round, [0, 1], [5, 5], {model: [1.0, 1.0] for model in accuracy}, accuracy)
            (folder / f"workers-{round:05}.csv").write_text(workers_csv(results))
        runs[index] = replace(run, folder=folder)
    figure = draw_worker_comparison(grid, runs)
    strokes = [sorted(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "|"]
    expected = [[0.2, 0.2, 0.2, 0.21], [0.2, 0.2, 0.22, 0.23], [0.8, 0.8, 0.9, 0.9]]
    assert np.array(strokes) == pytest.approx(np.array(expected))
    assert [text.get_text() for text in figure.legends[0].texts] == ["global model", "personal model"]


def test_a_comparison_draws_its_workers(serial, tmp_path):
    tables = {**serial, "data.worker_test": 0.3, "evaluation.every": 2}
    fedsim.compare(tables, {"seed": [0, 1]}, tmp_path / "with", jobs=1)
    fedsim.compare(serial, {"seed": [0, 1]}, tmp_path / "without", jobs=1)
    assert [(tmp_path / name / "workers.png").is_file() for name in ("with", "without")] == [True, False]
