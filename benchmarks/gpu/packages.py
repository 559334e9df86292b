"""Packages for a machine that has PyTorch but not the rest: `--pack` collects them, `--packages` installs them.

Imports neither PyTorch nor fedsim, nor anything else that would have to be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALONG_WITH_PYTORCH = ("torch", "torchvision", "numpy")  # which a machine for PyTorch has
LARGE = ("matplotlib",)  # for figures: not carried
FOR_TESTS = ("pytest", "pytest-xdist", "hypothesis")
DATA = "mnist.tar.xz"
PIP = (sys.executable, "-m", "pip")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pack(folder: Path, data: Path | None, python: str) -> None:
    """Put the wheels that fedsim and its tests need beside PyTorch into a folder, and MNIST where `data` has it.

    Args:
        data: a folder that holds MNIST/raw.
        python: the version, such as "3.12", for which wheels are downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [*requirements(), *FOR_TESTS]
    names = {_name(word) for word in ALONG_WITH_PYTORCH + LARGE}
    platforms = [f"--platform={each}" for each in PLATFORMS]
    options = ["--only-binary=:all:", f"--python-version={python}", *platforms, "-q", "-d", str(folder)]
    done = subprocess.run([*PIP, "download", *options, *wanted], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"--pack: {_last_line(done.stderr)}")
    for wheel in folder.glob("*.whl"):
        if _name(wheel.name.partition("-")[0]) in names:
            wheel.unlink()
    if data is not None and (data / "MNIST" / "raw").is_dir():
        with tarfile.open(folder / DATA, "w:xz", preset=9) as archive:
            archive.add(data / "MNIST", "MNIST")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 1e6:7.2f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:7.2f} MB  in {folder}; not included: {', '.join(ALONG_WITH_PYTORCH + LARGE)}")


def requirements() -> list[str]:
    """What pyproject.toml asks for, without what is not carried."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.S | re.M)
    assert listed is not None
    words = re.findall(r'^\s*"([^"]+)"', listed[1], re.M)
    words = [word.partition(";")[0].strip() for word in words]  # the other machine may have another Python
    return [word for word in words if _name(word) not in {_name(name) for name in ALONG_WITH_PYTORCH + LARGE}]


def install(folder: Path, target: Path) -> str | None:
    """Install the wheels of a folder that are missing here, or older here, into a new folder; the problem, if any."""
    wheels = [path for path in sorted(folder.glob("*.whl")) if _is_newer(path)]
    if not wheels:
        return None if folder.is_dir() else f"{folder}: is not a folder"
    names = sorted({f"{wheel.name.split('-')[0]}=={wheel.name.split('-')[1]}" for wheel in wheels})
    options = ["--no-index", "--no-deps", f"--find-links={folder}", f"--target={target}", "-q", "--no-warn-conflicts"]
    command = [*PIP, "install", *options, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return None if done.returncode == 0 else _last_line(done.stderr)


def unpack_data(folder: Path, target: Path) -> Path | None:
    """Unpack the data that was packed beside the wheels; the folder to read them from, None where there are none."""
    if not (folder / DATA).is_file():
        return None
    with tarfile.open(folder / DATA) as archive:
        archive.extractall(target, filter="data")
    return target


def _is_newer(wheel: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    try:
        return _numbers(metadata.version(name)) < _numbers(version)
    except metadata.PackageNotFoundError:
        return True


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["pip failed"])[-1]


def _name(requirement: str) -> str:
    """The normalized name in a requirement or a wheel's name."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+?(?=[^\w.-]|$)", requirement)[0]).lower()
