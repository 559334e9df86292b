"""Partitioners of the package Flower Datasets as partitions of fedsim, and the reverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions import partition_strategy
from fedsim.errors import ExperimentError, SettingWarning

pytest.importorskip("flwr_datasets", reason="needs the package flwr-datasets")

from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner

from fedsim.integrations.flower_datasets import FedsimPartitioner, flower_partition

pytestmark = [
    pytest.mark.filterwarnings("ignore:Specifying null_placement"),  # from pyarrow, through datasets
    pytest.mark.filterwarnings("ignore:The sum of partition sizes"),
    pytest.mark.filterwarnings("ignore:feature_"),
]
N, WORKERS = 300, 5
LABELS = np.random.default_rng(0).integers(6, size=N)
IDS = np.arange(N) % WORKERS
PARAMS = {"classes_per_worker": {"k": 2}, "virtual": {"samples": 20}}


def dataset(labels=LABELS):
    return Dataset.from_dict({"number": np.arange(N), "label": labels, "writer": IDS})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 2}),
        ("PathologicalPartitioner", {"num_classes_per_partition": 3, "class_assignment_mode": "deterministic"}),
        ("SizePartitioner", {"partition_sizes": [100, 80, 60, 40, 20]}),
        ("NaturalIdPartitioner", {"partition_by": "id"}),
    ],
)
def test_partitioners_are_partitions(name, arguments):
    def shards(seed):
        return fedsim.partition(LABELS, flower_partition, WORKERS, seed=seed, ids=IDS, partitioner=name, **arguments)

    assert sorted(np.concatenate(shards(0))) == list(range(N))
    assert all(map(np.array_equal, shards(0), shards(0)))
    if "DirichletPartitioner" in name:
        assert not all(map(np.array_equal, shards(0), shards(1)))


def test_a_partition_has_the_samples_of_its_partitioner():
    arguments = {"alpha": 0.5, "min_partition_size": 2}
    shards = fedsim.partition(
        LABELS, flower_partition, WORKERS, seed=7, partitioner="DirichletPartitioner", **arguments
    )
    seed = int(numpy_generator(7, "partition").integers(2**31))
    partitioner = DirichletPartitioner(WORKERS, "label", seed=seed, **arguments)
    partitioner.dataset = dataset()
    for worker, shard in enumerate(shards):
        assert shard.tolist() == partitioner.load_partition(worker)["number"][:]


def test_an_experiment_takes_a_partitioner_by_its_import_path(tiny_experiment):
    path = "fedsim.integrations.flower_datasets:flower_partition"
    tiny_experiment["partition"] = {"name": path, "partitioner": "IidPartitioner"}
    by_flower = fedsim.run(tiny_experiment)

    def in_order(labels, n_workers):
        return np.array_split(np.arange(len(labels)), n_workers)

    tiny_experiment["partition"] = in_order
    assert torch.equal(by_flower.global_row, fedsim.run(tiny_experiment).global_row)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"partitioner": "Dirichlet"}, 'partitioner = "Dirichlet": no such class in flwr_datasets.partitioner; did'),
        ({"partitioner": "NaturalIdPartitioner"}, "partitioner = .*: returned 6 partitions for 5 workers; must be"),
        ({"partitioner": "SizePartitioner", "partition_sizes": [9] * 5}, "name = .* exactly one worker"),
    ],
)
def test_a_wrong_partitioner_is_an_error_of_one_line(options, line):
    with pytest.raises(ExperimentError, match=line) as caught:
        fedsim.partition(LABELS, flower_partition, WORKERS, **options)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("strategy", partition_strategy.names())
def test_every_partition_is_a_partitioner(strategy):
    params = PARAMS.get(strategy, {})
    partitioner = FedsimPartitioner(WORKERS, strategy, ids_by="writer", seed=3, **params)
    partitioner.dataset = dataset()
    expected = fedsim.partition(LABELS, strategy, WORKERS, seed=3, ids=IDS, **params)
    assert partitioner.num_partitions == WORKERS
    for worker, shard in enumerate(expected):
        assert partitioner.load_partition(worker)["number"][:] == shard.tolist()


def test_a_partitioner_has_the_transforms_of_its_partition():
    with pytest.warns(SettingWarning, match=r"^feature_rotation also changes samples; apply transform"):
        partitioner = FedsimPartitioner(2, "feature_rotation", groups=2)
    assert [partitioner.transform(0), partitioner.transform(1)] == fedsim.partition_transforms(
        "feature_rotation", 2, groups=2
    )
    assert FedsimPartitioner(2, "iid").transform(1) is None


def test_a_wrong_partition_is_an_error():
    with pytest.raises(ExperimentError, match=r"^name = \"dirichle\": no such partition strategy; did you mean"):
        FedsimPartitioner(2, "dirichle")
    with pytest.raises(ExperimentError, match=r"^alfa = 1: "):
        FedsimPartitioner(2, "dirichlet", alfa=1)
    partitioner = FedsimPartitioner(2, "dirichlet", partition_by="lable")
    partitioner.dataset = dataset()
    with pytest.raises(ExperimentError, match=r"^partition_id = 2: must be between 0 and 1$"):
        partitioner.load_partition(2)
    with pytest.raises(
        ExperimentError, match=r"^column \"lable\": the data set has no such column; did you mean \"label\"\?$"
    ):
        partitioner.load_partition(0)
