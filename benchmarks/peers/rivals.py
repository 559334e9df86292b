"""The programs that are measured beside fedsim, with exact versions, and their environments.

Each rival has its own virtual environment in the ignored folder `.peers`. PyTorch and NumPy come from fedsim's own
environment, so that all programs compute with the same kernels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

from common import ROOT

ENVIRONMENTS = ROOT / ".peers"


class Rival(NamedTuple):
    """A program `benchmarks/peers/NAME.py`.

    Attributes:
        requirements: packages to install, with exact versions. Without any, the program needs no environment.
        same_batches: whether the program trains on the given batches, and not on its own.
    """

    requirements: tuple[str, ...] = ()
    same_batches: bool = True


RIVALS = {
    "bare": Rival(),
    "pfl": Rival(("pfl==0.6.0",)),
    "flower": Rival(("flwr[simulation]==1.42.0",)),
    "blazefl": Rival(("--ignore-requires-python", "blazefl[contrib,reproducibility]==2.0.3")),  # asks for Python 3.12
    "fedlab": Rival(("fedlab==1.3.0",)),
    "fluke": Rival(("fluke-fl==0.8.1",)),
}


def python_of(name: str) -> str:
    """Return the Python interpreter that runs a rival."""
    return str(ENVIRONMENTS / name / "bin" / "python") if RIVALS[name].requirements else sys.executable


def command_of(name: str) -> list[str]:
    return [python_of(name), "-m", f"benchmarks.peers.{name}"]


def is_ready(name: str) -> bool:
    return Path(python_of(name)).exists()


def set_up(name: str) -> None:
    """Create a rival's environment, or complete it."""
    if not RIVALS[name].requirements:
        return
    folder = ENVIRONMENTS / name
    venv.create(folder, with_pip=True)
    base = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(base, "fedsim.pth").write_text("\n".join(others) + "\n")  # behind the environment's own packages
    subprocess.run([python_of(name), "-m", "pip", "install", "--quiet", *RIVALS[name].requirements], check=True)
    shutil.rmtree(Path(base, "benchmarks"), ignore_errors=True)  # opacus, which fluke needs, has a package of this name
