"""Packages that pip installs with fedsim and its extras, read from `pyproject.toml` and from installed metadata.

python -m tests.declared tested > constraints.txt   # the installed versions
python -m tests.declared oldest > oldest.txt        # the oldest versions of the core packages
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

from fedsim.toml import tomllib
from tests.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABSENT = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
"""  # a program that starts with these lines cannot import the packages {names}


COMMENT = """\
# The versions of all packages of the core and of the extra `test` with which fedsim was tested and its stored results
# were computed: python -m pip install -e . -c constraints.txt. A version that Python 3.10 cannot use is for newer ones.
# To renew: update the packages, run all tests, then python -m tests.declared tested > constraints.txt
"""


def requirements():
    """Return the requirements of this project as in the metadata of its wheel."""
    extras = PROJECT["optional-dependencies"].items()
    return PROJECT["dependencies"] + [f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines]


def distributions_of(requirement, own_requirements):
    """Return the names of all distributions that `pip install REQUIREMENT` installs.

    own_requirements: requirements of this project.
    """
    done, waiting = set(), [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        name = normal(wanted.name)
        for extra in {"", *wanted.extras} - {extra for of, extra in done if of == name}:
            done.add((name, extra))
            lines = map(Requirement, own_requirements if name == PROJECT["name"] else _requirements_of(name))
            waiting += [line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra})]
    return {name for name, _ in done}


def _requirements_of(name):
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:  # a CPU build of PyTorch comes without the CUDA libraries
        return ()


@functools.cache
def owners():
    """Return the names of the distributions that own each installed top-level module."""
    return {module: set(map(normal, names)) for module, names in metadata.packages_distributions().items()}


def modules_besides(distributions):
    """Return the names of the installed top-level modules that do not belong to these distributions."""
    return {module for module, names in owners().items() if module != "fedsim" and not distributions & names}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints():
    """Return the text of `constraints.txt`: the versions of all packages that are installed for the extra `test`.

    A version that needs a newer Python than fedsim is only for this Python or newer ones.
    """
    oldest = PROJECT["requires-python"].removeprefix(">=")
    lines = []
    for name in sorted(distributions_of(f"{PROJECT['name']}[test]", requirements()) - {PROJECT["name"]}):
        package = metadata.distribution(name)
        needed = re.search(r">=\s*(\d+\.\d+)", package.metadata["Requires-Python"] or "")
        older = needed and tuple(map(int, needed[1].split("."))) > tuple(map(int, oldest.split(".")))
        marker = f'; python_version >= "{needed[1]}"' if older else ""
        lines.append(f"{name}=={package.version.partition('+')[0]}{marker}\n")
    return COMMENT + "".join(lines)


def oldest():
    """Return constraints with the oldest version of each core package that `pyproject.toml` allows."""
    wanted = map(Requirement, PROJECT["dependencies"])
    return "".join(f"{line.name}{line.specifier}\n".replace(">=", "==") for line in wanted)


if __name__ == "__main__":
    print({"tested": constraints, "oldest": oldest}[sys.argv[1]](), end="")
