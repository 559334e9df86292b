"""Damaged and replaced files of MNIST and Fashion-MNIST."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

import fedsim
from fedsim.data.mnist import CHECKSUMS, FILES
from fedsim.errors import DataError
from tests.data.test_sources import idx_bytes, write_mnist

NAMES = [name for pair in FILES.values() for name in pair]
PLACES = (os.environ.get("FEDSIM_DATA"), "/usr/share/datasets")  # possible folders of the standard data sets


@pytest.fixture
def standard(data_root, monkeypatch):
    """6 training and 4 test images that count as the standard data set."""
    folder = write_mnist(data_root)
    contents = {name: (folder / name).read_bytes() for name in NAMES}
    monkeypatch.setitem(CHECKSUMS, "MNIST", {name: (len(each), zlib.crc32(each)) for name, each in contents.items()})
    return folder


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found(standard, data_root, name):
    assert len(fedsim.load_dataset("mnist", data_root)[0]) == 6
    flip_a_bit(standard / name)
    checksum = CHECKSUMS["MNIST"][name][1]
    line = f"{re.escape(str(standard / name))}: is damaged: its CRC-32 is [0-9a-f]{{8}}, not {checksum:08x}; remove it "
    with pytest.raises(DataError, match=line):
        fedsim.load_dataset("mnist", data_root)
    assert len(fedsim.load_dataset("mnist", data_root, verify=False)[0]) == 6


def test_a_damaged_data_set_ends_a_program_with_one_line(standard, data_root, cli):
    flip_a_bit(standard / NAMES[0])
    result = cli("run", "data.dataset=mnist", f"data.root={data_root}", "model=logistic", "rounds=1")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"error: {standard / NAMES[0]}: is damaged" in result.stderr


def test_files_of_other_sizes_are_not_verified(standard, data_root):
    (standard / NAMES[0]).write_bytes(idx_bytes(np.ones((5, 28, 28))))
    (standard / NAMES[1]).write_bytes(idx_bytes(np.ones(5)))
    assert len(fedsim.load_dataset("mnist", data_root)[0]) == 5


@pytest.mark.parametrize(("class_name", "debian"), [("MNIST", "mnist"), ("FashionMNIST", "fashion-mnist")])
def test_the_known_checksums_are_those_of_the_files(class_name, debian):
    folders = [Path(place) / each for place in PLACES if place for each in (f"{class_name}/raw", debian)]
    found = [folder for folder in folders if (folder / NAMES[0]).is_file()]
    if not found:
        pytest.skip("the data set is not here")
    for name, known in CHECKSUMS[class_name].items():
        content = (found[0] / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == known, name
