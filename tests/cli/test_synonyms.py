"""Hints for keys and names of other libraries: each hint names a key and a component that exist."""

from __future__ import annotations

import re

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment
from fedsim.config.schema import DIRECTIONS
from fedsim.config.tables import keys_called
from fedsim.errors import ExperimentError
from fedsim.synonyms import KEYS, NAMES, NOTES

COMPONENT_NAMES = {name: kind for kind in COMPONENTS for name in registry_of(kind).names()}


def line_of(*words):
    """Return the first error line of an experiment with these words, or "" if it is valid."""
    try:
        load_experiment(None, words)
    except ExperimentError as error:
        return error.lines[0]
    return ""


def settings_in(hint):
    """Return the `key=value` words of a hint."""
    return re.findall(r"(?<![\w.])([a-z][\w.]*=(?:'[^']*'|[^\s,;']+))", hint)


def problems_of(settings):
    """Return the error lines that report an unknown key or an unknown component name, by setting."""
    lines = {setting: line_of(setting.replace("'", "")) for setting in settings}
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
            assert any(re.search(rf"\b{name}\b", each) for each in settings) or name in NAMES, line
            assert not problems_of(settings), line


def test_words_for_keys_lead_to_keys_that_exist():
    assert not problems_of({f"{key}=1" for keys in KEYS.values() for key in keys})
    assert not KEYS.keys() & Experiment.model_fields.keys()


def test_words_for_names_lead_to_names_that_exist():
    assert {name for names in NAMES.values() for name in names} <= COMPONENT_NAMES.keys() | DIRECTIONS.keys() | {
        "to_dataframe"
    }


def test_notes_lead_to_keys_and_names_that_exist():
    for word, note in NOTES.items():
        text = re.sub(r'"(from|def) [^"]*"', "", note).replace("=N", "=1")  # without example code
        settings = [] if note.startswith("in Python") else settings_in(text)
        # imported components may have any parameters
        imported = {setting.partition("=")[0] for setting in settings if ":" in setting}
        settings = [setting for setting in settings if setting.partition(".")[0] not in imported]
        assert not problems_of(settings), note
        assert set(re.findall(r"fedsim list (\w+)", note)) <= COMPONENTS.keys()
        assert word not in COMPONENT_NAMES or any(word in setting for setting in settings), note
