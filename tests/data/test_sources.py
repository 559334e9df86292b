from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data import images, sources
from fedsim.system import packages
from tests.data.loading import refused


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(root, class_name="MNIST"):
    """Write a data set of 6 training and 4 test images in torchvision's layout, and return its folder."""
    folder = root / class_name / "raw"
    folder.mkdir(parents=True)
    for pixels, labels, n in ((*images.MNIST_FILES[:2], 6), (*images.MNIST_FILES[2:], 4)):
        (folder / pixels).write_bytes(idx_bytes(np.arange(n * 784).reshape(n, 28, 28) % 256))
        (folder / labels).write_bytes(idx_bytes(np.arange(n)))
    return folder


@pytest.fixture
def small_mnist(data_root):
    return write_mnist(data_root)


def test_mnist5k_never_changes():
    parts = fedsim.load_dataset("mnist5k")
    content = b"".join(part.inputs.numpy().tobytes() + part.targets.numpy().tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest() == "1f9737060cd76992b29b54c835df0c8a96771b3cd4c8dbf9e534b7950df31a12"


def test_mnist5k_is_a_part_of_mnists_training_set():
    if images.lacks_files("mnist", sources.default_root()):
        pytest.skip("needs MNIST's files")
    mnist, _ = fedsim.load_dataset("mnist")
    index = torch.from_numpy(np.load(sources.MNIST5K_FILE)["index"].astype(np.int64))
    train, test = fedsim.load_dataset("mnist5k")
    assert torch.equal(mnist.inputs[index], torch.cat([train.inputs, test.inputs]))
    assert torch.equal(mnist.targets[index], torch.cat([train.targets, test.targets]))


def test_the_environment_sets_the_default_root(small_mnist, data_root, monkeypatch):
    monkeypatch.setenv("FEDSIM_DATA", str(data_root))
    assert len(fedsim.load_dataset("mnist")[0]) == 6
    monkeypatch.delenv("FEDSIM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert sources.default_root() == Path("/somewhere/fedsim/data")


@pytest.mark.parametrize(("name", "class_name"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_missing_data_is_downloaded_through_torchvision(name, class_name, data_root, monkeypatch):
    asked = []

    def download(dataset, root, arguments):
        asked.append((dataset, root))
        write_mnist(root, dataset)

    monkeypatch.setattr(packages, "download", download)
    fedsim.load_dataset(name, data_root)
    fedsim.load_dataset(name, data_root)
    assert asked == [(class_name, data_root)]


@pytest.mark.parametrize(
    ("file", "content"),
    [(0, idx_bytes(np.zeros((6, 28, 28)))[:-1]), (0, b"<html>"), (2, b""), (1, idx_bytes(np.arange(5)))],
    ids=["truncated", "not IDX", "empty", "fewer labels than images"],
)
def test_a_damaged_file_is_one_line_that_names_it(small_mnist, data_root, cli, file, content):
    (small_mnist / images.MNIST_FILES[file]).write_bytes(content)
    result = cli("run", "data.name=mnist", f"data.root={data_root}", "model=logistic", "rounds=1")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"error: {small_mnist / images.MNIST_FILES[file]}: cannot be read: ")
    assert result.stderr.endswith("; remove it to download it again\n")


def unknown_target(root):
    samples = [(torch.zeros(3), float("nan"))]
    return samples, samples


def test_unusable_samples_are_an_error():
    refused(f"{__name__}:unknown_target", ':unknown_target": the training set has targets that are NaN or infinite')
    inputs, targets = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    sparse = (inputs.to_sparse(), targets), (inputs, targets)
    refused(sparse, "must be a dense tensor of real numbers, but have layout torch.sparse_coo")


@pytest.mark.parametrize("change", [lambda inputs: inputs[:, :3], lambda inputs: inputs.float()])
def test_training_and_test_inputs_must_have_one_type_and_shape(change):
    inputs, targets = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)
    refused(((inputs, targets), (change(inputs), targets)), "both must have the same type and shape")


def test_owners_may_be_lists_and_inputs_may_require_gradients():
    inputs, targets = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    data = fedsim.TensorData(inputs, targets, ids={"user": ["ann", "bob"] * 2})
    assert data.take(np.array([1, 3])).ids["user"].tolist() == ["bob", "bob"]
    train, _ = fedsim.load_dataset(((inputs.requires_grad_(), targets), (inputs, targets)))
    assert not train.inputs.requires_grad
