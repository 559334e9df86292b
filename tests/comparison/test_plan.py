from __future__ import annotations

import pytest

from fedsim import Experiment, ExperimentError, load_experiment
from fedsim.comparison import ComparisonSettings, plan_comparison
from fedsim.core.input_limits import leaves_of
from fedsim.errors import SettingWarning


def rules_of(plan):
    return [run.experiment.aggregate.rule for run in plan.runs]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        """
        name = "rules"
        rounds = 7
        [server]
        name = "momentum"
        beta = 0.8
        [comparison]
        seed = [0, 1]
        "aggregate.rule" = ["mean", "weighted_mean"]
        local.lr = [0.1, 0.2]
        """
    )
    return path


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["seed=0,1"], "logistic-tiny-weighted_mean"),
        (["aggregate.rule=mean,median"], "logistic-tiny"),
        (["aggregate.rule=krum,mean", "seed=0,1"], "logistic-tiny"),
        (["model=logistic,2nn", "local.lr=0.1,0.2"], "tiny-weighted_mean"),
        (["mode=clock", "policy=asgd,sync"], "logistic-tiny"),
        (["seed=0,1", "name=mine"], "mine"),
    ],
)
def test_the_default_name_of_a_comparison_depends_on_no_axis(words, name):
    plan = plan_comparison({"model": "logistic", "data": "tests.components:tiny"}, words=words)
    assert plan.name == name
    assert {run.experiment.name for run in plan.runs} == {name}


def test_the_last_axis_varies_fastest_and_the_seed_fastest_of_all(file):
    plan = plan_comparison(file)
    assert list(plan.axes) == ["aggregate.rule", "local.lr", "seed"]
    points = [(r, lr, s) for r in ("mean", "weighted_mean") for lr in (0.1, 0.2) for s in (0, 1)]
    assert [tuple(run.point.values()) for run in plan.runs] == points
    assert [(e.aggregate.rule, e.local.params["lr"], e.seed) for e in (run.experiment for run in plan.runs)] == points
    assert [run.id for run in plan.runs][:2] == ["mean-lr0.1-seed0", "mean-lr0.1-seed1"]
    base = dict(leaves_of(plan.base))
    assert (base["rounds"], base["server.beta"], base["workers"]) == (7, 0.8, 4)
    assert not {"seed", "aggregate.rule", "local.lr"} & base.keys()


