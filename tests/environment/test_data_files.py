from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

import fedsim
from fedsim.data import checksums
from fedsim.data.idx import PARTS
from fedsim.errors import DataError
from tests.data.test_sources import idx_bytes

NAMES = [name for pair in PARTS.values() for name in pair]
PLACES = (os.environ.get("FEDSIM_DATA"), "/usr/share/datasets")  # where the standard data sets may be


@pytest.fixture
def standard(data_root, monkeypatch):
    """A data set in torchvision's layout, 6 training and 4 test images, that counts as the standard one."""
    folder = data_root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for train, n in ((True, 6), (False, 4)):
        (folder / PARTS[train][0]).write_bytes(idx_bytes(np.arange(n * 784).reshape(n, 28, 28) % 256))
        (folder / PARTS[train][1]).write_bytes(idx_bytes(np.arange(n)))
    contents = {name: (folder / name).read_bytes() for name in NAMES}
    monkeypatch.setattr(checksums, "MNIST", {name: (len(each), zlib.crc32(each)) for name, each in contents.items()})
    return folder


def flip_a_bit(path, place=-2):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found_and_the_file_named(standard, data_root, name):
    assert len(fedsim.load_dataset("mnist", data_root)[0]) == 6
    flip_a_bit(standard / name)
    size, checksum = checksums.MNIST[name]
    expected = (
        rf"{re.escape(str(standard / name))}: is damaged: its {size:,} bytes have the CRC-32 [0-9a-f]{{8}}, and those "
        rf"of the standard data set have {checksum:08x}; remove it, .*, say data.verify=false$"
    )
    with pytest.raises(DataError, match=expected):
        fedsim.load_dataset("mnist", data_root)


def test_a_damaged_data_set_ends_a_program_with_one_line(standard, data_root, cli):
    flip_a_bit(standard / NAMES[0])
    result = cli("run", "data.dataset=mnist", f"data.root={data_root}", "model=logistic", "rounds=1")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"error: {standard / NAMES[0]}: is damaged" in result.stderr


def test_files_of_another_length_are_another_data_set(standard, data_root):
    (standard / NAMES[0]).write_bytes(idx_bytes(np.ones((5, 28, 28))))
    (standard / NAMES[1]).write_bytes(idx_bytes(np.ones(5)))
    assert len(fedsim.load_dataset("mnist", data_root)[0]) == 5


def test_a_data_set_in_the_place_of_a_standard_one_is_read_on_request(standard, data_root):
    flip_a_bit(standard / NAMES[1])
    train, _ = fedsim.load_dataset("mnist", data_root, verify=False)
    assert train.targets.tolist() == [0, 1, 2, 3, 0, 5]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "no archive"])
def test_a_damaged_archive_is_named_with_its_size(standard, data_root, damage):
    path = standard / f"{NAMES[0]}.gz"
    path.write_bytes(gzip.compress((standard / NAMES[0]).read_bytes(), mtime=0))
    (standard / NAMES[0]).unlink()
    assert len(fedsim.load_dataset("mnist", data_root)[0]) == 6
    whole = path.read_bytes()
    if damage == "flipped":
        flip_a_bit(path, place=len(whole) // 2)
    else:
        path.write_bytes({"truncated": whole[:100], "empty": b"", "no archive": b"<html>404</html>"}[damage])
    with pytest.raises(DataError, match=rf"{path}.*\([\d,]+ bytes\).*; remove it, so that it is downloaded again$"):
        fedsim.load_dataset("mnist", data_root)


def test_a_truncated_file_is_told_with_the_size_it_has_and_should_have(standard, data_root):
    path = standard / NAMES[0]
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=rf"{path}: is damaged: 3000 bytes, 4720 expected for \(6, 28, 28\); remove it"):
        fedsim.load_dataset("mnist", data_root)


@pytest.mark.parametrize("known", [checksums.MNIST, checksums.FASHION_MNIST])
def test_the_known_sizes_are_those_of_60000_and_10000_images(known):
    assert {name: size for name, (size, _) in known.items()} == {
        NAMES[0]: 16 + 60_000 * 784,
        NAMES[1]: 8 + 60_000,
        NAMES[2]: 16 + 10_000 * 784,
        NAMES[3]: 8 + 10_000,
    }


@pytest.mark.parametrize(
    ("known", "folders"),
    [
        (checksums.MNIST, ("MNIST/raw", "mnist")),
        (checksums.FASHION_MNIST, ("FashionMNIST/raw", "fashion-mnist")),
    ],
    ids=["mnist", "fashion_mnist"],
)
def test_the_known_checksums_are_those_of_the_files(known, folders):
    """Where they are: in $FEDSIM_DATA, or from the Debian package dataset-fashion-mnist."""
    found = [Path(place) / folder for place in PLACES if place for folder in folders]
    found = [folder for folder in found if folder.is_dir()]
    if not found:
        pytest.skip("the data set is not here")
    for name, (size, checksum) in known.items():
        packed = found[0] / f"{name}.gz"
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else (found[0] / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (size, checksum), name
