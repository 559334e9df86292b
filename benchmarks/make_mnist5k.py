"""Create the file of the data set `mnist5k`, fedsim/data/mnist5k.npz, from MNIST's own files.

    python benchmarks/make_mnist5k.py --root ~/.cache/fedsim/data

The existing file itself determines (`index`) which images of MNIST's training set it contains and in which order. The
same MNIST files give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import fedsim
from fedsim.data.sources import MNIST5K_FILE, default_root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--root", type=Path, default=default_root(), help="data folder that contains MNIST/raw")
    write(np.load(MNIST5K_FILE)["index"], parser.parse_args().root)


def write(index: np.ndarray, root: Path) -> None:
    """Write the images and labels at the positions `index` of MNIST's training set."""
    train, _ = fedsim.load_dataset("mnist", root)
    images, labels = (values.numpy()[index].astype(np.uint8) for values in (train.inputs[:, 0], train.targets))
    np.savez_compressed(MNIST5K_FILE, images=images, labels=labels, index=index)


if __name__ == "__main__":
    main()
