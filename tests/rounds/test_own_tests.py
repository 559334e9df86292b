"""Each client's own test samples: which format has them, who is tested on which samples, and what is recorded."""

from __future__ import annotations

import csv
import json
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.errors import FedsimError, FedsimWarning
from fedsim.records.reader import Run
from fedsim.runs.setup import begun
from tests.components import clients

OWNERS = {"10": (6, 3), "9": (4, 2), "b": (5, 0), "x": (0, 4), "a": (0, 2)}  # training and test samples of each owner
TRAINED, UNSEEN = ["10", "9", "b"], ["a", "x"]  # in the order of their numbers
TINY = {"rounds": 1, "engine": "serial", "local": {"batch_size": 4}, "precision": "float64"}


def samples(owner, part):
    """Inputs [n, 2] whose first column is the number of the owner, and labels."""
    n = OWNERS[owner][part]
    inputs = torch.stack([torch.full((n,), list(OWNERS).index(owner) / 10), torch.arange(n) + part / 2], 1)
    return inputs, torch.arange(n) % 2


def rows(order=tuple(OWNERS)):
    for owner in order:
        for part in (0, 1):
            for (x, z), y in zip(*samples(owner, part), strict=True):
                yield {"x": float(x), "z": float(z), "client": owner, "y": int(y), "part": part}


def leaf(folder, reverse=False):
    for part, name in enumerate(("train", "test")):
        users = [owner for owner in OWNERS if part or OWNERS[owner][0]]  # the test file names a user without samples
        users = users[::-1] if part and reverse else users
        data = {owner: dict(zip("xy", (v.tolist() for v in samples(owner, part)), strict=True)) for owner in users}
        (folder / name).mkdir()
        (folder / name / "all.json").write_text(json.dumps({"users": users, "user_data": data}))
    return {"name": "leaf", "path": str(folder)}, {}


def one_file(folder, names=("train", "test"), column="split", order=tuple(OWNERS)):
    with (folder / "t.csv").open("w", newline="") as file:
        table = [{**row, column: names[row["part"]]} for row in rows(order)]
        writer = csv.DictWriter(file, ["x", "z", "client", "y", column], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)
    return {"name": str(folder / "t.csv"), "ids": "client", **({} if column == "split" else {"split": column})}, {}


def two_files(folder):
    for part, name in enumerate(("train", "test")):
        lines = [f"{r['x']},{r['z']},{r['client']},{r['y']}" for r in rows(tuple(OWNERS)[::-1]) if r["part"] == part]
        (folder / f"{name}.csv").write_text("\n".join(["x,z,client,y", *lines]))
    return {"name": str(folder / "train.csv"), "test_path": str(folder / "test.csv"), "ids": "client"}, {}


def pairs(folder):
    parts = [tuple(torch.utils.data.TensorDataset(*samples(owner, part)) for part in (0, 1)) for owner in OWNERS]
    order = [*TRAINED, *UNSEEN]  # numbers, not names, define the order of the workers
    parts = dict(zip(OWNERS, parts, strict=True))
    return [tuple(part if len(part) else None for part in parts[owner]) for owner in order], {"partition": None}


def frames(folder):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(list(rows()))
    table["Split"] = table.pop("part").map({0: "Training", 1: "VALID"})
    return {"name": table, "ids": "client"}, {}


def hugging_face(folder):
    datasets, table = pytest.importorskip("datasets"), list(rows(tuple(OWNERS)[::-1]))
    parts = [[{k: v for k, v in row.items() if k != "part"} for row in table if row["part"] == part] for part in (0, 1)]
    parts = {name: datasets.Dataset.from_list(part) for name, part in zip(("train", "test"), parts, strict=True)}
    return {"name": datasets.DatasetDict(parts), "ids": "client"}, {}


