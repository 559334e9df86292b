"""Hints for keys and names of other libraries: each hint names a key and a component that exist."""

from __future__ import annotations

import functools
import re

import pytest

import fedsim
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment
from fedsim.config.tables import keys_called
from fedsim.errors import ExperimentError
from fedsim.hints.meanings import VOCABULARY, answer
from fedsim.hints.names import synonyms, words_of

COMPONENT_NAMES = {name: kind for kind in COMPONENTS for name in registry_of(kind).names()}


@functools.cache
def line_of(word):
    """Return the first error line of an experiment with this word, or "" if it is valid."""
    try:
        load_experiment(None, [word])
    except ExperimentError as error:
        return error.lines[0]
    return ""


def settings_in(hint):
    """Return the `key=value` words of a hint."""
    return re.findall(r"(?<![\w.-])([a-z][\w.]*=(?:'[^']*'|[^\s,;']+))", hint)


def problems_of(settings):
    """Return the error lines that report an unknown key or an unknown component name, by setting."""
    lines = {setting: line_of(setting.replace("'", "")) for setting in settings}
    lines = {
        key: line for key, line in lines.items() if f" {key.partition('=')[0]}=" not in line.partition("; ")[2]
    }  # needs its component
    wrong = {key: line for key, line in lines.items() if "unknown key" in line and "is a parameter of" not in line}
    return {**wrong, **{key: line for key, line in lines.items() if "no such" in line}}


def test_the_name_of_a_component_in_a_wrong_place_is_answered_with_its_own_key():
    for name, kind in COMPONENT_NAMES.items():
        elsewhere = f"clock.slowdown.name={name}" if kind != "slowdowns" else f"engine={name}"
        for word in [elsewhere, *([] if keys_called(Experiment, name) else [f"{name}=true"])]:
            line = line_of(word)
            if not re.search("unknown key|no such", line):
                continue  # this kind has a component of the same name
            settings = settings_in(line.partition("; ")[2])
            assert any(re.search(rf"\b{name}\b", each) for each in settings) or answer(name), line
            assert not problems_of(settings), line


def test_answers_lead_to_keys_and_names_that_exist():
    for phrase, text in synonyms("answers").items():
        if phrase.startswith("fedsim_"):
            continue
        settings = settings_in(text.replace("=N", "=1").replace("device={}", "device=cpu"))
        names = {
            key: next(
                name
                for name, kind in COMPONENT_NAMES.items()
                if key in COMPONENTS[kind][0].replace(".name", "").split(", ")
            )
            for key in VOCABULARY.component_keys
        }
        filled = [each.replace("{}", names.get(each.partition("=")[0], "1")) for each in settings]
        # imported components may have any parameters
        imported = {setting.partition("=")[0] for setting in filled if ":" in setting or "FILE" in setting}
        filled = [setting for setting in filled if setting.partition(".")[0] not in imported]
        assert not problems_of(filled), phrase
        assert set(re.findall(r"fedsim list ([\w-]+)", text)) <= COMPONENTS.keys()


def test_names_of_recorded_numbers_exist():
    names = {name for names in synonyms("names").values() for name in names.split()}
    owners = (fedsim, fedsim.Result, fedsim.Comparison)
    attributes = {name for owner in owners for name in (*dir(owner), *getattr(owner, "__dataclass_fields__", ()))}
    assert names - attributes == {"train_loss", "weights", "dropped"}  # only in records


def test_phrases_of_the_same_words_have_one_answer():
    answers = {}
    for phrase, text in synonyms("answers").items():
        assert answers.setdefault(words_of(phrase), text) == text, phrase


@pytest.mark.parametrize(
    "names",
    [
        ("num_clients", "nClients", "numberOfWorkers", "node-count", "total_users"),
        ("clients_per_round", "num_workers_per_round", "workersPerRound"),
        ("local_epochs", "num-local-epochs", "epochs_local"),
        ("learning_rate", "lr", "step_size", "eta"),
        ("byzantine_ratio", "fraction_malicious", "attackers_pct"),
    ],
)
def test_variants_of_a_name_have_the_same_words(names):
    assert len({words_of(name) for name in names}) == 1