def test_a_list_of_stages_is_a_value_of_an_axis_that_takes_whole_tables(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('[comparison]\naggregate = [["nnm", "mean"], "median"]\n')
    for plan in (plan_comparison(path), plan_comparison(None, words=['aggregate=["nnm","mean"],median'])):
        assert rules_of(plan) == [[{"rule": "nnm"}, {"rule": "mean"}], "median"]
        assert [run.id for run in plan.runs] == ["nnm+mean", "median"]
    with pytest.raises(ExperimentError, match=r"is also set by a comparison axis; remove one of the two"):
        plan_comparison(path, words=["aggregate.rule=mean"])


def test_words_and_axes_replace_those_of_the_source(file):
    assert plan_comparison(file, {"local.lr": [0.5]}).axes["local.lr"] == [0.5]
    plan = plan_comparison(file, words=["seed=5,6,7", "local.lr=0.3", "rounds=2", "workers=2,3"])
    assert plan.axes == {"aggregate.rule": ["mean", "weighted_mean"], "workers": [2, 3], "seed": [5, 6, 7]}
    assert {run.experiment.local.params["lr"] for run in plan.runs} == {0.3}
    assert {run.experiment.rounds for run in plan.runs} == {2}


@pytest.mark.parametrize("key", ["local.algorithm", "local.name"])
def test_a_word_replaces_the_axis_of_the_component_that_it_names(key):
    """The axis is replaced by a command-line word, and by a keyword argument in Python."""
    tables = {"comparison": {key: ["sgd", "adamm"], "seed": [0, 1]}}
    for word in ("local.algorithm", "local.name"):
        by_word, by_change = (
            plan_comparison(tables, words=[f"{word}=fedprox"]),
            plan_comparison(tables, **{word: "fedprox"}),
        )
        for plan in (by_word, by_change):
            assert plan.axes == {"seed": [0, 1]}
            assert {run.experiment.local.algorithm for run in plan.runs} == {"fedprox"}


def test_a_table_on_an_axis_updates_the_table_of_that_name():
    base = {"aggregate": {"weights": "uniform", "rule": "mean"}, "local": {"lr": 0.5, "batch_size": 7}}
    plan = plan_comparison(
        base, {"aggregate": ["weighted_mean", {"rule": "mean"}], "local": [{}, {"lr": 0.1, "steps": 3}]}
    )
    assert rules_of(plan) == ["weighted_mean"] * 2 + ["mean"] * 2
    assert {run.experiment.aggregate.weights for run in plan.runs} == {"uniform"}
    local = plan.runs[1].experiment.local
    assert (local.params["lr"], local.steps, local.epochs, local.batch_size) == (0.1, 3, None, 7)
    assert [run.id for run in plan.runs[:2]] == ["weighted_mean-base", "weighted_mean-lr=0.1,steps=3"]


@pytest.mark.parametrize("axis", ["server", "server.name"])
def test_another_component_does_not_get_the_parameters_of_the_one_before(file, axis):
    line = '^server.beta = 0.8: does not apply to server.name = "sgd", "adam", because it was set for "momentum"$'
    with pytest.warns(SettingWarning, match=line) as caught:
        plan = plan_comparison(file, {axis: ["sgd", "momentum", "adam"], "seed": [0, 1]})
    assert len(caught) == 1
    servers = {run.experiment.server.name: run.experiment.server.params for run in plan.runs}
    assert servers["sgd"] == Experiment().server.params
    assert servers["momentum"]["beta"] == 0.8


def test_a_parameter_set_for_all_runs_belongs_to_the_component_that_an_axis_names():
    plan = plan_comparison(
        None, words=["aggregate.rule=tests.components:clipped_mean,tests.components:clipping", "aggregate.c=2.5"]
    )
    assert [run.experiment.aggregate.params for run in plan.runs] == [{"c": 2.5}] * 2


@pytest.mark.parametrize(
    ("source", "words", "expected"),
    [
        ({}, [], (False, False)),
        ({"records": {"curve": True}}, [], (False, True)),
        ({}, ["records.model=true"], (True, False)),
        (Experiment(records={"model": True}), [], (True, False)),
    ],
)
def test_model_and_curve_are_written_only_on_request(source, words, expected):
    records = plan_comparison(source, {"seed": [0, 1]}, words).runs[0].experiment.records
    assert (records.model, records.curve) == expected


@pytest.mark.parametrize(
    ("source", "words", "chosen"),
    [
        ({}, [], False),
        ({"engine": "processes"}, [], True),
        ({}, ["processes=2"], True),
        ({}, ["engine=serial,processes"], True),
        ({"policy": "hogwild"}, ["mode=clock,race"], True),
        ({"policy": "hogwild"}, ["mode=clock"], False),
        (Experiment(rounds=3), [], False),
        (Experiment(engine="processes"), [], True),
    ],
)
def test_a_comparison_records_whether_its_engine_is_chosen(source, words, chosen):
    assert plan_comparison(source, {"seed": [0, 1]}, words).engine_chosen is chosen


def test_all_points_are_checked_and_each_problem_is_one_line_with_its_point():
    with pytest.raises(ExperimentError) as caught:
        plan_comparison(None, words=["aggregate.rule=mean,krumm", "local.lr=0.1,-1.0", "workers=2,0", "seed=0,1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("aggregate.rule=mean local.lr=0.1 workers=0 seed=0: workers = 0: must be greater than 0")
    assert any(": local.lr = -1.0: must be greater than" in line for line in lines)
    assert any(': aggregate.rule = "krumm": no such aggregation rule' in line for line in lines)
    assert all(line.endswith("more of 16 runs)") for line in lines)


def test_each_run_is_the_experiment_that_its_point_describes():
    """The runs of a combination are checked only once."""
    base = {"data": "tests.components:tiny", "records": {"model": False, "curve": False}}
    for run in plan_comparison(
        base, {"seed": [3, 1, 2], "local.lr": [0.1, 0.2], "aggregate.rule": ["mean", "krum"]}
    ).runs:
        alone = Experiment(
            **base, seed=run.point["seed"], local={"lr": run.point["local.lr"]}, name=run.experiment.name
        )
        alone = load_experiment(alone, [f"aggregate.rule={run.point['aggregate.rule']}"])
        assert run.experiment == alone


def test_a_wrong_seed_is_a_problem_of_all_combinations():
    with pytest.raises(ExperimentError, match=r"^local.lr=0.1 seed=-1: seed = -1: .* \(and 1 more of 4 runs\)$"):
        plan_comparison({"data": "tests.components:tiny"}, {"local.lr": [0.1, 0.2], "seed": [0, -1]})


def test_an_axis_of_a_key_that_is_no_table_is_refused():
    with pytest.raises(ExperimentError, match="rounds.x"):
        plan_comparison(None, words=["rounds.x=1,2"])


def test_axes_that_set_one_key_are_refused():
    rules = ["mean", "weighted_mean"]
    with pytest.raises(ExperimentError, match=r"^aggregate.rule: is set by two comparison axes; remove one"):
        plan_comparison({}, {"aggregate": [{"rule": rule} for rule in rules], "aggregate.rule": rules})
    line = r'^aggregate.rule = "mean": is also set by a comparison axis; remove one of the two$'
    with pytest.raises(ExperimentError, match=line):
        plan_comparison({}, {"aggregate.rule": rules}, aggregate="mean")


def test_ids_differ_even_if_labels_do_not():
    axes = {"aggregate.rule": ["tests.components:clipped_mean"], "aggregate.c": [1.0, 2.0], "name": ["a_b", "A_b"]}
    ids = [run.id for run in plan_comparison(None, axes).runs]
    assert len({id.lower() for id in ids}) == 4
    long = plan_comparison(None, {"data.root": ["x" * 300, "x" * 299 + "y"]}).runs
    assert len({run.id for run in long}) == 2
    assert all(len(run.id) < 120 for run in long)


ON_THE_CLOCK = """
    mode = "clock"
    [clock]
    noise = "lognormal"
    [local]
    epochs = 2
    [comparison]
    target = 0.9
    seed = [0, 1]
    variant = [
        { label = "sync", sync = "gradients" },
        { label = "fedbuff", policy = { name = "fedbuff", k = 3 }, local = { steps = 5, lr = 0.1 } },
    ]
    "clock.noise.sigma" = [0.1, 0.2]
"""


@pytest.fixture
def variants(tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(ON_THE_CLOCK)
    return path


def test_variants_differ_in_several_tables_at_once(variants):
    plan = plan_comparison(variants)
    assert [run.id for run in plan.runs][::2] == [
        f"{name}-sigma{sigma}-seed0" for name in ("sync", "fedbuff") for sigma in (0.1, 0.2)
    ]
    sync, buffered = plan.runs[0].experiment, plan.runs[-1].experiment
    assert (sync.sync, sync.policy.name, sync.local.epochs, sync.local.params["lr"]) == ("gradients", "sync", 2, 0.05)
    assert (buffered.sync, buffered.policy.name, buffered.policy.params["k"]) == ("parameters", "fedbuff", 3)
    assert (buffered.local.epochs, buffered.local.steps, buffered.local.params["lr"]) == (None, 5, 0.1)
    assert (sync.clock.noise.params, buffered.clock.noise.params) == ({"sigma": 0.1}, {"sigma": 0.2})


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"polcy": "asgd"}, 'variant=b: polcy = "asgd": unknown key; did you mean "policy"?'),
        (
            {"policy": {"name": "ssp", "k": 3}},
            "variant=b: policy.k = 3: unknown key (the policy is ssp); k is a parameter of",
        ),
        ({"local": {"steps": 3, "epochs": 1}}, "variant=b: local: set only one of epochs, steps"),
        ({"local": {"lr": -1.0}}, "variant=b: local.lr = -1.0: must be"),
        ({"workers": 3}, "variant=b workers=2: workers: is set by two comparison axes"),
    ],
)
def test_a_wrong_variant_raises_an_error_of_one_line(variant, message):
    axes = {"variant": [{"label": "a"}, {"label": "b", **variant}]}
    more = {"workers": [2]} if "workers" in variant else {}
    with pytest.raises(ExperimentError) as caught:
        plan_comparison({"mode": "clock"}, {**axes, **more})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_target_stands_in_the_comparison_or_is_given(variants):
    assert plan_comparison(variants).settings.target == 0.9
    assert plan_comparison(variants, {"target": 0.8}).settings.target == 0.8
    assert plan_comparison(variants, settings=ComparisonSettings(target=0.95)).settings.target == 0.95
    assert plan_comparison({}, {"seed": [0], "target": 0.5}).settings.target == 0.5
    assert plan_comparison({}, {"seed": [0]}).settings.target is None


