"""Data sets in tensors, and subsets of them for workers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fedsim
from fedsim.data import CustomSubset, TensorData, as_tensor_data
from fedsim.data.subsets import targets_of
from fedsim.errors import DataError


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return TensorData.of_images(pixels, torch.arange(20) % 10, (0.1307,), (0.3081,))


def test_batches_of_images_are_channels_last_on_a_cpu(images):
    inputs, _ = images.gather(torch.arange(4))
    assert inputs.stride() == (784, 1, 28, 1)


def test_another_process_receives_no_cached_tensors(images):
    images.gather(torch.arange(4))
    assert vars(images).keys() - vars(pickle.loads(pickle.dumps(images))).keys() == {"_scale_and_shift"}


def test_a_sample_is_a_row_of_the_batch(images):
    inputs, targets = images.gather(torch.arange(20))
    x, y = images[7]
    assert torch.equal(x, inputs[7])
    assert y == targets[7]
    assert isinstance(y, int)
    fetched = images.__getitems__([2, 9])
    assert [y for _, y in fetched] == [2, 9]
    assert torch.equal(fetched[1][0], inputs[9])


@pytest.mark.parametrize(
    "make",
    [
        lambda pixels: [(pixel, k) for k, pixel in enumerate(pixels)],
        lambda pixels: TensorDataset(pixels, torch.arange(3)),
        lambda pixels: [(pixel.numpy(), np.int64(k)) for k, pixel in enumerate(pixels)],
        lambda pixels: [(Image.fromarray(pixel[0].numpy()), k) for k, pixel in enumerate(pixels)],
    ],
    ids=["tensors", "TensorDataset", "arrays", "PIL"],
)
def test_any_map_style_data_set_becomes_tensors(make):
    pixels = (torch.arange(108) * 7 % 256).to(torch.uint8).view(3, 1, 6, 6)
    data = as_tensor_data(make(pixels))
    assert torch.equal(data.inputs, pixels)
    assert data.targets.tolist() == [0, 1, 2]
    assert torch.allclose(data.gather(torch.arange(3))[0], pixels / 255)


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        *(
            ([two], torch.int64)
            for two in (2, np.int64(2), torch.tensor(2), torch.tensor([2]), np.uint8(2), np.array([2]))
        ),
        ([0.7, 1.0], torch.float64),
        ([torch.tensor(2.0), torch.tensor(0.1)], torch.float32),
        ([torch.rand(2), torch.rand(2)], torch.float32),
        ([np.arange(4), np.arange(4)], torch.int64),
    ],
)
def test_targets_of_any_numbers_keep_their_values(targets, dtype):
    data = as_tensor_data([(torch.zeros(3), target) for target in targets])
    assert data.targets.dtype == dtype
    expected = torch.stack([torch.as_tensor(each, dtype=dtype) for each in targets])
    assert data.has_labels == (expected.numel() == len(expected) and dtype is torch.int64)
    assert data.targets.tolist() == (expected.flatten() if data.has_labels else expected).tolist()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_images_of_more_than_8_bits_are_an_error_of_one_line(mode):
    data = [(Image.new(mode, (4, 4), 700), label) for label in (0, 1)]
    line = f"the input of sample 0: the image has the mode {mode} of PIL; convert it to 8 bits per channel$"
    with pytest.raises(DataError, match=line) as caught:
        as_tensor_data(data)
    assert "\n" not in str(caught.value)
    pixels = as_tensor_data([(Image.new("F", (4, 4), 700.5), 0)])
    assert torch.equal(pixels.gather(torch.arange(1))[0], torch.full((1, 1, 4, 4), 700.5))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_are_tokens(dtype):
    tokens = np.arange(8, dtype=dtype).reshape(4, 2) + 700
    data = as_tensor_data((tokens, np.arange(4) % 2))
    assert data.gather(torch.arange(4))[0].dtype == torch.int64
    assert data.inputs.tolist() == tokens.tolist()
    line = "the inputs are integers from 0 to 707: convert measured numbers to floating point"
    for train in (data, TensorData(torch.from_numpy(tokens), data.targets, dtype=torch.int64)):
        with pytest.raises(fedsim.ExperimentError, match=line):
            fedsim.run(data=(train, train), model=torch.nn.Linear(2, 2), workers=2, rounds=1, engine="serial")


def test_floating_targets_have_the_precision_of_a_run():
    data = TensorData(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0.1, 0.2]), dtype=torch.int64)
    moved = data.to(torch.device("cpu"), torch.float64)
    assert (moved.targets.dtype, moved.dtype) == (torch.float64, torch.int64)
    assert torch.equal(data.take(np.array([1])).targets, torch.tensor([0.2]))
    assert data[0][1] == pytest.approx(0.1)


SEQUENCES = [(torch.arange(length), length % 2) for length in (3, 5, 4)]
DICTS = [{"input_ids": [1, 2, 3], "target": 0, "label": 1}]


class Frame:
    """A stand-in for a pandas data frame, whose items are columns."""

    def __repr__(self):  # shown in the test IDs
        return "Frame()"

    def __len__(self):
        return 3

    def __getitem__(self, column):
        raise KeyError(column)

    def to_numpy(self):
        return np.zeros((3, 2))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            SEQUENCES,
            r"sample 1 has shape \[5\], but the input of sample 0 has shape \[3\]; .*pad_sequence.* collate_fn",
        ),
        (
            DICTS,
            r"sample 0 has the keys input_ids, target, label; each sample must be a pair \(input, target\), .*sample\[",
        ),
        (Frame(), "the Frame object contains columns, not samples; pass data=.*to_numpy"),
        ((Frame(), np.zeros(3)), "inputs: must be a tensor or an array .*, not a Frame; convert .* with .to_numpy"),
        ((np.zeros((3, 2)), np.zeros(2)), "there are 3 inputs, but 2 targets"),
        ((np.zeros((2, 2)), np.array(["a", "b"])), "the target of sample 0 is a str_; targets must be numbers"),
        ([(0.0, 1), (0.0, np.zeros(5))], r"of sample 1 has shape \[5\], but the target of sample 0 has shape \[\]"),
        ([(0.0, 1), (0.0, None)], "the target of sample 1 is a NoneType"),
    ],
    ids=str,
)
def test_what_is_not_a_data_set_of_pairs_is_one_line_with_the_way(data, line):
    with pytest.raises(DataError, match=line) as caught:
        as_tensor_data(data)
    assert "\n" not in str(caught.value)


def test_the_ways_of_these_lines_work():
    samples, inputs = SEQUENCES, [sequence for sequence, _ in SEQUENCES]
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    assert torch.equal(as_tensor_data((padded, np.array([1, 1, 0]))).inputs, padded)

    def collate_fn(samples):
        return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.ones(len(samples))

    assert as_tensor_data(collate_fn(list(samples))).targets.tolist() == [1, 1, 1]
    pairs = as_tensor_data([(sample["input_ids"], sample["label"]) for sample in DICTS])
    assert (pairs.inputs.tolist(), pairs.targets.tolist()) == ([[1, 2, 3]], [1])
    data = as_tensor_data((Frame().to_numpy(), np.array([[0], [1], [1]], dtype=np.int32)))
    assert (data.gather(torch.arange(1))[0].dtype, data.targets.tolist()) == (torch.float32, [0, 1, 1])


class Plain(Dataset):
    """A map-style data set without tensors, batched fetching or labels."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index % 3


