"""Data sets of torchvision, read from small files in their formats."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

import fedsim
from fedsim.config.load import load_experiment
from fedsim.data.formats import images
from fedsim.errors import ExperimentError
from fedsim.system import packages
from tests.data.loading import refused
from tests.data.test_sources import idx_bytes, write_mnist

RNG = np.random.default_rng(0)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def datasets():
    return packages.import_torchvision().datasets


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def cifar10(data_root, monkeypatch):
    """Five training files of 4 images and a test file of 3, with the checksums that torchvision then expects."""
    folder = data_root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    lists = {"train_list": [f"data_batch_{n}" for n in range(1, 6)], "test_list": ["test_batch"]}
    for attribute, names in lists.items():
        for name in names:
            n = 4 if attribute == "train_list" else 3
            content = {"data": RNG.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": [*range(n)]}
            (folder / name).write_bytes(pickle.dumps(content))
        sums = [[name, md5(folder / name)] for name in names]
        monkeypatch.setattr(datasets().CIFAR10, attribute, sums)
    meta = folder / "batches.meta"
    meta.write_bytes(pickle.dumps({"label_names": [str(n) for n in range(10)]}))
    monkeypatch.setattr(datasets().CIFAR10, "meta", {"filename": meta.name, "key": "label_names", "md5": md5(meta)})
    return folder


@pytest.fixture
def svhn(data_root, monkeypatch):
    data_root.mkdir()
    sums = {}
    for part, n in (("train", 5), ("test", 2)):
        path = data_root / f"{part}_32x32.mat"
        pixels = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        scipy.io.savemat(path, {"X": pixels, "y": np.array([10, 1, 2, 9, 3][:n], dtype=np.uint8)[:, None]})
        sums[part] = ["", path.name, md5(path)]
    monkeypatch.setattr(datasets().SVHN, "split_list", sums)
    return data_root


def write_emnist(root, split, first):
    folder = root / "EMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", 6), ("test", 4)):
        pixels = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (folder / f"emnist-{split}-{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (folder / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(first, first + n)))
    return folder


def write_flowers(root, sizes):
    """Flowers102: JPEG files of these sizes, (width, height), in turn for training, validation and tests."""
    folder = root / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    ids = np.arange(1, len(sizes) + 1)
    for number, size in zip(ids, sizes, strict=True):
        Image.effect_noise(size, 50).convert("RGB").save(folder / "jpg" / f"image_{number:05d}.jpg")
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": (ids - 1) // 3 + 1})
    scipy.io.savemat(folder / "setid.mat", {"trnid": ids[::3], "valid": ids[1::3], "tstid": ids[2::3]})
    return folder


@pytest.fixture
def flowers(data_root, monkeypatch):
    monkeypatch.setattr(datasets().Flowers102, "_check_integrity", lambda self: True)
    return lambda sizes: write_flowers(data_root, sizes)


def assert_like_torchvision(parts, theirs, mean, std):
    """`parts` hold uint8 images, and give samples as ToTensor and Normalize make them of torchvision's images."""
    for part, samples in zip(parts, theirs, strict=True):
        assert part.inputs.dtype == torch.uint8
        assert part.inputs.is_contiguous()
        inputs, targets = part.gather(torch.arange(len(part)))
        assert targets.tolist() == [label for _, label in samples]
        for found, (image, _) in zip(inputs, samples, strict=True):
            pixels = np.array(image, dtype=np.float64) / 255
            pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            expected = (pixels - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
            np.testing.assert_allclose(found.double().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["cifar10", "torchvision:CIFAR10"])
def test_cifar10_is_read_as_by_torchvision(cifar10, data_root, name):
    parts = fedsim.load_dataset(name, data_root)
    assert [len(part) for part in parts] == [20, 3]
    theirs = [datasets().CIFAR10(data_root, train=train) for train in (True, False)]
    assert_like_torchvision(parts, theirs, *images.STATISTICS["CIFAR10"])


def test_svhn_has_labels_from_0(svhn):
    parts = fedsim.load_dataset("svhn", svhn)
    assert parts[0].targets.tolist() == [0, 1, 2, 9, 3]
    theirs = [datasets().SVHN(svhn, split=split) for split in ("train", "test")]
    assert_like_torchvision(parts, theirs, *images.STATISTICS["SVHN"])


@pytest.mark.parametrize("name", ["emnist", "torchvision:EMNIST"])
def test_emnist_letters_have_labels_from_0(data_root, name):
    write_emnist(data_root, "letters", 1)
    write_emnist(data_root, "digits", 0)
    train, test = fedsim.load_dataset(name, data_root, split="letters")
    theirs = datasets().EMNIST(data_root, split="letters", train=True)
    assert torch.equal(train.inputs[:, 0], theirs.data)
    assert train.targets.tolist() == [label - 1 for label in theirs.targets.tolist()] == [*range(6)]
    assert test.targets.tolist() == [*range(4)]
    assert fedsim.load_dataset(name, data_root, split="digits")[0].targets.tolist() == [*range(6)]


def test_unknown_statistics_are_those_of_the_training_images(data_root):
    write_mnist(data_root, "KMNIST")
    train, test = fedsim.load_dataset("kmnist", data_root)
    pixels = train.inputs.double().numpy() / 255
    theirs = [datasets().KMNIST(data_root, train=part) for part in (True, False)]
    assert_like_torchvision((train, test), theirs, pixels.mean(), pixels.std())


def test_mean_and_std_can_be_set(cifar10, data_root):
    values = {"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}
    parts = fedsim.load_dataset("torchvision:CIFAR10", data_root, **values)
    theirs = [datasets().CIFAR10(data_root, train=train) for train in (True, False)]
    assert_like_torchvision(parts, theirs, **values)
    refused("torchvision:CIFAR10", r"data\.std = \[0\.1\]: must have 3 numbers, one per channel$", data_root, std=[0.1])
    with pytest.raises(ExperimentError, match=r"data\.std\[0\] = 0\.0: must be greater than 0"):
        fedsim.load_dataset("torchvision:CIFAR10", data_root, std=[0.0, 1.0, 1.0])


def test_images_of_one_size_in_single_files(flowers, data_root):
    flowers([(20, 10)] * 9)
    train, test = fedsim.load_dataset("torchvision:Flowers102", data_root)
    pixels = train.inputs.double().numpy() / 255
    assert train.inputs.shape == (3, 3, 10, 20)
    theirs = [datasets().Flowers102(data_root, split=split) for split in ("train", "test")]
    assert_like_torchvision((train, test), theirs, pixels.mean((0, 2, 3)), pixels.std((0, 2, 3)))


def test_images_of_several_sizes_need_image_size(flowers, data_root):
    folder = flowers([(20, 10), (20, 10), (20, 10), (12, 18), (20, 10), (20, 10)])
    path = folder / "jpg" / "image_00004.jpg"
    shapes = r"has shape \[3, 18, 12\], but image 0 has \[3, 10, 20\]; set data.size to scale all images to"
    refused("torchvision:Flowers102", rf"^image 1 \({path}\): {shapes}", data_root)
    train, _ = fedsim.load_dataset("torchvision:Flowers102", data_root, size=8)
    assert train.inputs.shape == (2, 3, 8, 8)
    middle = Image.open(path).resize((8, 8), Image.Resampling.BICUBIC, box=(0, 3, 12, 15))
    np.testing.assert_array_equal(train.inputs[1].numpy(), np.array(middle).transpose(2, 0, 1))


def test_image_size_scales_images_of_arrays(cifar10, data_root):
    train, test = fedsim.load_dataset("torchvision:CIFAR10", data_root, size=16)
    assert (train.inputs.shape, test.inputs.shape) == ((20, 3, 16, 16), (3, 3, 16, 16))
    assert train.targets.tolist() == [*range(4)] * 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Flower102", 'no such class in torchvision.datasets; did you mean "Flowers102"?'),
        ("CelebA", "its samples are not pairs of an image and one class label; pass a pair instead"),
        ("VOCDetection", "the data set has no training and test parts; pass a pair instead"),
        ("Kinetics", "its samples are not pairs of an image and one class label; pass a pair instead"),
        ("EuroSAT", "the data set has no training and test parts; pass a pair instead"),
        ("utils", "no such class in torchvision.datasets"),
    ],
)
def test_other_classes_are_refused_in_one_line(name, message):
    with pytest.raises(ExperimentError) as caught:
        fedsim.Experiment(data={"name": f"torchvision:{name}"})
    (line,) = caught.value.lines
    assert line.startswith(f'data.name = "torchvision:{name}": {message}')