@pytest.mark.parametrize("target", [97, 0, -0.1, "high", True, [0.9]])
def test_a_target_is_an_accuracy(target):
    with pytest.raises(ExperimentError, match=r"^target = .*: must be a test accuracy greater than 0 and at most 1$"):
        plan_comparison({}, {"seed": [0], "target": target})


def test_dotted_keys_beside_a_comparison_are_kept_and_dotted_keys_of_a_comparison_are_added_to_it():
    axes = {"attack": ["alie", "ipm"], "attack.fraction": [0.2, 0.4]}
    assert len(plan_comparison({"rounds": 1, "workers": 5, "comparison": axes, "local.lr": 0.1}).runs) == 4
    source = {"comparison": {"seed": [0, 1]}, "comparison.local.lr": [0.1, 0.2]}
    assert plan_comparison(source, words=["records.model=true"]).axes == {"local.lr": [0.1, 0.2], "seed": [0, 1]}
    assert source == {"comparison": {"seed": [0, 1]}, "comparison.local.lr": [0.1, 0.2]}
    with pytest.raises(ExperimentError, match=r"^comparison.seed: is set twice; remove one of the two$"):
        plan_comparison({"comparison": {"seed": [0, 1]}, "comparison.seed": [2, 3]})


def test_an_axis_can_be_a_tuple_of_objects():
    rules = (lambda updates: updates.mean(0), lambda updates: updates.median(0).values)
    assert len(plan_comparison({"workers": 3, "comparison": {"aggregate.rule": rules}}).runs) == 2


