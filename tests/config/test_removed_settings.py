"""Settings that a change drops, because they belong to the component before, are named in one line."""

from __future__ import annotations

import warnings

import pytest

import fedsim
from fedsim.comparison.plan import plan_comparison
from fedsim.config.load import load_experiment
from fedsim.errors import SettingWarning
from tests.commands import ended, start

ADAM = {"server": {"name": "adam", "lr": 0.37}, "rounds": 1}


def lines_of(action):
    """Return the warnings about settings that `action()` causes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if warning.category is SettingWarning]


YOGI = 'server.lr = 0.37: does not apply to server.name = "yogi", because it was set for "adam"; set it again'
HIDDEN = 'model.hidden = 64: does not apply to model.name = "2nn", because it was set for "cnn"; set it again'


@pytest.mark.parametrize(
    ("tables", "words", "expected"),
    [
        (ADAM, ["server=yogi"], [YOGI]),
        (ADAM, ["server.name=yogi"], [YOGI]),
        (ADAM, ['server={name="yogi"}'], [YOGI]),
        (ADAM, ["server=yogi", "server.lr=0.1"], []),
        (ADAM, ["server=adam"], []),
        (ADAM, ["server.lr=0.1"], []),
        ({"server": "adam"}, ["server=yogi"], []),
        ({"model": {"name": "cnn", "hidden": 64, "channels": 3}}, ["model=2nn"], [HIDDEN]),  # channels: from the data
        (  # `algorithm` is unset, so the rate was set for the default
            {"local": {"lr": 0.3, "steps": 4}},
            ["local.algorithm=adam"],
            ['local.lr = 0.3: does not apply to local.algorithm = "adam", because it was set for "sgd"; set it again'],
        ),
        ({"local": {"lr": 0.05}}, ["local.algorithm=local_only"], []),  # 0.05 is the default of local_only too
        ({"local": {"epochs": 3}}, ["local.steps=4"], []),
        ({"local": {"steps": {"uniform": [1, 5]}}}, ["local.steps=4"], []),
        ({"partition": "iid"}, ["partition=dirichlet"], []),
        (
            {"aggregate": {"name": "multi_krum", "m": 2}},
            ['aggregate.rule=["nnm","median"]'],
            [
                'aggregate.m = 2: does not apply to aggregate.rule = [{rule = "nnm"}, {rule = "median"}], because it '
                'was set for "multi_krum"'
            ],
        ),
        (
            {"clock": {"noise": {"name": "pareto", "alpha": 3.0}}},
            ["clock.noise=lognormal"],
            [
                'clock.noise.alpha = 3.0: does not apply to clock.noise.name = "lognormal", because it was set for '
                '"pareto"'
            ],
        ),
        (
            {"local": {"lr": 0.3, "steps": 5}},
            ["local={lr=0.1}"],
            ["local.steps = 5: does not apply, because a new table replaces local; write it into the new table"],
        ),
    ],
)
def test_only_settings_that_are_lost_are_named(tables, words, expected):
    assert lines_of(lambda: load_experiment(tables, words)) == expected


def test_a_run_in_python_names_them_and_uses_the_defaults():
    experiment = load_experiment(ADAM)
    for server in ("yogi", {"name": "yogi"}):
        with pytest.warns(SettingWarning, match="^server.lr = 0.37: does not apply") as caught:
            result = fedsim.run(experiment, model="logistic", data="tests.components:tiny", workers=2, server=server)
        assert len(caught) == 1
        assert result.experiment.server.params["lr"] == load_experiment({"server": "yogi"}).server.params["lr"] != 0.37


TOML = """
rounds = 1
model = "logistic"
data = "tests.components:tiny"
workers = 2
records.figures = []
[local]
lr = 0.3
[comparison]
seed = [0, 1]
[[comparison.variant]]
label = "plain"
[[comparison.variant]]
label = "adam"
local.algorithm = "adam"
[[comparison.variant]]
label = "adagrad"
local.algorithm = "adagrad"
[[comparison.variant]]
label = "adam, own rate"
local = { algorithm = "adam", lr = 0.01 }
"""
LOCAL = (
    'local.lr = 0.3: does not apply to local.algorithm = "adam", "adagrad", because it was set for "sgd"; set it again'
)


def test_a_comparison_names_them_once_for_all_its_values(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(TOML)
    assert lines_of(lambda: plan_comparison(path, allow_imports=True)) == [LOCAL]
    axes = {"server": ["adam", "yogi", "adagrad"], "local.steps": [1, 2], "seed": [0, 1]}
    line = YOGI.replace('"yogi"', '"yogi", "adagrad"')
    assert lines_of(lambda: plan_comparison(ADAM, axes)) == [line]
    assert lines_of(lambda: plan_comparison(ADAM, {"server": ["adam", {"name": "yogi", "lr": 0.1}]})) == []


def test_a_stored_comparison_is_read_again_without_a_warning(tmp_path):
    (tmp_path / "x.toml").write_text(TOML)
    run = lambda: fedsim.compare(tmp_path / "x.toml", out=tmp_path / "out", jobs=1, allow_imports=True)  # noqa: E731
    assert lines_of(run) == [LOCAL]
    assert lines_of(lambda: fedsim.load_comparison(tmp_path / "out", allow_imports=True)) == []


def test_the_command_line_prints_one_line(tmp_path):
    (tmp_path / "x.toml").write_text('server = { name = "adam", lr = 0.37 }\n')
    words = ["-m", "fedsim", "run", "x.toml", "server=yogi", "--dry-run"]
    codes, _, errors = ended([start(*words, cwd=tmp_path)])
    assert (codes, errors) == ([0], [f"warning: {YOGI}\n"])


def test_defaults_that_a_stored_experiment_contains_are_not_named(tmp_path):
    fedsim.run({"model": "2nn", "rounds": 1, "engine": "serial", "records": {"figures": []}}, tmp_path / "run")
    words = ["model=mlp", "model.inputs=784", "local.algorithm=fedprox", "server=momentum", "partition=dirichlet"]
    for source in (tmp_path / "run" / "experiment.toml", load_experiment(model="2nn")):
        assert lines_of(lambda source=source: load_experiment(source, words)) == []
    changed = load_experiment(model={"name": "2nn", "hidden": 30})
    assert lines_of(lambda: load_experiment(changed, ["model=mlp"])) == [
        'model.hidden = 30: does not apply to model.name = "mlp", because it was set for "2nn"; set it again'
    ]
