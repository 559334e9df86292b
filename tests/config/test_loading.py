from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from fedsim import Experiment, ExperimentError, load_dataset, load_experiment
from fedsim.comparison import plan_comparison
from fedsim.config.files import read_toml, to_toml
from fedsim.errors import MAX_PROBLEMS, DataError, SettingWarning
from fedsim.models import two_nn


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(
        """
        rounds = 7
        model = "cnn"
        [local]
        epochs = 3
        lr = 0.2
        [server]
        name = "momentum"
        beta = 0.8
        """
    )
    return path


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("rounds=5", lambda e: e.rounds == 5),
        ("seed=0x10", lambda e: e.seed == 16),
        ('engine="serial"', lambda e: e.engine == "serial"),
        ("model=2nn", lambda e: e.model.name == "2nn"),
        ("local.lr=1e-3", lambda e: e.local.params["lr"] == 1e-3),
        ("local.nesterov=false", lambda e: e.local.params["nesterov"] is False),
        ("aggregate.weights=[1, 2, 3, 4]", lambda e: e.aggregate.weights == [1, 2, 3, 4]),
        ("partition={name = 'iid'}", lambda e: e.partition.name == "iid"),
        ("data.root=~/data", lambda e: e.data.root == "~/data"),
        ("data.root=/a=b", lambda e: e.data.root == "/a=b"),
        (" rounds = 5 ", lambda e: e.rounds == 5),
    ],
)
def test_an_override_sets_one_key(word, read):
    assert read(load_experiment(None, [word]))


@pytest.mark.parametrize("name", ["nan", "inf"])
@pytest.mark.parametrize("key", ["attack", "attack.name"])
def test_nan_and_inf_are_names_of_attacks(key, name):
    assert load_experiment(None, [f"{key}={name}", "attack.fraction=0.25"]).attack.name == name


def test_overrides_come_after_the_file_and_the_last_of_two_counts(file):
    experiment = load_experiment(file, ["rounds=6", "local.lr=0.3"])
    assert (experiment.rounds, experiment.local.params["lr"], experiment.local.epochs) == (6, 0.3, 3)
    with pytest.warns(SettingWarning, match="^rounds: is set twice; the last value counts$"):
        assert load_experiment(file, ["rounds=5", "rounds=6"]).rounds == 6
    with pytest.warns(SettingWarning, match="^data.name: is set twice; the last value counts$"):
        assert load_experiment(file, ["data=huggingface", "data.name=mnist5k"]).data.name == "mnist5k"


@pytest.mark.parametrize("key", ["server", "server.name"])
def test_naming_another_component_leaves_the_parameters_of_the_one_before_behind(file, key):
    line = '^server.beta = 0.8: does not apply to server.name = "sgd", because it was set for "momentum"$'
    with pytest.warns(SettingWarning, match=line):
        assert load_experiment(file, [f"{key}=sgd"]).server == Experiment().server
    assert load_experiment(file, [f"{key}=momentum"]).server.params["beta"] == 0.8, (
        "the same component keeps its parameters"
    )


NAMED = {
    "data": "mnist5k",
    "partition": "contiguous",
    "sampling": "round_robin",
    "local": "adam",
    "aggregate": "median",
    "server": "momentum",
    "attack": "sign_flipping",
}


@pytest.mark.filterwarnings("ignore:.* not apply to")
@pytest.mark.parametrize("as_source", ["tables", "dotted", "words", "file"])
def test_name_names_the_component_of_every_table(as_source, tmp_path):
    """Files, dicts and words agree; the records store the table's own key."""
    more = {"attack.fraction": 0.3, "cohort": 2}
    words = [f"{table}.name={name}" for table, name in NAMED.items()]
    if as_source == "words":
        named = load_experiment({"server": {"name": "adam", "b1": 0.5}, "partition": "iid", **more}, words)
    elif as_source == "dotted":
        named = load_experiment({f"{table}.name": name for table, name in NAMED.items()} | more)
    elif as_source == "tables":
        named = load_experiment({table: {"name": name} for table, name in NAMED.items()}, **more)
    else:
        (tmp_path / "x.toml").write_text("".join(f'{table}.name = "{name}"\n' for table, name in NAMED.items()))
        named = load_experiment(tmp_path / "x.toml", ["server.name=momentum"], **more)
    assert named == load_experiment(more, [f"{table}={name}" for table, name in NAMED.items()])
    stages = load_experiment({"aggregate": {"name": [{"name": "bucketing", "s": 3}, {"name": "krum"}]}, "workers": 20})
    assert [stage["rule"] for stage in stages.aggregate.rule] == ["bucketing", "krum"]
    assert all("name" not in stage for stage in stages.aggregate.rule)


def test_a_tables_own_keys_stay_when_another_component_is_named():
    source = {"aggregate": {"rule": "tests.components:clipped_mean", "c": 2.0}, "data": {"name": "mnist", "root": "/x"}}
    with pytest.warns(SettingWarning, match=r'^aggregate.c = 2.0: does not apply to aggregate.rule = "mean"'):
        experiment = load_experiment(source, ["data.name=fashion_mnist", "aggregate.rule=mean"])
    assert experiment.data.root == "/x"
    assert experiment.aggregate.params == {}