def test_every_class_is_usable_or_refused():
    usable = set()
    for name in datasets().__all__:
        try:
            fedsim.Experiment(data={"name": f"torchvision:{name}"})
            usable.add(name)
        except ExperimentError as error:
            if "is required" in str(error):
                usable.add(name)
    assert {"CIFAR100", "DTD", "EMNIST", "Food101", "ImageNet", "PCAM", "QMNIST", "STL10", "USPS"} <= usable
    assert not {"CocoDetection", "FakeData", "ImageFolder", "Kitti", "Omniglot", "Sintel", "UCF101"} & usable


@pytest.mark.parametrize("params", [{"split": "letter"}, {"train": False}])
def test_a_wrong_argument_is_one_line(params):
    with pytest.raises(ExperimentError, match=r"data\.(split|train) = ") as caught:
        fedsim.Experiment(data={"name": "emnist", **params})
    assert len(caught.value.lines) == 1


@pytest.fixture
def no_network(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", fail)


@pytest.mark.parametrize(
    ("name", "params", "missing"),
    [
        ("cifar10", {}, "cifar-10-batches-py/data_batch_1"),
        ("cifar100", {}, "cifar-100-python/train"),
        ("svhn", {}, "train_32x32.mat"),
        ("mnist", {}, "MNIST/raw/train-images-idx3-ubyte"),
        ("emnist", {"split": "letters"}, "EMNIST/raw/emnist-letters-train-images-idx3-ubyte"),
        ("torchvision:SVHN", {}, "train_32x32.mat"),
    ],
)
def test_a_missing_file_is_one_line_with_its_place(name, params, missing, data_root, no_network):
    assert images.lacks_files(name, data_root, **params)
    begin = rf"^data\.name: {data_root / missing} is missing, and downloading .* failed: .*\. Put the files there, or "
    embedded = ", or use the embedded data set: data.name=mnist5k" if name == "mnist" else ""
    end = rf"set data\.root or \$FEDSIM_DATA to the folder that holds {missing}{embedded}$"
    refused(name, begin + end, data_root, **params)
    assert not data_root.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("DTD", r"and downloading DTD failed: "), ("FER2013", r"and torchvision cannot download this data set\.")],
)
def test_missing_files_of_another_class_are_one_line(name, reason, data_root, no_network):
    assert images.lacks_files(f"torchvision:{name}", data_root)
    refused(f"torchvision:{name}", rf"^data\.name: {data_root} lacks files of {name} \(.*{reason}", data_root)


