"""A run imports what it needs: torchvision even if its operators do not fit the PyTorch build, but no compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fedsim
from fedsim.errors import DataError
from fedsim.system import packages
from tests.commands import ROOT
from tests.declared import PROJECT


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RARELY_USED = [
    "datasets",
    "flwr",
    "jinja2",
    "lightning",
    "matplotlib",
    "pandas",
    "plotly",
    "rich",
    "torch._dynamo",
    "torchvision",
    "typer",
]


def test_packages_are_imported_on_first_use_and_no_compiler_by_runs_and_probes():
    """torch._dynamo takes seconds to import, creates a folder, and needs packages that fedsim does not install."""
    code = f"""
import sys, fedsim
print([name for name in ("torch", "pydantic") if name in sys.modules])
import fedsim.comparison
from fedsim.config.components import registry_of
print([name for name in {RARELY_USED} if name in sys.modules])
print([each.name for each in registry_of("partitions") if "parameters" in vars(each) and each.name != "iid"])
import torch
from fedsim.training.operations import DataDependenceCheck
from fedsim.engines.auto import FlopCount
with DataDependenceCheck(): torch.ones(2).detach()
with FlopCount(): torch.ones(2, 2) @ torch.ones(2, 2)
from fedsim.core.randomness import seed_globally
with seed_globally(torch.Generator(), torch.device("cuda")): torch.rand(2)
from fedsim.runs.setup import task_of
for model in ("resnet20", "char_lstm", "gpt"):
    data = dict(data="shakespeare", task="next_token") if model != "resnet20" else dict()
    task_of(fedsim.Experiment(model=model, workers=2, **data), torch.device("cpu"))
local = dict(algorithm="fedper", personal=["*bias"], steps=1)
fedsim.run(rounds=1, model="logistic", engine="processes", processes=2, local=local, records=dict(curve=False))
print([name for name in ("torch._dynamo", "torch._inductor", "hypothesis") if name in sys.modules])
"""
    assert in_a_fresh_process(code) == "\n".join(["[]"] * 4)


def with_pytorch_and_numpy_alone(code: str) -> str:
    names = {Requirement(line).name.replace("-", "_") for line in PROJECT["dependencies"]}
    absent = sorted(names - {"torch", "numpy", "tomli"})  # tomli is a part of Python 3.11
    return in_a_fresh_process(f"import sys\nsys.modules |= dict.fromkeys({absent})\n{code}")


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("fedsim.aggregation", "aggregate-your-updates"),
        ("fedsim.byzantine", "attack-your-loop"),
        ("fedsim.data.partitions", "partition-your-data"),
    ],
)
def test_a_loop_with_rules_attacks_or_partitions_needs_only_pytorch_and_numpy(module, page):
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    example = re.search(r"```python.*?\n(.*?)```", text, re.DOTALL)[1]
    printed = re.search(r"```text\n(.*?)\n```", text, re.DOTALL)[1]
    assert with_pytorch_and_numpy_alone(f"import {module}\n{example}") == printed


def test_parameters_of_rules_attacks_and_partitions_are_checked_without_pydantic():
    with_pytorch_and_numpy_alone("""
from fedsim.aggregation import pre_aggregator, rule
from fedsim.byzantine import attack_strategy
from fedsim.data import partition_strategy
for each in (*rule, *pre_aggregator, *attack_strategy, *partition_strategy):
    each.check({name: 1 if field.default is field.empty else field.default for name, field in each.fields.items()})
""")


@pytest.mark.slow
def test_torchvision_imports_and_schemas_are_declared_where_they_are_missing_and_only_there():
    """Runs with fitting and unfitting torchvision builds; the operators are first hidden, then present."""
    code = """
import torch
{before}
from fedsim.system import packages
from tests.commands import ROOT
from tests.declared import PROJECT
print(packages.import_torchvision().datasets.MNIST.__name__)
print(packages._missing_operators is not None, hasattr(torch.ops.torchvision, "nms"))
"""
    present = """
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
    try:
        fits = in_a_fresh_process("import torchvision; print('fits')") == "fits"
    except AssertionError:
        fits = False
    if fits:
        assert in_a_fresh_process(code.format(before="")) == "MNIST\nFalse True"
    else:
        assert in_a_fresh_process(code.format(before="")) == "MNIST\nTrue True"
        assert in_a_fresh_process(code.format(before=present)) == "MNIST\nFalse True"


def test_no_other_module_imports_torchvision():
    package = Path(fedsim.__file__).parent
    pattern = re.compile(r"^\s*import torchvision\b", re.MULTILINE)
    importers = [path.name for path in package.rglob("*.py") if pattern.search(path.read_text())]
    assert importers == ["packages.py"]


def test_embedded_data_does_not_need_it(monkeypatch):
    monkeypatch.delattr(packages, "import_torchvision")
    assert len(fedsim.load_dataset("mnist5k")[0]) == 4000


@pytest.mark.parametrize("error", [OSError("no\nnetwork"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_download_is_one_line_and_leaves_the_disk_as_it_was(tmp_path, monkeypatch, error):
    def fail(root, download):
        (Path(root) / "MNIST" / "raw").mkdir(parents=True)
        (Path(root) / "MNIST" / "raw" / "half.gz").write_bytes(b"half")
        raise error

    monkeypatch.setattr(packages.import_torchvision().datasets, "MNIST", fail)
    with pytest.raises((DataError, KeyboardInterrupt)) as caught:
        packages.download("MNIST", tmp_path / "some" / "typo", [{}])
    assert str(caught.value) in ("downloading MNIST failed: OSError: no network", "")
    assert list(tmp_path.iterdir()) == []