@pytest.mark.parametrize("source", [[1], 3, {1, 2}])
def test_a_source_that_is_not_an_experiment_gives_a_one_line_error(source):
    with pytest.raises(ExperimentError, match=": must be an Experiment, a table "):
        load_experiment(source)


@pytest.mark.filterwarnings("ignore:.* not apply to")
@pytest.mark.parametrize("noise", [{}, {"noise": "pareto"}, {"noise": {"name": "pareto", "alpha": 3.0}}])
@pytest.mark.parametrize("word", ["clock.noise=lognormal", "clock.noise.name=lognormal"])
def test_a_component_named_within_a_table_is_overridden_like_any_other(noise, word):
    words = ["clock.noise.sigma=0.25", word, "clock.slowdown=linear"]
    for order in (words, words[::-1]):
        clock = load_experiment({"mode": "clock", "clock": {"latency": 0.5, **noise}}, order).clock
        assert (clock.noise.name, clock.noise.params) == ("lognormal", {"sigma": 0.25})
        assert (clock.slowdown.name, clock.latency) == ("linear", 0.5)


def test_overriding_changes_no_source():
    source = {"local": {"lr": 0.1}}
    load_experiment(source, ["local.lr=0.2"])
    assert source == {"local": {"lr": 0.1}}
    experiment = Experiment()
    assert load_experiment(experiment, ["rounds=3"]).rounds == 3
    assert experiment.rounds == 10


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rounds", '"rounds": expected key=value'),
        ("=5", '"=5": expected key=value'),
        ("a..b=5", '"a..b=5": expected key=value'),
        ("rounds.x=5", "rounds.x = 5: "),
        ("attack={fraction=0.2,workers=[1]}", "attack: set only one of f, fraction, workers"),
        ("local.lr.x=5", "local.lr.x = 5: "),
    ],
)
def test_a_wrong_override_gives_a_one_line_error(word, message, file):
    with pytest.raises(ExperimentError) as caught:
        load_experiment(file, [word])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = 0", r"x\.toml: rounds = 0: must be greater than 0$"),
        (b"rounds = ", r'x\.toml: cannot be read as TOML: .*: "rounds ="; write key = value'),
        (b"\xff\xfe", r"x\.toml: cannot be read as TOML"),
        (None, r"x\.toml: no such file"),
    ],
)
def test_an_error_of_a_file_is_one_line_that_names_it(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ExperimentError, match=message) as caught:
        load_experiment(tmp_path / "x.toml")
    assert len(caught.value.lines) == 1
    with pytest.raises(ExperimentError):
        load_experiment(tmp_path)


def test_parameters_that_toml_has_no_type_for_survive_it(file):
    experiment = load_experiment(file, ["model=tests.models:sized", "model.hidden=[8, 4]"])
    assert experiment.model.params["hidden"] == (8, 4)
    file.write_text(to_toml(experiment))
    assert load_experiment(file, allow_imports=True) == experiment


EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").rglob("*.toml"))
LARGE = "byzantine_mnist"  # 15,300 runs


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.stem == LARGE)) for path in EXPERIMENTS]
)
def test_every_experiment_of_the_project_loads(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.stem == "lora":  # starts from the model of another run
        (tmp_path / "runs/lora_start").mkdir(parents=True)
        save_file(two_nn().state_dict(), tmp_path / "runs/lora_start/model.safetensors")
    if "comparison" in read_toml(path):
        assert plan_comparison(path).name == path.stem
    else:
        assert load_experiment(path).name == path.stem


def test_a_part_of_a_large_comparison_loads():
    part = plan_comparison(LARGE, words=["partition=iid", "attack.fraction=0.24", "seed=0"])
    assert (part.name, part.shape) == (LARGE, "31 aggregate.rule x 5 attack.name x 3 local.lr")


def test_a_comparison_is_not_a_single_experiment():
    with pytest.raises(ExperimentError, match="describes several experiments; use fedsim compare$"):
        load_experiment({"comparison": {"seed": [0, 1]}})


def test_dotted_keys_in_python_are_nested_keys():
    tables = {"local.lr": 0.1, "local": {"steps": 5}, "model.hidden": 8, "model": "2nn", "clock.slowdown.name": "equal"}
    experiment = load_experiment(tables)
    assert (experiment.local.params["lr"], experiment.local.steps) == (0.1, 5)
    assert (experiment.model.name, experiment.model.params["hidden"]) == ("2nn", 8)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"local.lr": 0.1, "local": {"lr": 0.2}}, "local.lr: is set twice"),
        ({"model.name": "net", "model": "2nn"}, "model.name: is set twice"),
        ({"local.name": "sgd", "local.algorithm": "adam"}, "local.algorithm: is set twice"),
        ({"local.steps": 5, "local": {"epochs": 2}}, "local: set only one of epochs, steps"),
        ({"rounds.x": 1, "rounds": 2}, "rounds.x = 1: rounds is not a table"),
        ({"local.lrr": 1}, r'local.lrr = 1: unknown key .*did you mean "lr"'),
    ],
)
def test_a_contradiction_between_dotted_and_nested_keys_gives_a_one_line_error(tables, line):
    with pytest.raises(ExperimentError, match=f"^{line}") as caught:
        load_experiment(tables)
    assert len(caught.value.lines) == 1


