"""The wheel that pip installs works outside the checkout with only the core packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement

import fedsim
from tests.commands import ROOT
from tests.declared import ABSENT, PROJECT, distributions_of, modules_besides, normal, oldest


def test_all_installs_every_extra_except_those_of_developers():
    extras = PROJECT["optional-dependencies"]
    (every,) = extras["all"]
    assert Requirement(every).extras == extras.keys() - {"all", "docs", "test"}


def test_every_hint_installs_this_project_and_not_another_one():
    """`fedsim` on PyPI is another project, so no hint, page or extra may name `fedsim[...]`."""
    files = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "CHANGELOG.md"]
    files += [
        path for folder in ("fedsim", "docs", "benchmarks", "project_template") for path in (ROOT / folder).rglob("*")
    ]
    texts = [path.read_text() for path in files if path.suffix in {".md", ".py", ".toml", ".ipynb"}]
    named = {name for text in texts for name in re.findall(r"(fedsim[\w-]*)\[[a-z]+[,\]]", text)}
    assert named == {PROJECT["name"]} == {"fedsim-sgd"}


def test_the_constraints_pin_every_required_package_to_a_version_that_is_allowed():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {normal(pin.name): next(iter(pin.specifier)).version for pin in pinned}
    assert {str(pin.specifier)[:2] for pin in pinned} == {"=="}
    extras = PROJECT["optional-dependencies"]
    (own,) = (line for line in map(Requirement, extras["test"]) if line.name == PROJECT["name"])
    lines = [*PROJECT["dependencies"], *extras["test"], *(line for extra in own.extras for line in extras[extra])]
    for wanted in map(Requirement, lines):
        if wanted.name != PROJECT["name"] and wanted.marker is None:
            assert wanted.specifier.contains(versions[normal(wanted.name)]), wanted
            assert {spec.operator for spec in wanted.specifier} == {">="}, f"{wanted}: a cap is wrong sooner or later"


def test_the_oldest_versions_are_those_that_are_declared():
    allowed = {line.name: line.specifier for line in map(Requirement, PROJECT["dependencies"])}
    pins = [Requirement(line) for line in oldest().splitlines()]
    assert [pin.name for pin in pins] == list(allowed)
    assert all(allowed[pin.name].contains(next(iter(pin.specifier)).version) for pin in pins)


def test_the_citation_has_what_the_format_requires_and_agrees_with_the_package():
    """The keys are those of Citation File Format 1.2.0."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    known = {
        *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords"),
        *("license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact"),
        *("repository-code", "title", "type", "url", "version"),
    }
    assert {"authors", "cff-version", "message", "title"} <= citation.keys() <= known
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["authors"] == PROJECT["authors"] == [{"name": "The fedsim developers"}]
    assert (citation["title"], citation["version"]) == (fedsim.__name__, fedsim.__version__)
    assert (citation["abstract"], citation["license"]) == (PROJECT["description"], PROJECT["license"])
    assert citation["keywords"] == PROJECT["keywords"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the contents of the wheel, which is built from the source distribution."""
    built, folder = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(built.glob("*.tar.gz"))) == 1
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    (information,) = folder.glob("*.dist-info")
    core = distributions_of(PROJECT["name"], metadata.Distribution.at(information).requires)
    absent = modules_besides(core)
    assert {"torch", "matplotlib", "pydantic"}.isdisjoint(absent)
    assert {"pytest", "scipy", "plotly"} <= absent
    (folder / "sitecustomize.py").write_text(ABSENT.format(names=absent))
    return folder


@pytest.mark.slow
def test_the_core_runs_compares_and_draws_without_an_extra_or_the_checkout(installed, tmp_path):
    def fedsim(*words):
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fedsim", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment)

    for words in (
        ["list"],
        ["run", "rounds=2", "--out", "default"],
        ["run", "mnist_sync_sgd", "data=mnist5k", "rounds=1", "engine=processes", "processes=2", "--out", "spawned"],
        ["run", "aggregate=signguard", "rounds=1", "--out", "clustered"],
        ["compare", "which_rule", "rounds=1", "seed=0", "workers=5", "--jobs", "1", "--out", "compared"],
        ["plot", "compared"],
        ["doctor"],
        ["new", "project"],
    ):
        done = fedsim(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    for name in ("default/curve.png", "default/model.safetensors", "compared/results.csv", "compared/heatmap.png"):
        assert (tmp_path / name).is_file(), name
    refused = fedsim("report", "default")
    line = "error: a report needs the package plotly, which is not installed: pip install plotly jinja2\n"
    assert (refused.returncode, refused.stderr) == (2, line)