FORMATS = {
    "leaf": leaf,
    "leaf in another order": lambda folder: leaf(folder, reverse=True),
    "a column split": one_file,
    "a column of another name": lambda folder: one_file(folder, ("train", "val"), "fold", tuple(OWNERS)[::-1]),
    **{"two files": two_files, "pairs": pairs, "a data frame": frames, "hugging face": hugging_face},
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_each_worker_the_test_samples_of_its_owner(form, tmp_path):
    if "file" in form or "column" in form:
        pytest.importorskip("pyarrow")
    data, more = FORMATS[form](tmp_path)
    experiment = fedsim.Experiment(
        **{**TINY, "partition": "natural", "data": data, **more} if not more else {**TINY, "data": data}
    )
    assert (experiment.workers, experiment.data.local_test_fraction) == (3, "own")
    with fedsim.Session() as session, begun(experiment, session) as (_, engine):
        shared = engine.shared.data
        assert len(shared.worker_tests) == 5
        for number, owner in enumerate([*TRAINED, *UNSEEN]):
            for shards, part, whole in ((shared.shards, 0, shared.train), (shared.worker_tests, 1, shared.test)):
                if part == 1 or number < 3:
                    inputs, targets = samples(owner, part)
                    found = whole.gather(shards.of(number))
                    assert torch.equal(found[0], inputs.double())
                    assert torch.equal(found[1], targets)
        [line] = [line for line in shared.train.assumed if "client" in line and "own" in line]
    assert line == (
        "4 clients with their own test samples, 2 of them only for tests; the global test set has all test samples"
    )


def test_a_worker_that_is_drawn_keeps_its_own_test_samples_and_the_others_are_not_unseen():
    for seed in range(4):
        experiment = fedsim.Experiment(
            **{**TINY, "data": "tests.components:clients", "partition": "natural", "workers": 3, "seed": seed}
        )
        with fedsim.Session() as session, begun(experiment, session) as (_, engine):
            shared, (train, test) = engine.shared.data, clients(None)
            for worker in range(3):
                [owner] = set(train.ids["client"][shared.shards.of(worker)])
                assert test.inputs[shared.worker_tests.of(worker)].tolist() == (
                    test.inputs[test.ids["client"] == owner].tolist()
                )
            assert len(shared.worker_tests) == 3 + 2


RUN = {**TINY, "data": "tests.components:clients", "partition": "natural", "rounds": 2, "seed": 3}
RUN |= {
    "records": {"figures": []},
    "model": {"name": "mlp", "hidden": [5]},
    "worker_evaluation": {"every": 2, "fine_tune": 1},
}


def expected(model, owners):
    """Loss and accuracy of a model on the test samples of each owner, one owner after another."""
    _, test = clients(None)
    inputs, losses, accuracies, sizes = test.inputs.double(), [], [], []
    for owner in owners:
        of_owner = torch.from_numpy(test.ids["client"] == owner)
        with torch.no_grad():
            outputs = model.double().eval()(inputs[of_owner])
        losses.append(F.cross_entropy(outputs, test.targets[of_owner]).item())
        accuracies.append((outputs.argmax(1) == test.targets[of_owner]).double().mean().item())
        sizes.append(int(of_owner.sum()))
    return np.array(losses), np.array(accuracies), sizes


DITTO = {"algorithm": "ditto", "lam": 0.5}
CASES = [({}, {}), ({"engine": "processes", "processes": 2}, DITTO), ({"engine": "batched", "processes": 1}, {})]


@pytest.mark.parametrize(("engine", "local"), CASES, ids=["serial", "processes", "batched"])
def test_the_records_equal_those_of_plain_pytorch(engine, local, tmp_path):
    settings = {**RUN, **engine, "local": {"batch_size": 4, "lr": 0.3, **local}, "checkpoint": {"every": 2}}
    result = fedsim.run(settings, tmp_path / "run")
    train, test = clients(None)
    trained = np.unique(train.ids["client"]).tolist()
    tested = [owner for owner in trained if owner in test.ids["client"]]
    unseen = sorted(set(test.ids["client"].tolist()) - set(trained))
    assert (len(trained), len(tested), unseen) == (8, 7, ["client 8", "client 9"])
    read, metrics, record = Run.read(tmp_path / "run").workers, result.history[-1].metrics, result.history[-1]
    assert result.history[0].worker_accuracy is None
    losses, accuracies, sizes = expected(result.model, tested)
    assert read.workers == [trained.index(owner) for owner in tested]
    assert (read.samples, read.accuracy["global"]) == (sizes, accuracies.tolist())
    assert read.loss["global"] == pytest.approx(losses)
    if local:
        assert {*read.loss} == {"global", "personal", "fine_tuned"}
        models = [result.personal_model(worker) for worker in read.workers]
        each = [expected(model, [owner]) for model, owner in zip(models, tested, strict=True)]
        accuracies = np.concatenate([accuracy for _, accuracy, _ in each])
        assert read.accuracy["personal"] == accuracies.tolist()
        assert read.loss["personal"] == pytest.approx(np.concatenate([loss for loss, *_ in each]))
    assert record.worker_accuracy == pytest.approx(accuracies.mean())
    assert metrics["worker_accuracy_weighted_mean"] == pytest.approx(np.average(accuracies, weights=sizes))
    assert metrics["worker_accuracy_std"] == pytest.approx(accuracies.std())
    assert metrics["worker_accuracy_worst10"] == accuracies.min()
    losses, accuracies, sizes = expected(result.model, unseen)
    assert (read.unseen.workers, read.unseen.samples) == ([8, 9], sizes)
    assert read.unseen.accuracy == {"global": accuracies.tolist()}
    assert read.unseen.loss["global"] == pytest.approx(losses)
    assert metrics["unseen_worker_accuracy_mean"] == pytest.approx(accuracies.mean())
    assert metrics["unseen_worker_accuracy_weighted_mean"] == pytest.approx(np.average(accuracies, weights=sizes))
    assert metrics["unseen_worker_accuracy_std"] == pytest.approx(accuracies.std())
    assert metrics["unseen_worker_accuracy_worst10"] == accuracies.min()
    everybody = expected(result.model, [*tested, *unseen])
    assert record.test_accuracy == pytest.approx(np.average(everybody[1], weights=everybody[2]))


@pytest.mark.filterwarnings("ignore:worker_evaluation has no effect")
def test_training_and_the_global_test_do_not_change():
    own, without = (fedsim.run(RUN, data={"name": RUN["data"], **more}) for more in ({}, {"local_test_fraction": 0.0}))
    assert torch.equal(own.global_row, without.global_row)
    assert own.test_loss == without.test_loss
    assert without.worker_accuracy is None


def test_a_run_that_ends_early_and_one_that_is_resumed_test_them(tmp_path):
    stop = {"metric": "train_loss", "mode": "min", "target": 100.0}
    result = fedsim.run(RUN, tmp_path / "run", stop=stop, worker_evaluation={"every": 10})
    assert len(result.history) == 1
    assert "unseen_worker_accuracy_mean" in result.history[-1].metrics
    assert (tmp_path / "run" / "unseen-00001.csv").is_file()
    whole = fedsim.run(RUN, tmp_path / "whole", checkpoint={"every": 1})
    for file in (*(tmp_path / "whole").glob("*00002*"), *(tmp_path / "whole" / "checkpoints").glob("*00002*")):
        file.unlink()
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "whole" / "metrics.jsonl").write_text(lines[0] + "\n")
    resumed = fedsim.run(RUN, tmp_path / "whole", checkpoint={"every": 1}, resume=True)
    assert resumed.history[-1].metrics == whole.history[-1].metrics
    assert Run.read(tmp_path / "whole").workers.unseen.workers == [8, 9]


