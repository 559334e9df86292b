from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fedsim
from fedsim.data import CustomSubset, TensorData
from fedsim.data.subsets import targets_of


class Plain(Dataset):
    """A map-style data set without tensors, batched fetch or labels."""

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
    shards = fedsim.dataset_split(make(kind), 3)
    assert [len(shard) for shard in shards] == [3, 3, 4]
    assert all(isinstance(shard, CustomSubset) for shard in shards)
    assert [x[0].item() for x, _ in shards[2]] == [6, 7, 8, 9]


def images():
    return TensorData(torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)


def test_dataset_split_uses_the_transforms_of_the_strategy():
    data = images()
    shards = fedsim.dataset_split(data, 4, "feature_rotation", seed=1)
    for quarters, shard in enumerate(shards):
        inputs, _ = shard.gather(torch.arange(10))
        assert torch.equal(inputs, data.inputs[shard.indices].rot90(quarters, (2, 3)))
        assert torch.equal(shard[3][0], inputs[3])
    plain = fedsim.dataset_split(data, 4, "feature_rotation", seed=1, subset_transform=lambda x: x)
    assert torch.equal(plain[1].gather(torch.arange(10))[0], data.inputs[plain[1].indices])


@pytest.mark.parametrize("processes", [0, 1])
def test_a_data_loader_applies_the_transforms(processes):
    data = images()
    shard = fedsim.dataset_split(data, 2, "feature_rotation", groups=2)[1]
    (inputs, _), *_ = DataLoader(shard, batch_size=20, num_workers=processes)
    assert torch.equal(inputs, data.inputs[shard.indices].rot90(2, (2, 3)))


def test_a_subset_with_a_transform_can_be_pickled():
    shard = fedsim.dataset_split(images(), 2, "feature_noise")[1]
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
        assert [len(part) for part in fedsim.dataset_split(data, 2, "iid")] == [5, 5]
        with pytest.raises(fedsim.ExperimentError, match='"dirichlet": needs class labels.*such as iid'):
            fedsim.dataset_split(data, 2, "dirichlet")


def test_samples_may_be_dicts_of_an_input_and_a_target():
    samples = [{"label": n % 2, "x": torch.tensor([float(n)])} for n in range(4)]
    subsets = fedsim.dataset_split(samples, 2, "contiguous", subset_transform=lambda x: x + 1)
    assert [target for _, target in subsets[1]] == [0, 1]
    inputs, targets = subsets[1].gather(torch.tensor([1, 0]))
    assert (inputs.tolist(), targets.tolist()) == ([[4.0], [3.0]], [1, 0])
    inputs, targets = fedsim.CustomSubset(samples, [3]).gather(torch.tensor([0]))
    assert (inputs.tolist(), targets.tolist()) == ([[3.0]], [1])