def test_files_that_are_there_are_not_downloaded(cifar10, flowers, data_root):
    flowers([(8, 8)] * 6)
    assert not images.lacks_files("cifar10", data_root)
    assert not images.lacks_files("torchvision:CIFAR10", data_root, size=16)
    assert not images.lacks_files("torchvision:Flowers102", data_root, size=16)


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        ("cifar10", "cifar10", "cifar-10-batches-py/data_batch_3"),
        ("torchvision:CIFAR10", "cifar10", "cifar-10-batches-py/data_batch_3"),
        ("svhn", "svhn", "test_32x32.mat"),
    ],
)
def test_a_damaged_file_is_named(name, kind, file, request, data_root):
    request.getfixturevalue(kind)
    os.truncate(data_root / file, 100)
    refused(name, f"^{data_root / file}: cannot be read: .*; remove it to download it again$", data_root)


def test_a_truncated_jpeg_is_named(flowers, data_root):
    path = flowers([(20, 10)] * 9) / "jpg" / "image_00004.jpg"
    os.truncate(path, path.stat().st_size // 2)
    refused("torchvision:Flowers102", rf"^image 1 \({path}\): cannot be read: ", data_root)


def test_vectors_as_labels_are_refused(data_root, monkeypatch):
    class Pets(datasets().CIFAR10):
        def __init__(self, root, train=True, transform=None, target_transform=None):
            self.data = self.targets = None

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Image.new("RGB", (4, 4)), torch.zeros(40)

    monkeypatch.setattr(datasets(), "STL10", Pets)
    refused("torchvision:STL10", "^image 0: must have an integer class label, not Tensor$", data_root)


def test_a_download_brings_files_and_folders_and_keeps_the_mode_of_the_root(data_root, monkeypatch):
    def fake(folder, download, **part):
        (Path(folder) / "folder").mkdir(exist_ok=True)
        (Path(folder) / "folder" / str(part["split"])).write_text("content")
        (Path(folder) / f"{part['split']}.mat").write_text("content")

    data_root.mkdir()
    data_root.chmod(0o750)
    monkeypatch.setattr(datasets(), "SVHN", fake)
    packages.download("SVHN", data_root, [{"split": "train"}, {"split": "test"}])
    found = sorted(str(path.relative_to(data_root)) for path in data_root.rglob("*"))
    assert found == ["folder", "folder/test", "folder/train", "test.mat", "train.mat"]
    assert data_root.stat().st_mode & 0o777 == 0o750


def test_a_missing_package_is_one_line(svhn, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    monkeypatch.setitem(__import__("sys").modules, "scipy.io", None)
    with pytest.raises(
        fedsim.errors.MissingPackageError, match=r"^torchvision\.datasets\.SVHN needs the package scipy"
    ):
        fedsim.load_dataset("svhn", svhn)


@pytest.mark.skipif(not DEBIAN.exists(), reason="needs the Debian package dataset-fashion-mnist")
def test_real_images_of_fashion_mnist(data_root):
    folder = data_root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for path in DEBIAN.glob("*.gz"):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    train, test = fedsim.load_dataset("fashion_mnist", data_root)
    assert (len(train), len(test), train.classes) == (60_000, 10_000, 10)
    inputs, _ = train.gather(torch.arange(60_000))
    assert abs(inputs.mean()) < 1e-3
    assert abs(inputs.std() - 1) < 1e-3
    other, _ = fedsim.load_dataset("torchvision:FashionMNIST", data_root)
    assert torch.equal(other.inputs, train.inputs)


def test_the_experiment_on_cifar10_runs_on_a_few_images(cifar10, data_root):
    """In a quick form: it says that the file fits the data set and the model, nothing about accuracy."""
    quick = [f"data.root={data_root}", "rounds=1", "workers=2", "cohort=2", "local.batch_size=4", "local.epochs=1"]
    result = fedsim.run(load_experiment("cifar10_fedavg", [*quick, "engine=serial"]))
    assert sum(result.history[-1].samples) == 20
    assert result.global_row.isfinite().all()