def test_only_unseen_clients_are_tested_if_no_other_has_test_samples(tmp_path):
    pair = torch.utils.data.TensorDataset(*samples("10", 0))
    result = fedsim.run({**TINY, "data": [(pair, None), (pair, None), (None, pair)]}, tmp_path / "run")
    assert result.history[-1].worker_accuracy is None
    assert "unseen_worker_accuracy_mean" in result.history[-1].metrics
    assert not any(name.startswith(("worker_", "global_")) for name in result.history[-1].metrics)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.csv")) == ["unseen-00001.csv"]


def test_the_terminal_says_what_was_found_and_names_both_groups(capsys):
    fedsim.run(RUN, progress=True)
    printed = "".join(capsys.readouterr())
    assert (
        "data: 9 clients with their own test samples, 2 of them only for tests; the global test set has all" in printed
    )
    assert "7 workers: global model 0." in printed
    assert "; 2 unseen clients: global model 0." in printed


def settings_that_do_not_test(name):
    return {
        "another partition": {"partition": "iid", "workers": 3},
        "a policy": {"mode": "clock", "policy": "fedasync"},
        "drawn attackers": {"attack": {"name": "sign_flipping", "f": 1, "resample": True}, "worker_evaluation": {}},
        "updates": {"records": {"updates": [2], "curve": False}, "worker_evaluation": {"every": 2}},
    }[name]


@pytest.mark.parametrize("name", ["another partition", "a policy", "drawn attackers", "updates"])
def test_settings_that_cannot_test_workers_run_without_such_tests(name, tmp_path):
    settings = {**RUN, "worker_evaluation": {}, **settings_that_do_not_test(name)}
    experiment = fedsim.Experiment(**settings)
    assert experiment.data.local_test_fraction == 0
    data = {"name": RUN["data"], "local_test_fraction": "own"}
    with pytest.raises(FedsimError, match="local_test_fraction|updates of round"):
        fedsim.run({**settings, "data": data}, tmp_path / "run")


