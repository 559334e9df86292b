"""Data sets whose samples have several inputs, from all sources, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fedsim
from fedsim.data import CustomSubset, as_tensor_data
from fedsim.data.digests import digest
from fedsim.data.subsets import split_validation
from fedsim.errors import DataError, ExperimentError
from tests.several_inputs import NAMES, TRAIN, Joint, samples

N = 12
IDS = torch.arange(N * 4).reshape(N, 4) % 7
MASK = (torch.arange(4) < 1 + torch.arange(N)[:, None] % 4).long()
TARGETS = torch.arange(N) % 3
BY_NAME = {"input_ids": IDS, "attention_mask": MASK}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("by_position", [False, True])
def test_each_input_is_gathered_split_and_moved(by_position):
    data = samples(None, by_position=by_position)[0]
    inputs, targets = data.gather(torch.tensor([5, 3]))
    image, table, words = inputs if by_position else (inputs[name] for name in NAMES)
    raw = data.inputs if by_position else [data.inputs[name] for name in NAMES]
    assert torch.allclose(image, raw[0][[5, 3]] / 255)  # only integers from 0 to 255 are scaled
    assert torch.equal(table, raw[1][[5, 3]])
    assert torch.equal(words, raw[2][[5, 3]])
    assert (words.dtype, targets.tolist()) == (torch.int64, data.targets[[5, 3]].tolist())
    moved = data.to(torch.device("meta"), torch.float64)
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"meta"}
    assert [tensor.dtype for tensor in moved.tensors.values()] == [tensor.dtype for tensor in data.tensors.values()]
    remaining, held_out, _ = split_validation(data, 0.25, seed=0)
    assert (len(remaining), len(held_out)) == (TRAIN * 3 // 4, TRAIN // 4)


@pytest.mark.parametrize("names", [("image", "flags"), ("flags", "image")])
def test_integers_up_to_255_are_scaled_in_inputs_of_any_dimensions(names):
    pixels = {"image": torch.arange(N * 60).reshape(N, 3, 4, 5) % 256, "flags": torch.arange(N * 3).reshape(N, 3)}
    data = as_tensor_data(({name: pixels[name].to(torch.uint8) for name in names}, TARGETS))
    assert data.assumed == ("uint8 inputs are divided by 255",)
    inputs, _ = data.gather(torch.arange(N))
    assert all(torch.allclose(inputs[name], pixels[name] / 255) for name in names)
    per_channel = fedsim.TensorData(data.inputs, TARGETS, scale=(1.0, 2.0, 3.0), shift=(0.0, 1.0, 0.0))
    inputs, _ = per_channel.gather(torch.arange(N))
    for name in names:
        assert torch.equal(inputs[name][:, 1], pixels[name][:, 1] * 2.0 + 1)
    assert [values.shape for values in per_channel.normalisation] == [(3, 1, 1)] * 2


def test_batches_of_a_subset_and_of_a_loader_are_equal():
    data = as_tensor_data((BY_NAME, TARGETS))
    subset = CustomSubset(data, [7, 2, 9])
    (first, targets), (last, _) = subset.batches(2)
    assert equal(first, {name: tensor[[7, 2]] for name, tensor in BY_NAME.items()})
    assert last["input_ids"].tolist() == IDS[[9]].tolist()
    loaded, labels = next(iter(DataLoader(subset, 2)))
    assert equal(loaded, first)
    assert torch.equal(labels, targets)


ROWS = [(*rows, label) for *rows, label in zip(IDS, MASK, TARGETS.tolist(), strict=True)]
FORMS = {
    "arrays": ({name: tensor.numpy() for name, tensor in BY_NAME.items()}, TARGETS.numpy()),
    "pairs": [({"input_ids": ids, "attention_mask": mask}, label) for ids, mask, label in ROWS],
    "samples of a collator": [{"input_ids": ids, "attention_mask": mask, "labels": y} for ids, mask, y in ROWS],
    "lists": [{"input_ids": i.tolist(), "attention_mask": m.tolist(), "label": y} for i, m, y in ROWS],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_python_objects(form):
    for data in (as_tensor_data(form), fedsim.load_dataset((form, form))[1]):
        assert equal(data.inputs, BY_NAME)
        assert torch.equal(data.targets, TARGETS)


def test_tuples_of_python():
    for form in (((IDS, MASK), TARGETS), [((ids, mask), label) for ids, mask, label in ROWS]):
        train, test = fedsim.load_dataset((form, form))
        assert [*map(torch.equal, train.inputs, (IDS, MASK))] == [True, True]
        assert [*map(torch.equal, test.inputs, (IDS, MASK))] == [True, True]
    assert sum(map(len, fedsim.load_dataset(((IDS, MASK), TARGETS)))) == N


def test_one_data_set_per_worker():
    parts = [
        ({name: tensor[part] for name, tensor in BY_NAME.items()}, TARGETS[part]) for part in (slice(5), slice(5, N))
    ]
    train, _ = fedsim.load_dataset((parts, (BY_NAME, TARGETS)))
    assert equal(train.inputs, BY_NAME)
    assert train.ids["worker"].tolist() == [0] * 5 + [1] * 7
    (first, labels), second = parts
    with pytest.raises(DataError, match="worker 1: its inputs, inputs.input_ids int64.*, differ from those of"):
        fedsim.load_dataset(([(first, labels), ({"input_ids": second[0]["input_ids"]}, second[1])], None))


@pytest.mark.parametrize("by_position", [False, True])
def test_files_of_arrays(tmp_path, by_position):
    names = range(2) if by_position else BY_NAME
    arrays = dict(zip(names, BY_NAME.values(), strict=True))
    files = {f"{role}.{name}": tensor.numpy() for role in ("inputs", "test_inputs") for name, tensor in arrays.items()}
    np.savez(tmp_path / "a.npz", **files, targets=TARGETS, test_targets=TARGETS, user=TARGETS)
    for part in fedsim.load_dataset(str(tmp_path / "a.npz")):
        assert equal(dict(enumerate(part.inputs)) if by_position else part.inputs, arrays)
    np.savez(tmp_path / "b.npz", **files, inputs=IDS, targets=TARGETS)
    with pytest.raises(DataError, match=r"has an array inputs and an array inputs\..*; keep only one"):
        fedsim.load_dataset(str(tmp_path / "b.npz"))
    np.savez(
        tmp_path / "c.npz",
        **files | {f"inputs.{next(iter(names))}": np.full((N, 4), np.nan)},
        targets=TARGETS,
        test_targets=TARGETS,
    )
    with pytest.raises(DataError, match=r"inputs\.(0|input_ids): contains NaN"):
        fedsim.load_dataset(str(tmp_path / "c.npz"))
    np.savez(tmp_path / "d.npz", **{"inputs.0": IDS, "inputs.2": MASK}, targets=TARGETS)
    with pytest.raises(DataError, match=r"the arrays inputs\.NUMBER have the numbers 0, 2; count from 0"):
        fedsim.load_dataset(str(tmp_path / "d.npz"))


def test_columns_of_tables(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": np.arange(N) / N, "sex": [*"mf"] * 6, "ids": list(IDS.numpy()), "label": TARGETS})
    several = {"table": ["age", "sex"], "words": "ids"}
    train, _ = fedsim.load_dataset((frame, frame), inputs=several)
    assert train.inputs["words"].tolist() == IDS.tolist()
    assert train.inputs["table"].shape == (N, 3)  # text is one-hot encoded
    assert train.assumed[0] == "target label, inputs table = age, sex (one-hot, 2 texts), words = ids"
    frame.to_parquet(tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    assert fedsim.load_dataset(path, inputs=several)[0].inputs.keys() == several.keys()
    for settings in (
        ['data.inputs={table=["age","sex"],words="ids"}'],
        ['data.inputs.table=["age","sex"]', "data.inputs.words=ids"],
    ):
        experiment = fedsim.load_experiment({"model": Joint}, [f"data={path}", *settings])
        assert experiment.data.params["inputs"] == several
    for wrong in ({}, {"": "age", "words": "ids"}, {"table": [], "words": "ids"}):
        with pytest.raises(DataError, match="must contain names of inputs, each with at least one column"):
            fedsim.load_dataset((frame, frame), inputs=wrong)
    with pytest.raises(DataError, match="or to a dict of several inputs by name"):
        fedsim.load_dataset((frame, frame))


def test_digests_and_shared_memory_cover_all_inputs():
    train = samples(None)[0]
    assert [*train.tensors] == ["inputs.words", "inputs.table", "inputs.image", "targets"]
    assert len({digest(tensor) for tensor in train.tensors.values()}) == 4


def test_lengths_and_names_are_checked():
    with pytest.raises(ValueError, match=r"there are 5 rows of inputs\.attention_mask, but 12 targets"):
        fedsim.TensorData({"input_ids": IDS, "attention_mask": MASK[:5]}, TARGETS)
    with pytest.raises(ValueError, match="must contain at least one tensor"):
        fedsim.TensorData({}, TARGETS)
    with pytest.raises(DataError, match="the input words of sample 0 contains several inputs; it must be one number"):
        as_tensor_data([({"words": BY_NAME}, 0)])
    with pytest.raises(DataError, match=r"the training samples have inputs.input_ids, inputs.attention_mask, but the"):
        fedsim.load_dataset(((BY_NAME, TARGETS), ({"input_ids": IDS}, TARGETS)))
    with pytest.raises(
        DataError, match="each training input.attention_mask is torch.int64 of shape .4.*, but each test"
    ):
        fedsim.load_dataset(((BY_NAME, TARGETS), ({"input_ids": IDS, "attention_mask": MASK[:, :2]}, TARGETS)))
    with pytest.raises(DataError, match="sample 1 has other inputs than sample 0, which has input_ids, attention_mask"):
        as_tensor_data([FORMS["lists"][0], {"input_ids": [1, 2, 3, 4], "ids": 3, "label": 1}])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"model": "mlp"},
            'model.name = "mlp": needs numbers, but each sample of .* has several inputs .*your own class',
        ),
        (
            {},
            "needs numbers, but each sample of .* has several inputs .words .4.*; use your own class, whose `forward`",
        ),
        (
            {"model": Joint, "partition": "feature_noise"},
            "partition.name: the transform needs images .* exactly one of several inputs, not words",
        ),
        ({"model": Joint, "data.augment": ["flip"]}, "data.augment = .flip.: needs images .*exactly one of several"),
        ({"model": Joint, "attack": {"name": "backdoor", "fraction": 0.5}}, "the patch of a backdoor needs images"),
    ],
)
def test_what_is_not_defined_for_several_inputs_is_refused(settings, line):
    train, test = samples(None)

    def without_image(root):
        return tuple(
            fedsim.TensorData({**part.inputs, "image": part.inputs["image"].flatten(1).float()}, part.targets)
            for part in (train, test)
        )

    with pytest.raises(ExperimentError, match=line):
        fedsim.run({"data": without_image, "workers": 4, "rounds": 1, "engine": "serial", **settings})


def with_nan(values):
    values = values.clone().float()
    values[3, 1] = torch.nan
    return values


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (({"a": IDS.float(), "b": with_nan(MASK)}, TARGETS), "sample 3 has NaN or infinity in inputs.b; replace"),
        (((IDS.float(), with_nan(MASK)), TARGETS), "sample 3 has NaN or infinity in inputs.1; replace"),
        ((with_nan(MASK), TARGETS), "sample 3 has NaN or infinity as input; replace"),
        (({"a": IDS, "b": MASK[:5]}, TARGETS), "there are 5 rows of inputs.b, but 12 targets; each input needs"),
        ((IDS[:5], TARGETS), "there are 5 inputs, but 12 targets; each input needs"),
        ([({"a": IDS[k], "b": MASK[k, : 4 - k % 2]}, 0) for k in range(4)], "the input b of sample 1 has shape [3], "),
        (({"a": IDS, "b": torch.zeros(N, 3, 3, 3)}, TARGETS), "inputs.b of shape [3, 3, 3] may be images"),
        (({"a": IDS, "b": MASK.to_sparse()}, TARGETS), "the inputs.b must be a dense tensor"),
    ],
)
def test_an_error_names_the_input(data, line):
    with pytest.raises(DataError) as caught:
        fedsim.load_dataset((data, data))
    assert line in str(caught.value)
