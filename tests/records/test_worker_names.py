"""Names of workers: every output shows them beside the numbers, and no number depends on them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedsim
from fedsim.cli.rule_replay import load_round, replay, replay_table
from fedsim.core.plotting import encode
from fedsim.errors import called
from fedsim.records.figures import draw_workers
from fedsim.records.reader import Run
from fedsim.report.run_page import run_page

RNG = np.random.default_rng(0)
SIZES = (20, 24, 28)
PARTS = [(RNG.normal(size=(n, 2)).astype(np.float32), RNG.integers(0, 2, n)) for n in SIZES]
TESTS = [(inputs[:10] + 0.5, labels[:10]) for inputs, labels in PARTS]
NAMES = ["01", "=1+1", "zürich <b>\u202e\x1b[31m\n$x$ {0} %s" + "x" * 300]  # in the order of owners
SMALL = {"rounds": 2, "model": "logistic", "engine": "serial", "local": {"batch_size": 8}}


def clients(names, order=(0, 1, 2)):
    return {names[k]: (PARTS[k], TESTS[k]) for k in order}


@pytest.fixture(scope="module")
def named_run(tmp_path_factory):
    """A finished run whose owners, of whom one has only test samples, have hostile names. Returns its result."""
    file = tmp_path_factory.mktemp("data") / "owned.npz"
    inputs, labels = (np.concatenate([part[side] for part in PARTS]) for side in (0, 1))
    users = np.repeat(NAMES, SIZES)
    np.savez(file, inputs=inputs, targets=labels, user=users)
    data = {"name": "npz", "path": str(file), "local_test_fraction": 0.25}
    attack = {"name": "sign_flipping", "workers": [1]}
    folder = tmp_path_factory.mktemp("run") / "run"
    records = {"updates": [1], "figures": []}
    return fedsim.run(SMALL, data=data, partition="natural", attack=attack, records=records, out=folder)


def test_a_folder_holds_them(named_run):
    stored = json.loads((named_run.folder / "partition.json").read_text())
    again = fedsim.load_run(named_run.folder)
    assert stored["names"] == NAMES == list(named_run.worker_names) == list(again.worker_names)
    assert again.worker_results == named_run.worker_results
    frame = again.worker_results.to_dataframe()
    assert list(frame)[:3] == ["worker", "name", "samples"]
    assert frame["name"].tolist() == [NAMES[0], NAMES[2]]  # attackers are not tested


def test_people_see_them_cut_and_without_control_characters(named_run):
    long = "zürich <b>??[31m?$x$...xxxxxxxxxxxxxxxxx"
    assert [called(worker, NAMES) for worker in range(4)] == ["0 (01)", "1 (=1+1)", f"2 ({long})", "3"]
    _, charts = run_page(Run.read(named_run.folder))
    shown = long.replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
    assert charts["partition-chart"][0]["data"][1]["x"] == ["0 (01)", "1 (=1+1) (B)", f"2 ({shown})"]
    assert charts["weights-chart"][0]["data"][0]["y"] == ["0 (01)", "1 (=1+1) (B)", f"2 ({shown})"]
    assert sorted(charts["workers-chart"][0]["data"][0]["y"]) == ["0 (01)", f"2 ({shown})"]
    figure = draw_workers(named_run.worker_results, "run")
    assert {text.get_text() for text in figure.axes[0].get_yticklabels()} == {"0 (01)", f"2 ({long})"}
    assert encode(figure, "png")
    assert fedsim.plot_partition(np.array([[1, 2], [3, 4], [5, 6]]), "three", NAMES) != fedsim.plot_partition(
        np.array([[1, 2], [3, 4], [5, 6]]), "three"
    )
    stored = load_round(named_run.folder)
    lines = replay_table(stored, replay(stored, [{"rule": "krum", "f": 0}]))
    assert "of Byzantine workers [1 (=1+1)]" in lines
    assert any(f"worker {called(worker, NAMES)}" in lines for worker in range(3))


def test_messages_and_callbacks_name_workers(capsys):
    huge = {**clients(["A", "B", "C"]), "B": ((PARTS[1][0] * 1e38, PARTS[1][1]), TESTS[1])}
    with (
        pytest.warns(fedsim.errors.FedsimWarning),
        pytest.raises(fedsim.errors.DivergedError, match=r"\(from workers 1 \(B\)\)"),
    ):
        fedsim.run(SMALL, data=huge)
    seen = []
    fedsim.run(SMALL, data={**clients(["A", "B", "C"]), "new": (None, TESTS[0])}, on_start=seen.append)
    assert seen[0].worker_names == ("A", "B", "C", "new")
    assert called(1) == "1"  # names end with their run


def numbers(result):
    return [
        {key: value for key, value in vars(record).items() if key != "seconds"} for record in result.history
    ], result.global_row.tolist()


def test_no_number_depends_on_them():
    first, renamed = (fedsim.run(SMALL, data=clients(names)) for names in (["A", "B", "C"], ["z", "01", "1"]))
    numbered = fedsim.run(SMALL, data=[(PARTS[k], TESTS[k]) for k in range(3)])
    assert numbers(first) == numbers(renamed) == numbers(numbered)
    assert (renamed.worker_names, numbered.worker_names) == (("z", "01", "1"), ())
    permuted = fedsim.run(SMALL, data=clients(["A", "B", "C"], order=(2, 0, 1)))
    assert permuted.worker_names == ("C", "A", "B")
    for result in (first, permuted):
        samples = dict(zip(result.worker_names, result.history[0].samples, strict=True))
        assert samples == dict(zip("ABC", SIZES, strict=True))


def test_personal_models_by_name(tmp_path):
    tables = {"local": {"algorithm": "ditto"}, "checkpoint": {"every": 2}, "records": {"figures": []}}
    result = fedsim.run({**SMALL, **tables, "data": clients(["A", "B", "C"])}, tmp_path / "r")
    named, numbered = (result.personal_model(worker).state_dict() for worker in ("B", 1))
    assert all(torch.equal(value, numbered[key]) for key, value in named.items())
    with pytest.raises(
        fedsim.ExperimentError, match='^worker = "D": must be an ID from 0 to 2, or a name in worker_names$'
    ):
        result.personal_model("D")


def test_data_without_names_have_no_column_of_names(tmp_path):
    fedsim.run(SMALL, data=[(PARTS[k], TESTS[k]) for k in range(3)], out=tmp_path / "r", records={"figures": []})
    assert (tmp_path / "r" / "workers-00002.csv").read_text().startswith("worker,samples,")
    assert "names" not in json.loads((tmp_path / "r" / "partition.json").read_text())


@pytest.mark.parametrize(
    ("partition", "names"),
    [
        ({"name": "given", "path": "lists.json"}, ("ann", "bob")),
        ({"name": "natural", "by": "user"}, ("u0", "u1")),
        ({"name": "natural", "by": "number"}, ()),  # owners 0 and 1
        ("iid", ()),
    ],
)
def test_a_worker_has_the_name_of_its_only_owner(partition, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists.json").write_text(json.dumps({"ann": [0, 2], "bob": [1]}))
    inputs, labels = PARTS[0]
    owners = np.arange(20) % 2
    ids = {"user": [f"u{owner}" for owner in owners], "number": owners}
    data = fedsim.TensorData(torch.from_numpy(inputs), torch.from_numpy(labels), ids=ids)
    assert fedsim.run(SMALL, data=(data, TESTS[0]), partition=partition).worker_names == names


def test_own_test_sets_beside_a_global_one():
    both = fedsim.run(SMALL, data=(clients(["A", "B", "C"]), TESTS[0]))
    own = fedsim.run(SMALL, data=clients(["A", "B", "C"]))
    common = fedsim.run(SMALL, data=({name: data for name, (data, _) in clients(["A", "B", "C"]).items()}, TESTS[0]))
    assert both.worker_results == own.worker_results
    assert [record.test_loss for record in both.history] == [record.test_loss for record in common.history]
    assert own.test_loss != common.test_loss
