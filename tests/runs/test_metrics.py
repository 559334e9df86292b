"""A number that a plug adds to the record of a round reaches all outputs."""

from __future__ import annotations

import csv
import json

import pytest

import fedsim
from fedsim.records.reader import read_records
from fedsim.records.record import RoundRecord, metrics_in
from fedsim.records.tensorboard import scalars
from fedsim.report.curves import run_curves
from fedsim.report.run_page import rounds_table
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.text_table import columns_of, table_header


@pytest.fixture
def with_update_norm(monkeypatch):
    """Add a number to each record where a loop makes it."""

    def record(**fields):
        return RoundRecord(**fields, metrics={"update_norm": 2.5 * fields["round"]})

    monkeypatch.setitem(vars(__import__(SynchronousLoop.__module__, fromlist=["x"])), "RoundRecord", record)


def test_a_metric_of_a_plug_reaches_file_table_tensorboard_and_report(with_update_norm, tiny_experiment, tmp_path):
    result = fedsim.run(tiny_experiment, tmp_path / "run")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert line["metrics"] == {"update_norm": 5.0}
    assert "update_norm" in table_header(columns_of(result.history[0]))
    assert scalars(result.history[1])["metrics/update_norm"] == 5.0
    stored = read_records(tmp_path / "run")
    (figure,) = [figure for figure in run_curves(stored) if figure["when"]["metric"] == "update_norm"]
    assert figure["data"][0]["y"] == [2.5, 5.0]
    assert "update_norm" in rounds_table(stored)["head"]


def test_a_metric_of_a_plug_reaches_the_tables_of_a_comparison(with_update_norm, tiny_experiment, tmp_path):
    fedsim.compare(tiny_experiment, {"seed": [0, 1]}, tmp_path / "grid", jobs=1)
    with (tmp_path / "grid" / "results.csv").open() as file:
        assert [row["metrics.update_norm"] for row in csv.DictReader(file)] == ["5.0", "5.0"]
    with (tmp_path / "grid" / "curves.csv").open() as file:
        assert [row["metrics.update_norm"] for row in csv.DictReader(file)] == ["2.5", "5.0"] * 2


def test_a_record_is_a_dict_of_its_fields_and_is_read_as_it_was_written():
    record = RoundRecord(round=1, test_loss=0.5, cohort=[2], asynchronous={"updates": 3, "staleness": {"1": 2}})
    assert json.loads(json.dumps(record)) == record
    assert record["asynchronous"]["updates"] == record.asynchronous.updates == 3
    assert record.staleness == 1.0


def test_fields_of_a_later_version_are_ignored():
    assert RoundRecord(round=1, later=5) == RoundRecord(round=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_number_that_is_not_finite_is_no_value_of_a_metric(value):
    assert metrics_in([RoundRecord(round=1, test_loss=value)]) == []
