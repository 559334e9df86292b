"""The check before PyTorch is imported reports errors in the words of the later check and refuses nothing else."""

from __future__ import annotations

import copy
import json

import pytest

import fedsim
from fedsim.cli.early_check import check_names_of_comparison, check_names_of_run, problems_with_names
from fedsim.comparison import plan_comparison
from fedsim.config.files import experiments
from fedsim.errors import MAX_PROBLEMS
from tests import test_frozen_numbers

MISTAKES = [
    "roundz=3",
    "rounds.x=3",
    "local.momentun=0.9",
    "local={momentun=0.9}",
    "local.lr=0.1 local=ditto local.lamda=3",
    "attack.scale=3 attack=sign_flipping attack.fraction=0.2 attack.scael=2",
    "aggregate.ff=1",
    "aggregate.rule=medain",
    "aggregate=nnm",
    "aggregate=<f>",
    'aggregate=["nmm","median"]',
    "model=MyNet",
    "data.augment=[{name='flip',pixels=3}]",
    "processors=[{name='clip',norm=1.0}]",
    "engine=sreial",
    "engine=batched batched.widht=3",
    "distributed.hook=fp61",
    "policy.kk=3 mode=clock policy=fedbuff",
]
IN_COMPARISONS = [
    "aggregate.rule=medain,krum seed=0,1",
    "local.lrr=0.1,0.2",
    "aggregate.rule=mean,trimmed_mean aggregate.m=1",
    "aggregate={rule='krum',ff=1},mean",
    "rounds.x=1,2 rounds=3 seed=0,1",
]
LEFT_TO_THE_LATER_CHECK = {"rounds.x=3", "aggregate=nnm", 'aggregate=["nmm","median"]'}


def lines_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except fedsim.ExperimentError as error:
        return set(error.lines)
    return set()


@pytest.mark.parametrize("words", [*MISTAKES, *IN_COMPARISONS])
def test_a_wrong_key_or_name_has_the_words_of_the_later_check(words):
    if words in IN_COMPARISONS:
        late = lines_of(plan_comparison, None, None, words.split())
        early = lines_of(check_names_of_comparison, None, words.split(), skip_invalid=False)
    else:
        late = lines_of(fedsim.load_experiment, None, words.split())
        early = lines_of(check_names_of_run, None, words.split())
    assert late
    assert early <= late
    assert bool(early) == (words not in LEFT_TO_THE_LATER_CHECK)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('aggregate.rule = "mean"', "aggregate.name.foo=1"),
        ('aggregate = {rule = "mean", name = "mean"}', "rounds=2"),
    ],
)
def test_a_name_that_is_given_by_both_keys_is_an_error_with_the_file(text, word, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    file = str(tmp_path / "mine.toml")
    (line,) = lines_of(check_names_of_run, file, [word])
    assert line.startswith(f"{file}: ")
    assert lines_of(fedsim.load_experiment, file, [word]) == {line}


@pytest.mark.parametrize("word", ["local.algorithm=sgd", "local.name=sgd"])
def test_a_word_replaces_the_axis_of_a_file_whatever_its_key_is_called(word, tmp_path):
    (tmp_path / "mine.toml").write_text('[comparison]\nlocal.name = ["momentun", "adam"]\nseed = [0, 1]\n')
    file = str(tmp_path / "mine.toml")
    assert lines_of(check_names_of_comparison, file, [], skip_invalid=False)
    assert lines_of(check_names_of_comparison, file, [word], skip_invalid=False) == set()
    assert lines_of(plan_comparison, file, None, [word]) == set()


def test_the_keys_and_axes_of_a_file_are_checked(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[local]\nmomentun = 0.9\n")
    assert lines_of(check_names_of_run, str(file), []) == lines_of(fedsim.load_experiment, file)
    assert lines_of(check_names_of_run, str(file), ["local=adam"]) == set(), (
        "changing the client algorithm drops the old one's parameters"
    )
    (tmp_path / "mine.yaml").write_text("local.momentun: 0.9\n")
    assert len(lines_of(check_names_of_run, str(tmp_path / "mine.yaml"), [])) == 1
    file.write_text('[comparison]\naggregate.rule = ["krumm", "mean"]\nskip_invalid = true\n')
    assert lines_of(check_names_of_comparison, str(file), [], skip_invalid=False) == set()
    file.write_text('[comparison]\naggregate.rule = ["krumm", "mean"]\nworst = "aggregate.rule"\n')
    assert lines_of(check_names_of_comparison, str(file), [], skip_invalid=False) == lines_of(plan_comparison, file)
    assert (
        lines_of(check_names_of_comparison, str(file), ["aggregate.rule=mean", "seed=0,1"], skip_invalid=False) == set()
    )


@pytest.mark.parametrize(
    "words",
    [
        "",
        "model=tests.models:sized model.anything=3 aggregate=registered_by_that_import",
        "device=cuda:1 engine=serial local={algorithm='adam',lr=0.1} local.schedule=cosine local.schedule.warmup=1",
        "local.epochs={uniform=[1,5]} clock.departures={3=1.0} mode=clock policy=asgd",
        "data.augment=['flip',{name='shift',pixels=2}] processors=['sign'] metrics=[{name='top_k',label='t'}]",
        'aggregate=[{rule="nnm",f=1},"krum"] aggregate.f=1',
        "distributed.hook.name=powersgd distributed.hook.matrix_approximation_rank=2 engine=distributed",
    ],
)
def test_what_is_right_or_cannot_be_decided_passes(words):
    assert lines_of(check_names_of_run, None, words.split()) == set()


def test_of_very_many_wrong_keys_the_first_are_reported():
    assert len(problems_with_names({f"key{number}": 1 for number in range(50_000)}, [])) == MAX_PROBLEMS


@pytest.mark.parametrize("name", experiments())
def test_all_experiments_of_fedsim_pass(name):
    check_names_of_comparison(name, [], skip_invalid=False)
    check_names_of_run(name, [])
    check_names_of_run(name, ["engine=serial", "model=2nn"])


def test_the_experiments_of_the_frozen_numbers_pass():
    for name, tables in test_frozen_numbers.experiments().items():
        local = {key: value for key, value in tables.items() if "tests." not in json.dumps(value)}
        assert problems_with_names(copy.deepcopy(local), []) == [], name
        wrong = copy.deepcopy(local)
        wrong["attack"] = {**wrong.get("attack", {}), "xyzzy": 1}
        assert len(problems_with_names(wrong, [])) == 1, name