def test_a_fraction_holds_out_training_samples_and_says_so(tmp_path):
    result = fedsim.run(RUN, tmp_path / "run", data={"name": RUN["data"], "local_test_fraction": 0.25})
    assumed = json.loads((tmp_path / "run" / "environment.json").read_text())["assumed"]
    assert any("data.local_test_fraction = 0.25 holds out training samples instead" in line for line in assumed)
    assert "unseen_worker_accuracy_mean" not in result.history[-1].metrics
    assert Run.read(tmp_path / "run").workers.workers == list(range(8))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"partition": "iid", "workers": 2}, r'^data.local_test_fraction = "own": needs .*; use partition=natural$'),
        ({"data": {"name": "tests.components:one_table"}}, None),
        ({"data": {"name": "synthetic", "users": 5}}, None),
    ],
)
def test_own_test_samples_are_refused_without_owners(changes, match):
    changes = {**changes, "data": {**changes.get("data", {"name": RUN["data"]}), "local_test_fraction": "own"}}
    if match is None:
        assert fedsim.run({**RUN, **changes}).worker_accuracy is not None
        return
    with pytest.raises(FedsimError, match=match):
        fedsim.run({**RUN, **changes})


def test_a_test_part_without_owners_is_refused_with_a_remedy():
    train, test = clients(None)
    data = {"name": (train, fedsim.TensorData(test.inputs, test.targets))}
    assert fedsim.Experiment(**{**RUN, "data": data}).data.local_test_fraction == 0
    with pytest.raises(FedsimError, match=r'"own": the test part does not say who .* data.local_test_fraction=0.2 to'):
        fedsim.run({**RUN, "data": {**data, "local_test_fraction": "own"}})


@pytest.mark.parametrize(
    ("names", "explicit", "match"),
    [
        (("train", "other"), True, r'column "split": has the values other, train; it must have train and test'),
        (("test", "test"), False, r'column "split": has the values test; it must have train and test'),
        (("train", "test"), "nothing", r'has no column "nothing"'),
    ],
)
def test_columns_of_parts_that_do_not_fit_are_refused(names, explicit, match, tmp_path):
    pytest.importorskip("pyarrow")
    data, _ = one_file(tmp_path, names)
    column = {} if explicit is False else {"split": "split" if explicit is True else explicit}
    with pytest.raises(FedsimError, match=match) as caught:
        fedsim.run({**TINY, "partition": "natural", "data": {**data, **column}})
    assert "\n" not in str(caught.value)


def test_a_column_of_one_part_leaves_the_test_samples_to_a_draw_and_other_parts_are_named(tmp_path):
    pytest.importorskip("pyarrow")
    data, _ = one_file(tmp_path, ("train", "Train"))
    with pytest.raises(FedsimError, match="Train and train are names of the same part"):
        fedsim.run({**TINY, "partition": "natural", "data": data})
    data, _ = one_file(tmp_path, ("train", "train"))
    train, test = fedsim.load_dataset(**data, split_by="samples")
    assert "no test part: 5 of 26 samples are drawn" in train.assumed[-1]
    assert train.inputs.shape[1] == 2
    text = (tmp_path / "t.csv").read_text().replace("train", "test", 2)
    (tmp_path / "t.csv").write_text(text.replace("train", "val", 3).replace("train", "extra", 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FedsimWarning)
        train, test = fedsim.load_dataset(**data, split="split")
    assert (len(train), len(test)) == (20, 2)
    assert [str(warning.message).split(": ", 2)[-1] for warning in caught] == [
        "val is not used, because test is the test part",
        "parts that are not used: extra",
    ]


def test_a_list_needs_a_worker_that_trains_and_test_parts_or_none_for_all():
    pair = torch.utils.data.TensorDataset(*samples("10", 0))
    with pytest.raises(FedsimError, match="at least one worker must have training samples"):
        fedsim.run({**TINY, "data": [(None, pair), (None, pair)]})
    with pytest.raises(FedsimError, match="some data sets are tables, or have a test part, while others do not"):
        fedsim.run({**TINY, "data": [(pair, pair), pair]})
    empty = torch.utils.data.Subset(pair, [])
    assert fedsim.run({**TINY, "data": [(pair, pair), (pair, empty)]}).worker_accuracy is not None
