"""Stratified random draw of test samples, and warnings about classes without outputs or training samples."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data import ListedShards, hold_out
from fedsim.data.drawn_tests import split_test
from fedsim.data.partitions.allocation import Strata
from fedsim.data.partitions.population import DrawnShards
from fedsim.data.subsets import validation_positions
from fedsim.errors import DataError, FedsimWarning, SettingWarning
from fedsim.runs.setup import begun
from tests.components import one_table


def data_of(targets):
    return fedsim.TensorData(torch.arange(len(targets)).float().unsqueeze(1), torch.as_tensor(targets))


def labels_of_sizes(*sizes):
    """Labels in a random order, sizes[c] of class c."""
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


def stratified(sizes, fraction, most=None):
    """Numbers of samples per class in a part, by definition, one sample after another.

    floor(fraction n_c) samples of each class, then one more in the order of the remainders, until the part has
    round(fraction n) samples. Each class keeps a sample in training, and a part has at most `most` samples.
    """
    shares = [Decimal(str(fraction)) * size for size in sizes]
    counts = [int(share) for share in shares]
    total = round(fraction * sum(sizes)) if most is None else most
    while sum(counts) < total:
        open_ = [c for c in range(len(sizes)) if counts[c] < sizes[c] - 1]
        lowest = min((counts[c] - int(shares[c]) for c in open_), default=None)
        open_ = [c for c in open_ if counts[c] - int(shares[c]) == lowest]  # one round of classes after another
        if not open_:
            break
        counts[max(open_, key=lambda c: (shares[c] - int(shares[c]), -c))] += 1
    return counts


TINY_RUN = {"workers": 2, "rounds": 1, "engine": "serial", "model": {"name": "logistic", "inputs": 1, "classes": 10}}
SIZES = [(50, 50), (199, 1), (3, 90, 7, 1), (10,) * 10, (1, 1, 1, 60), (2, 2, 40), (100, 29, 7), (5, 5, 5, 5)]
FRACTIONS = [0.05, 0.2, 0.25, 0.29, 0.5, 0.9]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_class_has_its_share_of_the_test_samples(sizes, fraction):
    labels = labels_of_sizes(*sizes)
    if round(fraction * sum(sizes)) > sum(sizes) - len(sizes):
        with pytest.raises(DataError, match=f"at least {len(sizes)} training samples must remain, one per class"):
            split_test(data_of(labels), fraction, "data", are_classes=True)
        return
    train, test = split_test(data_of(labels), fraction, "data", are_classes=True)
    assert train.drawn_by == "class"
    assert np.bincount(test.targets, minlength=len(sizes)).tolist() == stratified(sizes, fraction)
    positions = torch.cat([train.inputs, test.inputs]).flatten().sort().values
    assert torch.equal(positions, torch.arange(sum(sizes)).float())
    for part in (train, test):
        assert (part.inputs.flatten().diff() > 0).all()  # in the order of the data set
        assert (part.targets.numpy() == labels[part.inputs.flatten().long().numpy()]).all()


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_class_has_its_share_of_validation_and_local_test_samples(sizes, fraction):
    labels, n = labels_of_sizes(*sizes), sum(sizes)
    kept, held_out = validation_positions(n, fraction, 3, strata=Strata(labels))
    assert np.bincount(labels[held_out], minlength=len(sizes)).tolist() == stratified(sizes, fraction)
    assert sorted([*kept, *held_out]) == list(range(n))
    shards = ListedShards.of_arrays([np.arange(0, n, 3), np.setdiff1d(np.arange(n), np.arange(0, n, 3))])
    for train, test in (hold_out(held, fraction, Strata(labels), seed=1) for held in (shards, on_demand(shards, n))):
        for worker in (0, 1):
            own = labels[shards.of(worker).numpy()]
            most = min(max(1, round(fraction * len(own))), len(own) - 1)
            classes, of_classes = np.unique(own, return_counts=True)
            expected = dict(zip(classes.tolist(), stratified(of_classes.tolist(), fraction, most), strict=True))
            drawn = labels[test.of(worker).numpy()].tolist()
            assert {label: drawn.count(label) for label in classes.tolist()} == expected
            assert (len(drawn), len(own) - len(drawn)) == (test.size(worker), train.size(worker))
            both = torch.cat([train.of(worker), test.of(worker)]).sort().values
            assert torch.equal(both, shards.of(worker).sort().values)


def on_demand(shards, n):
    """The same shards, drawn when they are needed."""

    def strategy(worker):
        return shards.of(worker).numpy()

    return DrawnShards("listed", strategy, ["worker"], len(shards), np.zeros(n), seed=0)


class TestOwners:
    """Samples of one owner are all in one part, by default unless the partition divides by owner."""

    @staticmethod
    def data(seed=0, owners=20, n=200):
        rng = np.random.default_rng(seed)
        patients = rng.integers(0, owners, n)
        inputs = torch.linspace(0, 1, n).unsqueeze(1)
        ids = {"hospital": patients % 4, "patient": np.array([f"p{patient:02}" for patient in patients])}
        return fedsim.TensorData(inputs, torch.as_tensor(rng.integers(0, 3, n)), ids=ids)

    @staticmethod
    def shared(first, second, column="patient"):
        return set(first.ids[column].tolist()) & set(second.ids[column].tolist())

    @pytest.mark.parametrize("stratify", [None, False, True])
    @pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
    @pytest.mark.parametrize("seed", range(3))
    def test_are_on_one_side_and_the_parts_have_nearly_their_sizes(self, seed, fraction, stratify):
        data = self.data(seed)
        train, test = fedsim.load_dataset(data, stratify=stratify, test_fraction=fraction)
        assert not self.shared(train, test)
        assert abs(len(test) - fraction * 200) <= 12  # at most the samples of one owner
        shares = np.bincount(test.targets, minlength=3) / np.bincount(data.targets, minlength=3)
        assert stratify is False or abs(shares - fraction).max() < 0.15
        joint = f'all samples of {len(set(test.ids["patient"]))} of 20 owners in "patient" (data.split_by)'
        assert joint in train.assumed[-1]
        again, _ = fedsim.load_dataset(replace(data, ids={"patient": data.ids["patient"][:]}), test_fraction=fraction)
        renamed = replace(data, ids={"patient": [f"{99 - int(name[1:])}" for name in data.ids["patient"].tolist()]})
        assert torch.equal(again.inputs, fedsim.load_dataset(renamed, test_fraction=fraction)[0].inputs)

    @pytest.mark.parametrize(
        ("arguments", "column"),
        [
            ({}, "patient"),
            ({"partitioned_by": ""}, "patient"),
            ({"partitioned_by": "hospital"}, "patient"),
            ({"partitioned_by": "patient"}, None),
            ({"partitioned_by": "patient", "split_by": "hospital"}, "hospital"),
            ({"split_by": "hospital"}, "hospital"),
            ({"split_by": "samples"}, None),
        ],
    )
    def test_stay_together_in_the_finest_column_that_does_not_make_workers(self, arguments, column):
        train, test = fedsim.load_dataset(self.data(), **arguments)
        assert [name for name in ("hospital", "patient") if not self.shared(train, test, name)] == (
            ["hospital", "patient"] if column == "hospital" else [column] * (column is not None)
        )
        assert ("(data.split_by)" in train.assumed[-1]) is (column is not None)

    @pytest.mark.parametrize(
        ("settings", "together"),
        [
            ({}, True),
            ({"partition": "natural"}, True),
            ({"partition": {"name": "natural", "by": "patient"}}, False),
            ({"data": {"split_by": "samples"}}, False),
        ],
    )
    def test_stay_together_in_all_parts_of_a_run(self, settings, together):
        data = {"name": self.data(), "validation_fraction": 0.2, "local_test_fraction": 0.25}
        tables = {**TINY_RUN, **settings, "data": {**data, **settings.get("data", {})}, "model": "logistic"}
        if "partition" in settings:
            del tables["workers"]
        divided = "owners are both local tests of a worker and training samples of another"
        warned = pytest.warns(FedsimWarning, match=divided) if not settings else contextlib.nullcontext()
        with warned, fedsim.Session() as session, begun(fedsim.Experiment(**tables), session) as (_, engine):
            shared = engine.shared.data
            train, local = (
                [shared.train.take(shards.of(k).numpy()) for k in range(len(shards))]
                for shards in (shared.shards, shared.worker_tests)
            )
        names = self.data().ids["patient"]
        pairs = [(shared.train, shared.test), (shared.train, shared.validation), *zip(train, local, strict=True)]
        owners = [[set(names[(part.inputs[:, 0] * 199).round().long()]) for part in pair] for pair in pairs]
        assert [not first & second for first, second in owners[: None if together else 2]] == (
            [together] * (len(pairs) if together else 2)
        )

    def test_of_one_class_each_are_divided_with_a_line_or_refused(self):
        data = replace(self.data(), ids={"patient": self.data().targets.numpy()})
        train, test = fedsim.load_dataset(data)
        assert self.shared(train, test) == {0, 1, 2}
        assert (
            'and samples of one owner may be separated, because each owner in "patient" has all samples of a class'
            in train.assumed[-1]
        )
        with pytest.raises(DataError, match="no test samples can be drawn, .*; set data.split_by=samples or another"):
            fedsim.load_dataset(data, split_by="patient")

    def test_in_a_column_that_is_not_there_or_without_a_draw_are_refused(self):
        with pytest.raises(
            DataError, match='data.split_by = "patiens": no column with IDs of owners .*; did you mean "patient"'
        ):
            fedsim.load_dataset(self.data(), split_by="patiens")
        settings = {"name": (self.data(), self.data()), "split_by": "patient"}
        with pytest.raises(
            DataError, match='data.split_by = "patient": has no effect, because the data has its own test samples'
        ):
            fedsim.run(data=settings, **{**TINY_RUN, "model": "logistic"})

    def test_in_a_column_of_a_table_need_no_ids(self, tmp_path):
        pytest.importorskip("pyarrow")
        rows = "".join(f"{k / 50},0{k % 9},{k % 2}\n" for k in range(50))
        (tmp_path / "t.csv").write_text(f"x,patient,y\n{rows}")
        train, test = fedsim.load_dataset(tmp_path / "t.csv", split_by="patient")
        assert train.inputs.shape[1] == 1
        assert not self.shared(train, test)
        assert "00" in {*train.ids["patient"], *test.ids["patient"]}


TABLE = {"name": "tests.components:one_table"}


def parts_of_a_run(**data):
    """Class counts of the test, validation, and local test samples, and of the training samples of each worker."""
    settings = {**TABLE, "split_by": "samples", "validation_fraction": 0.2, "local_test_fraction": 0.25, **data}
    with (
        fedsim.Session() as session,
        begun(fedsim.Experiment(**{**TINY_RUN, "model": "logistic", "data": settings}), session) as (_, engine),
    ):
        shared = engine.shared.data
        labels = shared.train.targets.numpy()
        local = [labels[shards.of(k).numpy()] for k in range(2) for shards in (shared.shards, shared.worker_tests)]
        parts = [shared.test.targets.numpy(), shared.validation.targets.numpy(), *local]
    return [np.bincount(part, minlength=3).tolist() for part in parts]


def test_all_parts_of_one_table_are_stratified_by_default():
    sizes = np.bincount(one_table(None).targets).tolist()
    test, validation, *local = parts_of_a_run()
    assert test == stratified(sizes, 0.2)
    left = [size - count for size, count in zip(sizes, test, strict=True)]
    assert validation == stratified(left, 0.2)
    for train, tested in zip(local[::2], local[1::2], strict=True):
        assert tested == stratified([a + b for a, b in zip(train, tested, strict=True)], 0.25)
    assert parts_of_a_run(stratify=True) == [test, validation, *local]
    plain = parts_of_a_run(stratify=False)
    assert [sum(part) for part in plain] == [sum(part) for part in [test, validation, *local]]
    assert plain[0] != test
    assert plain[1] != validation


def test_data_with_a_test_part_is_stratified_only_on_request():
    table = one_table(None)
    parts = {"name": (table, table), "split_by": "samples"}
    default, plain, chosen = (parts_of_a_run(**parts, **more) for more in ({}, {"stratify": False}, {"stratify": True}))
    assert default == plain != chosen
    assert chosen[1] == stratified(np.bincount(table.targets).tolist(), 0.2)


def test_a_list_of_data_sets_is_stratified_by_worker_and_by_class_on_request():
    table = one_table(None)
    workers = [table.take(np.arange(k, 70, 2)) for k in range(2)]
    train, test = fedsim.load_dataset(workers, stratify=True)
    assert train.drawn_by == "class of each worker"
    assert train.assumed[-1].endswith("the same fraction of each class of each worker")
    sizes = [count for worker in workers for count in np.bincount(worker.targets).tolist()]
    strata = test.ids["worker"] * 3 + test.targets.numpy()
    assert np.bincount(strata, minlength=6).tolist() == stratified(sizes, 0.2)
    assert fedsim.load_dataset(workers)[0].drawn_by == "worker"


def test_targets_without_classes_are_not_stratified():
    numbers = fedsim.TensorData(torch.linspace(0, 1, 40).reshape(-1, 1), torch.linspace(0, 1, 40))
    assert fedsim.load_dataset(numbers)[0].drawn_by == ""
    remedy = r"needs one class label per sample, but the targets are float32 \[40\]; omit it$"
    with pytest.raises(DataError, match=f"data.stratify = true: {remedy}"):
        fedsim.load_dataset(numbers, stratify=True)
    settings = {"name": (numbers, numbers), "stratify": True, "validation_fraction": 0.2}
    with pytest.raises(DataError, match=f"data.stratify = true: {remedy}"):
        fedsim.run(data=settings, workers=2, rounds=1, engine="serial")


def test_classes_of_one_sample_cannot_be_held_out():
    with pytest.raises(fedsim.ExperimentError, match="holds out no sample, because .* or each class has one sample; "):
        validation_positions(5, 0.4, 0, strata=Strata(np.arange(5)))


def test_samples_of_a_class_are_drawn_at_random():
    _, test = split_test(data_of(labels_of_sizes(100, 100)), 0.5, "data", are_classes=True)
    drawn = test.inputs.flatten().numpy()
    assert 80 < drawn.mean() < 120
    assert 30 < np.sum(drawn < 100) < 70


def test_targets_that_are_not_classes_are_drawn_without_strata():
    """Measured values, and integers of more values than test samples, are drawn by one permutation of all samples."""
    for targets in (torch.arange(40.0), torch.arange(40)):
        order = fedsim.core.randomness.numpy_generator(0, "test_split").permutation(40)
        _, test = split_test(data_of(targets), 0.2, "data")
        assert test.inputs.flatten().tolist() == sorted(order[:8].tolist())


def test_a_draw_that_leaves_a_class_without_training_samples_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.csv").write_text("x,y\n0.5,a\n1,b\n2,c\n3,d\n4,a\n")
    assert len(fedsim.load_dataset("csv", path=str(tmp_path / "t.csv"))[1]) == 1
    remedy = "use a smaller data.test_fraction, or give a separate test part$"
    with pytest.raises(DataError, match=f"t.csv: 2 of 5 samples would be drawn for tests, .*; {remedy}") as caught:
        fedsim.load_dataset("csv", path=str(tmp_path / "t.csv"), test_fraction=0.4)
    assert "\n" not in str(caught.value)


def test_outputs_that_no_class_uses_are_named_in_one_line():
    data = data_of(np.arange(15) % 3)
    with pytest.warns(SettingWarning) as caught:
        fedsim.run(data=(data, data), **TINY_RUN)
    [line] = [str(warning.message) for warning in caught]
    assert "7 of the model's 10 outputs, such as number 3, belong to classes without samples" in line
    assert "\n" not in line
    with pytest.warns(SettingWarning, match="1 of the model's 3 outputs, such as number 1,"):
        fedsim.run(data=(data_of([0, 2] * 5),) * 2, **{**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}})


def test_test_classes_without_training_samples_are_named_in_one_line():
    train, test = data_of([0, 1] * 5), data_of([0, 1, 2])
    with pytest.warns(SettingWarning, match="class 2 occurs in the test set, but not in the training samples"):
        fedsim.run(data=(train, test), **{**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}})


def test_classes_that_are_held_out_entirely_are_named_in_one_line():
    """One sample has class 2. It is held out for validation, or as a local test, for some seeds."""
    data, tables = data_of([0, 1] * 8 + [2]), {**TINY_RUN, "model": {**TINY_RUN["model"], "classes": 3}}
    for setting, test_set in (("validation_fraction", "the validation set"), ("local_test_fraction", "the local test")):
        held_out = []
        for seed in range(5):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SettingWarning)
                result = fedsim.run(data={"name": (data, data), setting: 0.3}, seed=seed, **tables)
            lines = [str(warning.message) for warning in caught if issubclass(warning.category, SettingWarning)]
            assert result.history
            assert len(lines) <= 1
            held_out += lines
        assert 0 < len(held_out) < 5
        assert all(f"data.{setting} = 0.3: class 2 occurs in {test_set}" in line for line in held_out)