def test_keywords_change_keys_of_an_experiment(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('rounds = 5\nmodel = "2nn"\n[local]\nlr = 0.5\nepochs = 3\n')
    experiment = load_experiment(path, rounds=3, local={"epochs": 2}, **{"model.hidden": 8})
    assert (experiment.rounds, experiment.model.params["hidden"]) == (3, 8)
    assert (experiment.local.params["lr"], experiment.local.epochs) == (0.5, 2)
    assert load_experiment(Experiment(rounds=5), rounds=3).rounds == 3


@pytest.mark.filterwarnings("ignore:.* not apply to")
def test_a_default_name_in_a_saved_file_follows_the_changes(tmp_path):
    saved = tmp_path / "experiment.toml"
    saved.write_text(to_toml(Experiment()))
    assert load_experiment(saved).name == "net-mnist5k-weighted_mean"
    assert load_experiment(saved, ["aggregate.rule=median", "model=2nn"]).name == "2nn-mnist5k-median"
    assert plan_comparison(saved, {"aggregate.rule": ["mean", "median"]}).name == "net-mnist5k"
    saved.write_text(to_toml(Experiment(name="own")))
    assert load_experiment(saved, ["aggregate.rule=median"]).name == "own"
    assert plan_comparison(saved, {"aggregate.rule": ["mean", "median"]}).name == "own"


def test_a_stage_of_a_rule_with_a_parameter_that_is_unset_can_be_saved(tmp_path):
    experiment = load_experiment({"aggregate": {"rule": ["nnm", {"rule": "multi_krum"}], "f": 1}, "workers": 6})
    (tmp_path / "saved.toml").write_text(to_toml(experiment))
    assert load_experiment(tmp_path / "saved.toml") == experiment


def test_a_name_that_is_given_by_both_keys_is_an_error_with_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text('aggregate = {rule = "mean", name = "mean"}')
    with pytest.raises(ExperimentError, match=r'mine\.toml: aggregate\.name = "mean": is a synonym of aggregate\.rule'):
        load_experiment(tmp_path / "mine.toml")


def test_the_first_of_very_many_wrong_keys_are_reported_with_a_hint():
    with pytest.raises(ExperimentError) as caught:
        load_experiment({f"key{number}": 1 for number in range(2_000)})
    *lines, more = caught.value.lines
    assert all("unknown key; allowed: " in line for line in lines)
    assert (len(lines), more) == (MAX_PROBLEMS, f"and {2_000 - MAX_PROBLEMS} more problems")


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_files_may_have_a_byte_order_mark_and_must_be_utf_8(tmp_path, ending):
    if ending == "yaml":
        pytest.importorskip("yaml")
    path, line = tmp_path / f"e.{ending}", {"toml": "rounds = 7", "yaml": "rounds: 7"}[ending]
    path.write_text(f"# é\n{line}\n", encoding="utf-8-sig")
    assert load_experiment(path).rounds == 7
    path.write_text(f"{line}\n# é\n", encoding="latin-1")
    with pytest.raises(ExperimentError, match=r'line 2 is not UTF-8 \("é" in Latin-1\); save the file as UTF-8'):
        load_experiment(path)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return the folder `study` in the working directory, with a table."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "points.csv").write_text("x,y\n" + "0.5,a\n1.5,b\n" * 20)
    return tmp_path / "study"


@pytest.mark.parametrize("text", ['data = "points.csv"', '[data]\nname = "csv"\npath = "points.csv"'])
def test_a_relative_path_in_a_file_is_found_beside_the_file(study, text):
    (study / "x.toml").write_text(text)
    data = load_experiment("study/x.toml").data
    assert (data.name, data.params["path"]) == ("csv", "study/points.csv")
    with pytest.raises(DataError, match=r"^points\.csv: cannot be read: no such file"):
        load_dataset("csv", path="points.csv")
    (study.parent / "points.csv").symlink_to(study / "points.csv")
    (study / "x.toml").write_text(text)
    assert load_experiment("study/x.toml").data.params["path"] == "points.csv"
    (study.parent / "points.csv").unlink()
    (study.parent / "points.csv").write_text("x,y\n")
    with pytest.raises(
        ExperimentError, match=r'data(\.path)? = "points\.csv": exists in the working directory and also'
    ):
        load_experiment("study/x.toml")
    (study / "metrics.jsonl").write_text("")  # of a run, whose paths are relative to its working directory
    assert load_experiment("study/x.toml").data.params["path"] == "points.csv"


def test_paths_of_a_comparison_are_found_beside_its_file(study):
    (study / "x.toml").write_text('data = "csv"\n[comparison]\n"data.path" = ["points.csv"]\nseed = [0, 1]')
    plan = plan_comparison("study/x.toml")
    assert {run.experiment.data.params["path"] for run in plan.runs} == {"study/points.csv"}
