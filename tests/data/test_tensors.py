from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedsim.data import TensorData, as_tensor_data
from fedsim.errors import DataError

MEAN, STD = (0.1307,), (0.3081,)


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return TensorData.of_images(pixels, torch.arange(20) % 10, MEAN, STD)


@pytest.mark.parametrize(("mean", "std"), [((0.1307,), (0.3081,)), ((0.1, 0.5, 0.9), (0.2, 0.3, 0.4))])
def test_images_are_normalised_by_channel(mean, std):
    channels = len(mean)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, channels, 5, 5), dtype=torch.uint8, generator=generator)
    inputs, _ = TensorData.of_images(pixels, torch.zeros(4).long(), mean, std).gather(torch.arange(4))
    expected = (pixels / 255 - torch.tensor(mean).view(channels, 1, 1)) / torch.tensor(std).view(channels, 1, 1)
    assert torch.allclose(inputs, expected, atol=1e-6)


def test_batches_of_images_are_channels_last_on_a_cpu(images):
    inputs, _ = images.gather(torch.arange(4))
    assert inputs.stride() == (784, 1, 28, 1)


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


@pytest.mark.parametrize("target", [2, np.int64(2), torch.tensor(2), torch.tensor([2]), np.uint8(2), np.array([2])])
def test_a_class_may_be_any_integer_of_one_element(target):
    targets = as_tensor_data([(torch.zeros(3), target)]).targets
    assert (targets.dtype, targets.tolist()) == (torch.int64, [2])


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (torch.arange(5), r"the target of sample 1 is of shape \[5\], and that of sample 0 of \[\]"),
        ("cat", "the target of sample 1 is a str; targets must be numbers"),
        (None, "the target of sample 1 is a NoneType"),
    ],
)
def test_targets_must_be_numbers_of_one_shape(target, line):
    with pytest.raises(DataError, match=line):
        as_tensor_data([(torch.zeros(3), 1), (torch.zeros(3), target)])


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        ([0.7, 1.0], torch.float64),
        ([torch.tensor(2.0), torch.tensor(0.1)], torch.float32),
        ([torch.rand(2), torch.rand(2)], torch.float32),
        ([np.arange(4), np.arange(4)], torch.int64),
    ],
)
def test_targets_of_any_numbers_keep_their_values(targets, dtype):
    data = as_tensor_data([(torch.zeros(3), target) for target in targets])
    assert data.targets.dtype == dtype
    assert data.targets.tolist() == torch.stack([torch.as_tensor(each, dtype=dtype) for each in targets]).tolist()
    assert not data.has_labels


def test_floating_targets_have_the_precision_of_a_run():
    data = TensorData(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0.1, 0.2]), dtype=torch.int64)
    moved = data.to(torch.device("cpu"), torch.float64)
    assert (moved.targets.dtype, moved.dtype) == (torch.float64, torch.int64)
    assert torch.equal(data.take(np.array([1])).targets, torch.tensor([0.2]))
    assert data[0][1] == pytest.approx(0.1)


SEQUENCES = [(torch.arange(length), length % 2) for length in (3, 5, 4)]
DICTS = [{"input_ids": [1, 2, 3], "mask": [1, 1, 0], "label": 1}]


class Frame:
    """Like a data frame of pandas: its items are columns."""

    def __repr__(self):  # in the names of tests
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
        (SEQUENCES, r"sample 1 has the shape \[5\], and that of sample 0 \[3\]; .*pad_sequence.* collate_fn"),
        (DICTS, r"sample 0 has the keys input_ids, mask, label; a sample must be \(input, target\), as in .*sample\["),
        (Frame(), "a Frame has columns, not samples; give data=.*to_numpy"),
        ((Frame(), np.zeros(3)), "the inputs are a Frame; must be a tensor or an array .*; convert it by .to_numpy"),
        ((np.zeros((3, 2)), np.zeros(2)), "3 inputs have 2 targets"),
        ((np.zeros((2, 2)), np.array(["a", "b"])), "the target of sample 0 is a str_; targets must be numbers"),
    ],
    ids=str,
)
def test_what_is_no_data_set_of_pairs_is_one_line_with_the_way(data, line):
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
