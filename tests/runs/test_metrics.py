"""A number that a component records in a round appears in all outputs."""

from __future__ import annotations

import csv
import json

import pytest

import fedsim
from fedsim.callbacks.loggers import scalars
from fedsim.comparison.results import read_records
from fedsim.records.record import RoundRecord, metrics_in
from fedsim.records.round_table import columns_of, table_header
from fedsim.report.on_page import run_curves
from fedsim.report.run_page import rounds_table

CLIPPED = {"processors": [{"name": "clip", "max_norm": 1e-3}]}


def test_a_metric_of_a_component_reaches_file_table_tensorboard_and_report(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, **CLIPPED}, tmp_path / "run")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert line["metrics"] == {"clipped_share": 1.0}
    assert "clipped_share" in table_header(columns_of(result.history[0]))
    assert scalars(result.history[1])["metrics/clipped_share"] == 1.0
    stored = read_records(tmp_path / "run")
    (figure,) = [figure for figure in run_curves(stored) if figure["when"]["metric"] == "clipped_share"]
    assert figure["data"][0]["y"] == [1.0, 1.0]
    assert "clipped_share" in rounds_table(stored)["head"]


def test_a_metric_of_a_component_reaches_the_tables_of_a_comparison(tiny_experiment, tmp_path):
    fedsim.compare({**tiny_experiment, **CLIPPED}, {"seed": [0, 1]}, tmp_path / "comparison", jobs=1)
    for name, rows in (("results.csv", 2), ("curves.csv", 4)):
        with (tmp_path / "comparison" / name).open() as file:
            assert [row["metrics.clipped_share"] for row in csv.DictReader(file)] == ["1.0"] * rows


def test_a_record_is_a_dict_of_its_fields_and_is_read_as_it_was_written():
    record = RoundRecord(round=1, test_loss=0.5, cohort=[2], asynchronous={"updates": 3, "staleness": {"1": 2}})
    assert json.loads(json.dumps(record)) == record
    assert record["asynchronous"]["updates"] == record.asynchronous.updates == 3
    assert record.staleness == 1.0
    assert RoundRecord(round=1, later=5) == RoundRecord(round=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_number_that_is_not_finite_is_not_a_metric_value(value):
    assert metrics_in([RoundRecord(round=1, test_loss=value)]) == []
