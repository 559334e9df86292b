"""Data sets that are Python objects: what users bring works as it is, or is refused in one line."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import fedsim
from fedsim.data.drawn_tests import drawn_rows
from fedsim.data.encoding import DataTable, train_and_test
from fedsim.errors import DataError, FedsimError, FedsimWarning, SettingWarning
from tests.data.loading import load, refused

RNG = np.random.default_rng(0)
INPUTS, LABELS = RNG.normal(size=(60, 2)).astype(np.float32), np.arange(60) % 3
PAIRS = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
QUARTERS = [Subset(PAIRS, range(15 * k, 15 * k + 15)) for k in range(4)]
HALVES = (INPUTS[:36], LABELS[:36]), (INPUTS[36:], LABELS[36:])  # data sets of two workers
COLUMNS = {"a": INPUTS[:, 0], "b": INPUTS[:, 1], "client": [f"c{k % 5}" for k in range(60)], "label": LABELS}
TINY_RUN = {"rounds": 1, "engine": "serial", "model": {"name": "logistic", "inputs": 2, "classes": 3}}


class Samples(Dataset):
    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index], int(LABELS[index])


def rows_of(*parts):
    """All inputs of the data sets, in sorted order."""
    return np.array(sorted(torch.cat([part.inputs for part in parts]).tolist()))


@pytest.mark.parametrize(
    "data",
    [
        PAIRS,
        Samples(),
        ConcatDataset(QUARTERS),
        (INPUTS, LABELS),
        (torch.from_numpy(INPUTS), torch.from_numpy(LABELS)),
        fedsim.TensorData(torch.from_numpy(INPUTS), torch.from_numpy(LABELS)),
        lambda root: PAIRS,
    ],
    ids=["TensorDataset", "map-style", "ConcatDataset", "arrays", "tensors", "TensorData", "function"],
)
def test_test_samples_are_drawn_from_a_single_data_set(data):
    result = fedsim.run(data=data, workers=2, **TINY_RUN)
    assert sum(result.history[0].samples) == 48
    train, test = load(data)
    assert np.array_equal(rows_of(train, test), np.array(sorted(INPUTS.tolist())))
    assert np.bincount(test.targets).tolist() == [4, 4, 4]
    drawn = "12 of 60 samples are drawn at random for tests, the same fraction of each class"
    assert train.assumed == (f"no test part: {drawn}",)
    assert callable(data) or len(load(data, test_fraction=0.5)[1]) == 30


@pytest.mark.parametrize("form", [tuple, lambda parts: dict(zip(("Train", "val"), parts, strict=True))])
def test_parts_are_a_tuple_or_a_dict(form):
    parts = random_split(PAIRS, [45, 15])
    experiment = fedsim.Experiment(data=form(parts), **TINY_RUN)
    train, test = load(experiment.data.name)
    assert np.array_equal(train.inputs, INPUTS[parts[0].indices])
    assert np.array_equal(test.inputs, INPUTS[parts[1].indices])
    assert train.assumed == ()


class TestOneDataSetPerWorker:
    def test_the_list_is_the_partition(self):
        result = fedsim.run(data=QUARTERS, **TINY_RUN)
        assert (result.experiment.workers, result.experiment.partition.name) == (4, "natural")
        assert list(result.history[0].samples) == [12] * 4
        train, test = load(QUARTERS)
        assert np.array_equal(rows_of(train, test), np.array(sorted(INPUTS.tolist())))
        for worker in range(4):
            inputs = train.inputs[train.ids["worker"] == worker].tolist()
            assert all(row in INPUTS[15 * worker : 15 * worker + 15].tolist() for row in inputs)

    def test_each_may_have_a_test_part(self):
        parts = [tuple(random_split(quarter, [10, 5])) for quarter in QUARTERS]
        train, test = load(parts)
        assert (len(train), len(test)) == (40, 20)
        assert fedsim.Experiment(data=parts).workers == 4

    @pytest.mark.parametrize(
        ("data", "names", "held"),
        [
            ([HALVES[0], HALVES[1]], (), 0),
            ({"B": HALVES[0], "a": HALVES[1]}, ("B", "a"), 0),
            ({"train": {"B": HALVES[0], "a": HALVES[1]}, "test": PAIRS}, ("B", "a"), 60),
            ((list(HALVES), (INPUTS[:7], LABELS[:7])), (), 7),
            ({"B": (HALVES[0], HALVES[1]), "a": (HALVES[1], None)}, ("B", "a"), 24),
            (({"B": HALVES[0], "a": HALVES[1]}, {"new": PAIRS, "a": HALVES[0]}), ("B", "a", "new"), 96),
            (([(HALVES[0], HALVES[1]), (HALVES[1], HALVES[0])], QUARTERS[0]), (), 15),
        ],
        ids=["pairs", "dict", "one test part", "list and test", "parts of each", "two dicts", "own and common tests"],
    )
    def test_forms(self, data, names, held):
        result = fedsim.run(data=data, **TINY_RUN)
        train, test = load(fedsim.Experiment(data=data).data.name)
        assert result.experiment.partition.name == "natural"
        drawn = [9, 5] if not held else [0, 0]
        assert result.history[0].samples == [36 - drawn[0] + 2 * (not held), 24 - drawn[1]]
        assert (train.worker_names, len(test) if held != 15 else 15) == (names, held or 12)
        first = train.inputs[train.ids["worker"] == 0].tolist()
        assert all(row in HALVES[0][0].tolist() for row in first)

    def test_another_partition_may_be_set(self):
        experiment = fedsim.Experiment(data=QUARTERS, partition="iid", workers=3)
        assert (experiment.workers, experiment.partition.name) == (3, "iid")

    def test_experiments_with_the_same_list_have_the_same_name(self):
        assert fedsim.Experiment(data=QUARTERS).data.name == fedsim.Experiment(data=list(QUARTERS)).data.name

    @pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 30, 5), (100, 1, 1)])
    @pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4])
    def test_each_worker_keeps_training_samples(self, sizes, fraction):
        workers = np.repeat(np.arange(len(sizes)), sizes)
        train, test, *_ = drawn_rows(workers, fraction, "data", workers=workers)
        assert set(workers[train]) == set(range(len(sizes)))
        assert len(test) == round(fraction * sum(sizes))
        assert sorted([*train, *test]) == list(range(len(workers)))

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            ([PAIRS, Subset(PAIRS, [])], "the training data of worker 1: has no samples"),
            (
                [PAIRS, TensorDataset(torch.zeros(3, 5), torch.zeros(3).long())],
                r"worker 1: its inputs, .*3, 5.*, differ from those of .* of worker 0, .*60, 2",
            ),
            ([(PAIRS, PAIRS), PAIRS], "some data sets are tables, or have a test part, while others do not"),
            (
                [Subset(PAIRS, [k]) for k in range(9)],
                "at least 9 training samples must remain, one per worker; .* separate test part",
            ),
        ],
    )
    def test_lists_that_do_not_fit(self, data, match):
        refused(data, match)

    @pytest.mark.parametrize(
        ("columns", "match"),
        [
            ({"worker": LABELS}, '^worker 0: has a column "worker", but each table is a worker; rename it$'),
            (
                {"b": None},
                '^worker 1: has other columns than worker 0, such as "b"; all tables must have the same columns$',
            ),
        ],
    )
    def test_columns_of_lists_that_do_not_fit(self, columns, match):
        tables = [{**COLUMNS, **columns}, COLUMNS]
        tables = [{name: values for name, values in table.items() if values is not None} for table in tables]
        with pytest.raises(FedsimError, match=match):
            train_and_test([DataTable(table, f"worker {w}") for w, table in enumerate(tables)], [], of_workers="list")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (DataLoader(PAIRS), r"the DataLoader object is not a map-style .* pass data=\(train.dataset, test.dataset\)"),
        (
            (PAIRS for _ in range(2)),
            r"data: must be a name, .* tuple \(train, test\) of them, or one of these for each",
        ),
        (torch.zeros(3, 2), r"data: must be a name, .* a tuple \(inputs, targets\)"),
        ([INPUTS, LABELS], r"one of these for each worker: a list such as \[\(inputs_1, targets_1"),
        (([INPUTS, INPUTS[:9]], [LABELS, LABELS[:9]]), r"list of targets; .* pass data=list\(zip\(inputs, targets\)\)"),
        ({1: PAIRS, "1": PAIRS}, 'two workers are called "1"; give each worker another name'),
        (([PAIRS, PAIRS], {"A": PAIRS}), "2 training parts and 1 test part of workers; pass two lists of equal length"),
        ([(torch.zeros(2), 1), (torch.ones(2), 0)], "data: must be a name, "),
        ((INPUTS, LABELS, INPUTS, LABELS), "data: must be a name, "),
        (
            ConcatDataset([[(row, "cat") for row in INPUTS]]),
            r"target of sample 0 is a str; .* numpy.unique\(targets, return_inverse=True",
        ),
        ((INPUTS, np.array(["cat", 3] * 30, object)), "the training data: targets: must contain only text, or only"),
        (((INPUTS, np.array(["a"] * 60)), PAIRS), "targets are text in some data sets only; pass each data set"),
        ((INPUTS, LABELS[:5]), "there are 60 inputs, but 5 targets"),
        (
            (np.where(INPUTS > 2, np.nan, INPUTS), LABELS),
            r"the training data: sample \d+ has NaN or infinity as input; replace it",
        ),
        (lambda root: None, "there is no training data; pass a tuple"),
        ({"test": PAIRS}, "has the parts test; one of them must be called train"),
        (TensorDataset(torch.zeros(3, 2)), r"sample 0 is a tuple; each sample must be a pair \(input, target\)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_other_objects_are_refused_in_one_line(data, match):
    refused(data, match, error=FedsimError)


def test_parts_of_samples_that_are_not_used_are_named():
    data = TensorDataset(*PAIRS.tensors, torch.arange(60))
    train, _ = load(data, "a sample with two inputs is ((a, b), target)")
    assert train.inputs.shape == (48, 2)


KINDS = "images", "labels"
LAST, FIRST = (6, 9, 8, 3), (6, 3, 9, 8)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(
    ("shape", "expected", "given"),
    [
        *((shape, FIRST, None) for shape in (LAST, FIRST)),
        *(((6, 32, 32, count), (6, count, 32, 32), None) for count in (1, 2, 4)),
        ((6, 9, 8, 10), (6, 10, 9, 8), "last"),
        ((6, 9, 8, 7), (6, 9, 8, 7), "first"),
        ((6, 3, 8, 2), (6, 2, 3, 8), "last"),
        ((6, 3, 8, 2), (6, 3, 8, 2), "first"),
        *((shape, shape, None) for shape in ((6, 10, 28, 28), (6, 9, 9, 9), (6, 1, 28, 28))),
        ((6, 5, 4), (6, 5, 4), None),
    ],
)
def test_images_in_arrays_become_channels_first(tmp_path, dtype, shape, expected, given):
    pixels, labels = RNG.integers(0, 256, shape).astype(dtype), np.arange(6) % 2
    moved = given == "last" or (given is None and shape[-1] < 5 <= shape[1] and len(shape) == 4)
    transposed = (pixels.transpose(0, 3, 1, 2) if moved else pixels) / (255 if dtype == "uint8" else 1)
    if dtype == "uint8" and len(shape) == 3:  # images without channels
        expected, transposed = (6, 1, 5, 4), transposed[:, None]
    np.savez(tmp_path / "k.npz", x_train=pixels, y_train=labels, x_test=pixels[:2], y_test=labels[:2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"channels": given} if given else {}
        for data in (str(tmp_path / "k.npz"), ((pixels, labels), (pixels[:2], labels[:2]))):
            train, test = fedsim.load_dataset(data, **options)
            assert (tuple(train.inputs.shape), tuple(test.inputs.shape)) == (expected, (2, *expected[1:]))
            assert np.allclose(train.gather(torch.arange(6))[0], transposed)
    lines = {str(warning.message) for warning in caught if "channels" in str(warning.message)}
    change = f"inputs of shape {list(shape[1:])} are taken for images with channels last, and become {[*expected[1:]]}"
    assert lines == ({f'{change}; data.channels = "last" confirms this'} if moved and given is None else set())


@pytest.mark.parametrize("shape", [(6, 32, 32, 10), (6, 3, 8, 2), (6, 1, 28, 1), (6, 32, 2, 3)])
def test_arrays_whose_channels_may_be_first_or_last_are_questions(shape):
    pixels, labels = np.zeros(shape, np.float32), np.arange(6) % 2
    question = 'channels? last; set data.channels to "first" or "last"$'
    refused(((pixels, labels), (pixels, labels)), question)
    assert load(([(pixel, 0) for pixel in pixels], (pixels, labels)), channels="first")[0].inputs.shape == shape
    refused((INPUTS, LABELS), 'data.channels = "last": is not used, because the data set has no', channels="last")


NO_VALUES = r"the inputs of the training set have the shape \[48, .*0.*\], so samples have no values; every dimension"


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(
    ("inputs", "targets", "match"),
    [
        (
            INPUTS,
            np.where(LABELS == 0, -1, LABELS),
            r"training set contains the label -1; class labels must be at least",
        ),
        (INPUTS, LABELS * 0 - 2, r"the training set contains the label -2; class labels must be at least 0"),
        (INPUTS, np.full(60, 2**63, np.uint64), "training data: the targets go up to 9223372036854775808, which int64"),
        (INPUTS, LABELS.astype(complex), "the training data: the target of sample 0 is a complex128"),
        (INPUTS, np.where(LABELS == 0, np.nan, 1), "the training set has targets that are NaN or infinite"),
        (INPUTS, np.zeros((60, 0)), "the targets of the training set have the shape"),
        (np.full((60, 2), 2**63, np.uint64), LABELS, "the training data: the inputs go up to 9223372036854775808"),
        (np.zeros((60, 0)), LABELS, NO_VALUES),
        (np.zeros((60, 0), int), LABELS, NO_VALUES),
        (np.zeros((60, 28, 0), np.uint8), LABELS, NO_VALUES),
        (np.zeros((60, 1, 0, 28), np.float32), LABELS, NO_VALUES),
        (np.full((60, 2), 1e300), LABELS, "the training data: sample 0 has NaN or infinity as input"),
        (
            np.ma.masked_less(INPUTS, 0),
            LABELS,
            "the training data: the inputs or targets have masked values; fill them in",
        ),
        (np.zeros(60, [("a", "f4")]), LABELS, "the training data: an array of inputs is a"),
        (np.arange(120).reshape(60, 2) - 9, LABELS, "integer inputs are treated as tokens, which must be at least 0"),
    ],
)
def test_values_that_cannot_be_samples_are_a_line_about_the_data(inputs, targets, match, engine):
    small = {"rounds": 1, "workers": 2, "model": {"name": "char_lstm"} if "tokens" in match else "logistic"}
    with pytest.raises(DataError, match=match) as caught:
        fedsim.run(small, data=(inputs, targets), engine=engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (INPUTS.astype(">f8"), LABELS.astype(">i4")),
        (INPUTS.astype(np.longdouble), LABELS.astype(np.uint64)),
        (INPUTS.astype(object), LABELS.astype(object)),
    ],
)
def test_other_types_of_numbers_are_converted(inputs, targets):
    train, test = load((inputs, targets))
    expected = load((INPUTS, LABELS))
    assert torch.equal(torch.cat([train.inputs, test.inputs]).float(), torch.cat([part.inputs for part in expected]))
    assert torch.equal(torch.cat([train.targets, test.targets]), torch.cat([part.targets for part in expected]))
    assert load((INPUTS > 0, LABELS))[0].inputs.unique().tolist() == [0.0, 1.0]


def test_a_single_class_is_a_warning():
    with pytest.warns(SettingWarning, match="all training samples have the label 0, so no class can be learned"):
        fedsim.run(data=(INPUTS, LABELS * 0), workers=2, **TINY_RUN)


def test_names_of_classes_in_arrays_are_numbered_in_sorted_order(tmp_path):
    names = np.array(["owl", "cat", "owl", "dog", "cat", "dog"])
    np.savez(tmp_path / "a.npz", x=INPUTS[:6], y=names, x_test=INPUTS[:2], y_test=names[:2])
    train, test = load(str(tmp_path / "a.npz"))
    assert (train.targets.tolist(), test.targets.tolist()) == ([2, 0, 2, 1, 0, 1], [2, 0])
    np.savez(tmp_path / "a.npz", x=INPUTS[:6], y=names, x_test=INPUTS[:2], y_test=np.array(["owl", "cow"]))
    refused(str(tmp_path / "a.npz"), 'test_targets: the class "cow" has no training samples')
    for kind in (str, object):
        train, test = load(((INPUTS[:6], names[:, None].astype(kind)), (INPUTS[:2], names[:2])))
        assert (train.targets.tolist(), test.targets.tolist()) == ([2, 0, 2, 1, 0, 1], [2, 0])
        train, test = load(
            [((INPUTS[:3], names[:3].astype(kind)), None), ((INPUTS[3:6], names[3:]), (INPUTS[:6], names))]
        )
        assert (train.targets.tolist(), test.targets.tolist()) == ([2, 0, 2, 1, 0, 1], [2, 0, 2, 1, 0, 1])
    refused(((INPUTS[:6], names), (INPUTS[:2], np.array(["owl", "cow"]))), 'targets: the class "cow" has no training')


def test_validation_samples_are_test_samples_if_there_are_no_others(tmp_path):
    images, labels = RNG.integers(0, 256, (8, 28, 28)).astype(np.uint8), np.arange(8, dtype=np.uint8)[:, None] % 2
    parts = {
        f"{part}_{kind}": array
        for part in ("train", "val")
        for kind, array in zip(KINDS, (images, labels), strict=True)
    }
    np.savez(tmp_path / "m.npz", **parts)
    train, test = load(str(tmp_path / "m.npz"))
    assert (len(train), len(test), train.targets.shape) == (8, 8, (8,))
    np.savez(tmp_path / "m.npz", **parts, test_images=images[:3], test_labels=labels[:3])
    assert (
        len(load(str(tmp_path / "m.npz"), "val_images and val_labels are not used, because the file has test")[1]) == 3
    )


class TestTables:
    @pytest.fixture(params=["pandas", "datasets"])
    def table(self, request):
        """Return a function that makes a table of columns: a data frame or a Hugging Face data set."""
        package = pytest.importorskip(request.param)
        return package.DataFrame if request.param == "pandas" else package.Dataset.from_dict

    def test_columns_have_roles(self, table):
        options = {"ids": "client", "inputs": ["b", "a"], "target": "label", "test_fraction": 0.25}
        result = fedsim.run(data={"name": table(COLUMNS), **options}, partition="natural", **TINY_RUN)
        assert result.experiment.workers == 5
        options["split_by"] = "samples"
        train, test = load(table(COLUMNS), **options)
        assert np.array_equal(rows_of(train, test), np.array(sorted(INPUTS[:, ::-1].tolist())))
        assert set(train.ids["client"]) == {f"c{k}" for k in range(5)}
        scaled, _ = load(table(COLUMNS), **options, standardize=True)
        raw = train.inputs.double().numpy()
        assert np.allclose(scaled.inputs, (raw - raw.mean(0)) / raw.std(0), atol=1e-5)

    def test_an_option_belongs_to_the_object(self, table):
        refused((table(COLUMNS),) * 2, "data.test_fraction = 0.1: unknown key", error=FedsimError, test_fraction=0.1)
        refused(PAIRS, 'data.ids = "client": unknown key', error=FedsimError, ids="client")

    def test_one_table_per_worker(self, table):
        columns = {name: values[:20] for name, values in COLUMNS.items() if name != "client"}
        data = [table(columns), table({name: values[:10] for name, values in columns.items()})]
        experiment = fedsim.Experiment(data=data, **TINY_RUN)
        train, test = load(experiment.data.name, **experiment.data.params)
        assert experiment.workers == 2
        assert np.bincount(train.ids["worker"]).tolist() == [16, 8]
        assert (train.inputs.shape, len(test)) == ((24, 2), 6)
        bad = table({**columns, "a": [*INPUTS[:19, 0], float("nan")]})
        refused([data[0], bad], 'the training data of worker 1: column "a": contains NaN or no value in row 19')
        other = table({"a": INPUTS[:, 0], "label": LABELS})
        refused([data[0], other], 'data of worker 1: has other columns than the training data of worker 0, such as "b"')

    def test_text_of_one_worker_may_look_like_numbers(self, table):
        workers = [table({**COLUMNS, "zip": [text] * 60}) for text in ("01", "K1", "K2")]
        train, _ = load(workers, ids="client")
        assert train.inputs[:, 2:].unique(dim=0).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]

    def test_the_test_part_may_lack_the_owners(self, table):
        tests = table({name: values for name, values in COLUMNS.items() if name != "client"})
        train, test = load((table(COLUMNS), tests), ids="client")
        assert (list(train.ids), list(test.ids), test.inputs.shape) == (["client"], [], (60, 2))

    def test_owners_whose_samples_are_all_drawn_for_tests_are_counted(self, table):
        columns = {**COLUMNS, "client": [f"c{k // 2}" for k in range(60)]}
        train, test = load(table(columns), ids="client", test_fraction=0.4)
        lost = len(set(test.ids["client"]) - set(train.ids["client"]))
        assert train.assumed[-1].endswith(f', and all samples of {lost} of 30 owners in "client" (data.split_by)')

    def test_missing_owners_name_the_setting(self, table):
        columns = {name: values for name, values in COLUMNS.items() if name != "client"}
        with pytest.raises(FedsimError, match="set data.ids to a column of owners, if the data set is a table"):
            fedsim.Experiment(data=table(columns), partition="natural")


def test_a_dict_of_splits_is_a_data_set():
    datasets = pytest.importorskip("datasets")
    splits = datasets.Dataset.from_dict(COLUMNS).train_test_split(0.25, seed=0)
    for data in (splits, {"name": splits, "ids": "client"}):
        experiment = fedsim.Experiment(data=data, **TINY_RUN)
        train, test = load(experiment.data.name, **experiment.data.params)
        assert (len(train), len(test)) == (45, 15)
    assert list(train.ids) == ["client"]
    splits["unsupervised"] = splits["train"]
    with pytest.warns(fedsim.errors.FedsimWarning, match="parts that are not used: unsupervised"):
        fedsim.load_dataset(splits)


def test_numbers_of_classes_with_other_names_are_refused():
    datasets = pytest.importorskip("datasets")

    def table(*names):
        features = datasets.Features({"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=list(names))})
        return datasets.Dataset.from_dict({"a": INPUTS[:, 0], "label": LABELS}, features=features)

    first, other = table("ant", "bee", "cow"), table("bee", "ant", "cow")
    match = 'column "label": its classes are bee, ant, cow, but those of the training data'
    for data in ((first, other), {"train": first, "test": other}, [first, other]):
        refused(data, match)
    assert len(load((first, first))[1]) == 60


def test_a_named_index_is_an_owner_or_is_not_used():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS).assign(patient=[k // 10 for k in range(60)]).set_index("patient")
    train, _ = load(frame[["a", "b", "label"]])
    assert (list(train.ids), train.inputs.shape) == (["patient"], (50, 2))  # 5 of 6 patients
    train, _ = load(frame, ids="client", split_by="samples")
    assert (list(train.ids), train.inputs.shape) == (["client"], (48, 2))


def test_integer_inputs_are_said_to_be_tokens():
    train, _ = load((LABELS[:, None], LABELS))
    assert train.assumed[0] == "integer inputs are treated as tokens (convert measured numbers to floating point)"


def test_large_inputs_and_targets_are_named(tmp_path):
    prices = INPUTS[:, 0] * 1000 + 300
    line = "the training data: the {} have values from .*, for which SGD often diverges; scale them to mean 0"
    for data, kind in (((INPUTS * 255, LABELS), "inputs"), ((INPUTS, prices), "targets")):
        with pytest.warns(FedsimWarning, match=line.format(kind)):
            fedsim.load_dataset(data)
    np.savez(tmp_path / "a.npz", inputs=INPUTS, targets=prices)
    with pytest.warns(FedsimWarning, match="a.npz: the targets have values from"):
        fedsim.load_dataset("npz", path=str(tmp_path / "a.npz"))
    load(fedsim.TensorData(torch.from_numpy(INPUTS * 255), torch.from_numpy(LABELS), scale=1 / 255))


def test_a_data_frame_and_a_column_of_targets_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(INPUTS, columns=["a", "b"])
    refused((frame, pandas.Series(LABELS)), r"and join inputs and targets in one table, such as inputs.assign\(target=")