@pytest.mark.filterwarnings("ignore:.* not apply to")
@pytest.mark.parametrize(
    "variants",
    [
        [{"label": "a"}, {"label": "b", "local.lr": 0.3}],
        [{"label": "a"}, {"label": "b", "local": {"lr": 0.3, "momentum": 0.5}}],
        [{"label": "a", "local.steps": 3}, {"label": "b"}],
        [{"label": "a", "model": "logistic"}, {"label": "b", "model": {"name": "2nn", "hidden": 8}}, {"label": "c"}],
        [{"label": "a", "attack": {"name": "alie", "z": 2.0}}, {"label": "b", "attack": "ipm"}, {"label": "c"}],
        [{"label": "a", "server.name": "adam"}, {"label": "b"}],
    ],
)
def test_a_comparison_is_planned_again_from_its_base_and_axes(variants):
    """Also if only some values of an axis set a key or name another component."""
    tables = {"local": {"lr": 0.123}, "model": {"name": "2nn", "hidden": 16}, "server": {"name": "momentum"}}
    tables |= {"attack": {"name": "sign_flipping", "scale": 3.0, "workers": [0]}, "data": "tests.components:tiny"}
    plan = plan_comparison(tables, {"variant": variants, "seed": [0, 1]})
    again = plan_comparison(plan.base, plan.axes, to_run=False)
    assert [run.experiment for run in again.runs] == [run.experiment for run in plan.runs]
    assert again.base == plan.base