def make(kind):
    inputs, targets = torch.arange(10.0).unsqueeze(1).expand(10, 2), torch.arange(10) % 3
    if kind == "TensorData":
        return TensorData(inputs, targets)
    return TensorDataset(inputs, targets) if kind == "TensorDataset" else Plain()


KINDS = ["TensorData", "TensorDataset", "Plain"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [None, lambda x: x + 100], ids=["plain", "transformed"])
def test_samples_and_batches_are_the_same(kind, transform):
    subset = CustomSubset(make(kind), np.array([7, 2, 5, 1]), transform)
    assert isinstance(subset, Subset)
    assert len(subset) == 4
    positions = [3, 0, 1]
    one_by_one = [subset[position] for position in positions]
    fetched = subset.__getitems__(positions)
    inputs, targets = subset.gather(torch.tensor(positions))
    assert inputs[:, 0].tolist() == [value + (100 if transform else 0) for value in (1, 7, 2)]
    for (x, y), (fetched_x, fetched_y), gathered_x, gathered_y in zip(
        one_by_one, fetched, inputs, targets, strict=True
    ):
        assert torch.equal(x, fetched_x)
        assert torch.equal(x, gathered_x)
        assert int(y) == int(fetched_y) == int(gathered_y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [3, 10, 64])
def test_batches_have_all_samples_in_the_given_order(kind, batch_size):
    subset = CustomSubset(make(kind), range(10))
    order = np.random.default_rng(0).permutation(10)
    batches = list(subset.batches(batch_size, order))
    assert [len(y) for _, y in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert torch.cat([x for x, _ in batches])[:, 0].tolist() == order.tolist()


def test_batches_do_not_depend_on_chunks():
    pixels = (torch.arange(900 * 784) * 31 % 256).to(torch.uint8).view(900, 1, 28, 28)
    images = TensorData(pixels, torch.arange(900))
    batches = list(CustomSubset(images, range(900)).batches(7))
    assert len(batches) == 129
    inputs, targets = images.gather(torch.arange(900))
    assert torch.equal(torch.cat([x for x, _ in batches]), inputs)
    assert torch.equal(torch.cat([y for _, y in batches]), targets)


@pytest.mark.parametrize("kind", KINDS)
def test_dataset_split_gives_one_subset_per_worker(kind):
    shards = fedsim.dataset_split(make(kind), "contiguous", 3)
    assert [len(shard) for shard in shards] == [3, 3, 4]
    assert all(isinstance(shard, CustomSubset) for shard in shards)
    assert [x[0].item() for x, _ in shards[2]] == [6, 7, 8, 9]


def labelled_images():
    return TensorData(torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)


def test_dataset_split_takes_a_pair_of_arrays_as_tensor_data_only():
    inputs, targets = {"a": torch.zeros(4, 2)}, torch.arange(4)
    with pytest.raises(fedsim.DataError, match=r"pass fedsim.TensorData\(inputs, targets\)"):
        fedsim.dataset_split((inputs, targets), "iid", 2)
    assert len(fedsim.dataset_split(fedsim.TensorData(inputs, targets), "iid", 2)) == 2


def test_dataset_split_uses_the_transforms_of_the_strategy():
    data = labelled_images()
    shards = fedsim.dataset_split(data, "feature_rotation", 4, seed=1)
    for quarters, shard in enumerate(shards):
        inputs, _ = shard.gather(torch.arange(10))
        assert torch.equal(inputs, data.inputs[shard.indices].rot90(quarters, (2, 3)))
        assert torch.equal(shard[3][0], inputs[3])
    plain = fedsim.dataset_split(data, "feature_rotation", 4, seed=1, subset_transform=lambda x: x)
    assert torch.equal(plain[1].gather(torch.arange(10))[0], data.inputs[plain[1].indices])


@pytest.mark.parametrize("processes", [0, 1])
def test_a_data_loader_applies_the_transforms(processes):
    data = labelled_images()
    shard = fedsim.dataset_split(data, "feature_rotation", 2, groups=2)[1]
    (inputs, _), *_ = DataLoader(shard, batch_size=20, num_workers=processes)
    assert torch.equal(inputs, data.inputs[shard.indices].rot90(2, (2, 3)))


def test_a_subset_with_a_transform_can_be_pickled():
    shard = fedsim.dataset_split(labelled_images(), "feature_noise", 2)[1]
    again = pickle.loads(pickle.dumps(shard))
    assert torch.equal(again.gather(torch.arange(20))[0], shard.gather(torch.arange(20))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_found_whatever_the_data_set(kind):
    expected = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert targets_of(make(kind)).tolist() == expected
    assert targets_of(Subset(make(kind), [2, 4])).tolist() == [2, 1]
    assert targets_of(CustomSubset(make(kind), [2, 4])).tolist() == [2, 1]


@pytest.mark.parametrize("targets", [torch.rand(10), torch.zeros(10, 2, dtype=torch.int64)])
def test_targets_without_classes_are_divided_by_strategies_that_need_none(targets):
    for data in (TensorDataset(torch.zeros(10, 2), targets), [(torch.zeros(2), target) for target in targets]):
        assert torch.equal(torch.as_tensor(targets_of(data)), targets)
        assert [len(part) for part in fedsim.dataset_split(data, "iid", 2)] == [5, 5]
        with pytest.raises(fedsim.ExperimentError, match='"dirichlet": needs one class label per sample.*such as iid'):
            fedsim.dataset_split(data, "dirichlet", 2)


def test_samples_may_be_dicts_of_an_input_and_a_target():
    samples = [{"label": n % 2, "x": torch.tensor([float(n)])} for n in range(4)]
    subsets = fedsim.dataset_split(samples, "contiguous", 2, subset_transform=lambda x: x + 1)
    assert [target for _, target in subsets[1]] == [0, 1]
    inputs, targets = subsets[1].gather(torch.tensor([1, 0]))
    assert (inputs.tolist(), targets.tolist()) == ([[4.0], [3.0]], [1, 0])
    inputs, targets = fedsim.CustomSubset(samples, [3]).gather(torch.tensor([0]))
    assert (inputs.tolist(), targets.tolist()) == ([[3.0]], [1])


def test_data_for_a_run_keep_no_memory_but_their_own():
    """A view would keep the memory of its base when `share` moves it: a large data set would lie in memory twice."""
    images = torch.arange(24, dtype=torch.uint8).view(6, 2, 2).unsqueeze(1)
    assert images._base is not None
    data = fedsim.TensorData(images, torch.arange(6))
    moved = data.to(torch.device("cpu"), torch.float32)
    assert moved.inputs._base is None
    assert torch.equal(moved.inputs, images)
    assert moved.inputs.data_ptr() == images.data_ptr()
    assert moved.inputs.stride() == images.stride()
    assert moved.to(torch.device("cpu"), torch.float32).inputs is moved.inputs  # `share` moves it for all
