"""Experiments in YAML files and in OmegaConf configurations."""

from __future__ import annotations

import sys

import pytest

import fedsim
from fedsim.comparison import plan_comparison
from fedsim.config.load import describe
from fedsim.errors import ExperimentError, MissingPackageError

EXPERIMENT = """
rounds: 2
workers: 3
model: {name: 2nn, hidden: 20}
aggregate:
  rule:
    - nnm
    - rule: trimmed_mean
      f: 1
local.lr: 1e-2   # dotted keys are those of a table
local.steps: 4
data.augment: []
cohort: ~
"""
COMPARISON = f"""{EXPERIMENT}
comparison:
  local: [{{lr: 0.1}}, {{lr: 0.2}}]
  partition: [iid, contiguous]
  seed: [0, 1]
"""
OF_PACKAGE = pytest.mark.usefixtures("yaml")


@pytest.fixture
def yaml():
    return pytest.importorskip("yaml")


@pytest.fixture
def write(tmp_path):
    def write(text, name="experiment.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@OF_PACKAGE
@pytest.mark.parametrize("name", ["experiment.yaml", "experiment.yml", "EXPERIMENT.YAML"])
def test_a_yaml_file_is_an_experiment(write, name):
    expected = fedsim.Experiment(
        rounds=2,
        workers=3,
        model={"name": "2nn", "hidden": 20},
        aggregate={"rule": ["nnm", {"rule": "trimmed_mean", "f": 1}]},
        local={"lr": 0.01, "steps": 4},
    )
    assert fedsim.load_experiment(write(EXPERIMENT, name)).resolved() == expected.resolved()


@OF_PACKAGE
def test_the_commands_take_yaml_files(write, cli):
    write(EXPERIMENT)
    done = cli("run", "experiment.yaml", "rounds=1", "engine=serial", "records.figures=[]", "--out", "run")
    assert done.exit_code == 0, done.output
    assert fedsim.load_run("run").experiment.local.params["lr"] == 0.01
    write(COMPARISON, "comparison.yaml")
    done = cli("compare", "comparison.yaml", "--dry-run")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 8
    assert "local=lr=0.2 partition=contiguous seed=1" in done.stdout


@OF_PACKAGE
def test_scalars_equal_those_of_the_core_schema(write):
    text = "a: [no, yes, true, False, .inf, -.INF, 1e-3, -.5, 3., +7, 010, 0x10, 1_000, 12:30, 2024-01-01, '1', ~, '']"
    expected = ["no", "yes", True, False, float("inf"), -float("inf"), 0.001, -0.5, 3.0, 7, 10]
    expected += ["0x10", "1_000", "12:30", "2024-01-01", "1", None, ""]
    assert describe(write(text))["a"] == expected
    assert describe(write("on: 1\n3: null\n")) == {"on": 1, "3": None}
    assert describe(write("")) == describe(write("# nothing\n")) == {}


@OF_PACKAGE
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rounds: 1\nrounds: 2", 'line 2: cannot be read as YAML: "rounds" is set twice'),
        ("local: {lr: 1, lr: 2}", 'line 1: cannot be read as YAML: "lr" is set twice'),
        ("rounds: 1\nlocal.lr: 1\nlocal: {lr: 2}", "local.lr: is set twice"),
        ("a: &x [1]\nb: *x", "line 2: cannot be read as YAML: aliases (*) are not allowed"),
        ("a: !!python/object/apply:os.system [echo]", "could not determine a constructor for the tag"),
        ("a: !!timestamp 2024-01-01", "could not determine a constructor for the tag"),
        ("? [a]\n: b", "line 1: cannot be read as YAML: a key must be a name"),
        ("rounds: 1\n workers: 2", "line 2: cannot be read as YAML: "),
        ("a: \x07", "cannot be read as YAML: contains characters that YAML does not allow"),
        ("rounds: 1\n---\nrounds: 2", "cannot be read as YAML: but found another document"),
        ("[1]", "must be one table of keys and values"),
        ("a: " + "[" * 5000, "tables and lists must not be nested more than 16 levels deep"),
        ("? " * 5000, "tables and lists must not be nested more than 16 levels deep"),
        (f"seed: {'9' * 5000}", "Exceeds the limit"),
        (f"seed: {2**70}", "seed: integers must have at most 64 bits, not 71"),
        ("local: {lr: 1e-3x}", "local.lr"),
        ("date: 2024-01-01", 'date = "2024-01-01": unknown key'),
        ("<<: {rounds: 1}", "unknown key"),
    ],
)
def test_what_no_experiment_holds_gives_a_one_line_error(write, text, line):
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(write(text))
    assert line in str(caught.value)
    assert len(caught.value.lines) == 1


@OF_PACKAGE
def test_a_yaml_file_from_elsewhere_may_not_import(write):
    with pytest.raises(ExperimentError, match="allow_imports=True"):
        fedsim.load_experiment(write("model: tests.models:sized"))
    assert fedsim.load_experiment(write("model: tests.models:sized"), allow_imports=True)


def test_a_yaml_file_without_pyyaml_gives_a_one_line_error(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"experiment\.yaml needs the package yaml, .* pip install pyyaml$"):
        fedsim.load_experiment(write("rounds: 1"))


def test_a_configuration_of_omegaconf_is_a_table(tiny_experiment):
    omegaconf = pytest.importorskip("omegaconf")
    tables = {**tiny_experiment, "aggregate": {"rule": ["nnm", "median"]}}
    model = {"name": "2nn", "hidden": "${experiment.local.batch_size}"}
    experiment = omegaconf.OmegaConf.create({"experiment": {**tables, "model": model}}).experiment
    assert fedsim.load_experiment(experiment).model.params["hidden"] == 16
    result = fedsim.run(experiment, rounds=1)
    assert result.experiment.aggregate.label == "nnm + median"
    comparison = omegaconf.OmegaConf.create({**tables, "comparison": {"seed": [0, 1]}})
    assert len(plan_comparison(comparison).runs) == 2
    with pytest.raises(omegaconf.errors.MissingMandatoryValue, match="rounds"):
        fedsim.run(omegaconf.OmegaConf.create({"rounds": "???"}))
