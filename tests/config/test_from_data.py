"""What an experiment takes from its data: the task, the model, and the dimensions of the model."""

from __future__ import annotations

import re
from collections import namedtuple

import numpy as np
import pytest
from torch import nn

import fedsim
from fedsim.config.files import read_toml
from fedsim.config.from_data import taken_from_data
from fedsim.config.load import load_experiment
from fedsim.data.sources import dataset
from fedsim.models.base import DIMENSIONS, model
from fedsim.runs.session import Session
from fedsim.runs.setup import check_run
from tests.matrix import in_turn

Named = namedtuple("Named", "name")
OFFLINE = "mnist5k", "synthetic", "shakespeare"  # registered data sets that need no file
QUICK = {"rounds": 1, "workers": 2, "engine": "serial", "local": {"steps": 1}, "records": {"figures": []}}


def random(*shape, kind="float32"):
    return (np.random.default_rng(0).random(shape) * 9).astype(kind)


def pair(inputs, targets):
    """Training and test samples, of which the last tests the highest label."""
    return (inputs, targets), (inputs[:3], targets[:3])


LABELS = np.arange(12) % 3
TOKENS = np.arange(12 * 6).reshape(12, 6) % 11
KINDS = {
    "numbers": pair(random(12, 5), LABELS),
    "measurements": pair(random(12, 5), random(12)),
    "vectors": pair(random(12, 5), random(12, 2)),
    "pairs of labels": pair(random(12, 5), LABELS[:, None].repeat(2, 1)),
    "series": pair(random(12, 7, 2), LABELS),
    "grey images": pair(random(12, 1, 20, 20, kind="uint8"), LABELS),
    "colour images": pair(random(12, 3, 32, 32, kind="uint8"), LABELS),
    "wide images": pair(random(12, 3, 24, 32, kind="uint8"), LABELS),
    "tiny images": pair(random(12, 1, 8, 8, kind="uint8"), LABELS),
    "one pixel": pair(random(12, 1, 1, 1, kind="uint8"), LABELS),
    "tokens": pair(TOKENS, np.roll(TOKENS, 1, 1)),
    "text with labels": pair(TOKENS, LABELS),
    "labels from -1": pair(random(12, 5), LABELS - 1),
    "labels up to 2,000": pair(random(12, 5), LABELS * 1_000),
}
ONE_LINE = r"(data|model|task)\.[a-z_]+( = |: )\S+.*"


@pytest.fixture(scope="module")
def session():
    with Session() as session:
        yield session


def refusal(session, **tables):
    """The error line of an experiment whose model does not fit the data, or None."""
    try:
        check_run(fedsim.Experiment(**{**QUICK, **tables}), session, to_run=False)
    except (fedsim.ExperimentError, fedsim.DataError) as error:
        return str(error)
    return None


@in_turn(("name", "kind"), [*map(Named, model.names()), Named("torchvision:squeezenet1_1")], [*KINDS, *OFFLINE])
def test_every_model_fits_the_data_or_is_refused_in_one_line_that_names_a_key(name, kind, session):
    for task in ({}, {"task": "regression"}, {"task": "binary"}):
        line = refusal(session, data=KINDS.get(kind, kind), model=name.name, **task)
        assert line is None or re.fullmatch(ONE_LINE, line), line
        assert "RuntimeError" not in (line or "") or line.endswith("use another model, or images of another size"), line


@pytest.mark.parametrize(
    ("kind", "task", "name", "words"),
    [
        ("numbers", "classification", "mlp", ["5 inputs", "3 classes"]),
        ("measurements", "regression", "mlp", ["5 inputs", "1 output", "task regression"]),
        ("vectors", "regression", "mlp", ["5 inputs", "2 outputs", "task regression"]),
        ("grey images", "classification", "net", ["1 channel", "20x20", "3 classes"]),
        ("colour images", "classification", "net", ["3 channels", "32x32", "3 classes"]),
        ("wide images", "classification", "mlp", ["2,304 inputs", "3 classes"]),
        ("tiny images", "classification", "mlp", ["64 inputs", "3 classes"]),
        ("tokens", "next_token", "char_lstm", ["11 tokens", "11 classes", "task next_token"]),
        ("text with labels", "classification", "char_lstm", ["11 tokens", "one target per sample", "3 classes"]),
    ],
)
def test_unset_task_model_and_dimensions_follow_from_the_data(kind, task, name, words, session):
    experiment = fedsim.Experiment(data=KINDS[kind], **QUICK)
    assert (experiment.task.name, experiment.model.name) == (task, name)
    assert taken_from_data(experiment) == words
    check_run(experiment, session, to_run=False)


@pytest.mark.parametrize(
    ("kind", "tables", "line"),
    [
        (
            "numbers",
            {"model": "net"},
            'model.name = "net": needs square images, but each sample of .* has 5 numbers; .*',
        ),
        ("numbers", {"model": "gpt"}, 'model.name = "gpt": needs tokens, .*; use another model, such as model=mlp'),
        ("tokens", {"model": "2nn"}, 'model.name = "2nn": needs numbers, .* has 6 tokens; .* model=char_lstm'),
        ("wide images", {"model": "cnn"}, ".* needs square images, .* an image of 24x32 pixels with 3 channels; .*"),
        ("tiny images", {"model": "net"}, "model.size = 8: net needs images of at least 16 x 16 pixels; use model=mlp"),
        (
            "numbers",
            {"model": {"name": "mlp", "classes": 2}},
            r"model.classes = 2, but .* has 3 classes \(0 to 2\); remove model.classes or set 3",
        ),
        (
            "grey images",
            {"model": {"name": "cnn", "size": 28}},
            "model.size = 28, but .* has images of 20x20; remove model.size or set 20",
        ),
        (
            "colour images",
            {"model": {"name": "net", "channels": 1}},
            "model.channels = 1, but .* has 3 channels; remove model.channels or set 3",
        ),
        ("vectors", {"model": {"name": "mlp", "classes": 3}}, "model.classes = 3, but .* has 2 outputs; .*"),
        (
            "tokens",
            {"model": {"name": "gpt", "context": 4}},
            "model.context = 4, but .* has samples of length 6; remove model.context or set 6",
        ),
        (
            "tokens",
            {"model": {"name": "char_lstm", "vocabulary": 5}},
            "model.vocabulary = 5, but .* has 11 tokens; remove model.vocabulary or set 11",
        ),
        ("labels from -1", {}, ".* contains the label -1; class labels must be at least 0; renumber them from 0, .*"),
        (
            "labels up to 2,000",
            {},
            "data.name = .*: the largest label is 2000, but most smaller labels do not occur; if the targets are "
            "measured numbers, set task=regression; if they are classes, set model.classes=2001 or renumber .* from 0",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_a_remedy(kind, tables, line, session):
    assert re.fullmatch(line, refusal(session, data=KINDS[kind], **tables))


def test_test_samples_do_not_change_the_dimensions_but_are_checked(session):
    labels, tokens = (random(3, 5), np.array([0, 1, 4])), (TOKENS[:3] + 5, TOKENS[:3])
    data = KINDS["numbers"][0], labels
    assert fedsim.Experiment(data=data).model.params["classes"] == 3
    assert refusal(session, data=data).endswith("has 5 classes (0 to 4); set model.classes=5")
    assert "has 16 tokens; set model.vocabulary=16" in refusal(session, data=(KINDS["tokens"][0], tokens))


class OwnModel(nn.Linear):
    """Takes its dimensions from the data, but keeps its width."""

    def __init__(self, inputs: int, classes: int, size: int = 8) -> None:
        super().__init__(inputs, classes)
        self.size = size


class WithDefaults(nn.Linear):
    def __init__(self, inputs: int = 5, classes: int = 2) -> None:
        super().__init__(inputs, classes)


def test_own_models_take_parameters_without_a_default(session):
    for name in (OwnModel, f"{__name__}:OwnModel"):
        experiment = fedsim.Experiment(data=KINDS["numbers"], model=name, **QUICK)
        assert experiment.model.params == {"inputs": 5, "classes": 3, "size": 8}
        assert taken_from_data(experiment) == ["5 inputs", "3 classes"]
    assert fedsim.run(experiment).model.out_features == 3
    assert "set model.classes=3" in refusal(session, data=KINDS["numbers"], model=WithDefaults)
    assert refusal(session, data=KINDS["numbers"], model={"name": WithDefaults, "classes": 3}) is None


def test_parameters_of_an_unset_model_belong_to_the_model_of_the_data():
    experiment = fedsim.Experiment(data=KINDS["measurements"], model={"hidden": (3,)}, task={"loss": "l1"})
    assert (experiment.model.name, experiment.model.params["hidden"]) == ("mlp", (3,))
    assert load_experiment(experiment, data=KINDS["vectors"]).task.params["loss"] == "l1"


def test_unreadable_data_is_reported_before_parameters_of_a_model_that_it_would_name(tmp_path):
    (tmp_path / "a.txt").write_bytes("\xe9".encode("latin-1") * 900)
    with pytest.raises(fedsim.errors.DataError, match="not UTF-8"):
        fedsim.Experiment(data=tmp_path / "a.txt", model={"layers": 1})
    assert fedsim.Experiment(data=tmp_path / "a.txt", model={"name": "char_lstm", "layers": 1}).awaits_data


def test_what_is_taken_changes_with_the_data_and_what_is_set_does_not():
    experiment = fedsim.Experiment(data=KINDS["tokens"], **QUICK)
    changed = load_experiment(experiment, data=KINDS["measurements"])
    assert (changed.task.name, changed.model.name, changed.model.params["inputs"]) == ("regression", "mlp", 5)
    kept = load_experiment(changed, model={"name": "mlp", "classes": 4, "hidden": (3,)}, task="classification")
    assert load_experiment(kept, data=KINDS["numbers"]).model.params == {"inputs": 5, "hidden": (3,), "classes": 4}


def test_a_run_records_what_it_takes_and_resumes_from_the_record_and_from_the_words(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=random(20, 4), targets=np.arange(20) % 3)
    tables = {**QUICK, "data": {"name": "npz", "path": str(tmp_path / "a.npz")}}
    fedsim.run(tables, tmp_path / "run")
    recorded = read_toml(tmp_path / "run/experiment.toml")
    assert recorded["model"] | {"name": "mlp", "inputs": 4, "classes": 3} == recorded["model"]
    for source in (tables, tmp_path / "run/experiment.toml"):
        assert len(fedsim.run(source, tmp_path / "run", resume=True, rounds=2).history) == 2
    (tmp_path / "a.npz").unlink()
    assert fedsim.load_run(tmp_path / "run").model[-1].out_features == 3


def test_a_comparison_over_data_and_models_resumes_and_is_read_without_its_data(tmp_path, monkeypatch):
    """The data sets have different classes and inputs."""
    monkeypatch.chdir(tmp_path)
    for name, classes in (("a.npz", 3), ("b.npz", 5)):
        np.savez(name, inputs=random(40, classes), targets=np.arange(40) % classes)
    tables, axes = QUICK, {"data": ["a.npz", "b.npz"], "model": ["mlp", "linear"]}
    compared = [fedsim.compare(tables, axes, "c", jobs=1) for _ in range(2)]
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).unlink()
    compared.append(fedsim.load_comparison("c"))
    assert len({each.table for each in compared}) == 1
    assert "failed" not in compared[0].table


def test_data_sets_declare_the_shape_of_their_samples():
    """Of data that is downloaded, so that its dimensions are known before."""
    declared = {registration.name for registration in dataset if hasattr(registration.target, "declared")}
    assert declared >= {"mnist5k", "mnist", "emnist", "cifar10", "cifar100", "svhn"}
    assert fedsim.Experiment(data="cifar100").model.params | {"channels": 3, "size": 32, "classes": 100} == {
        "dropout": 0.5,
        "channels": 3,
        "size": 32,
        "classes": 100,
    }
    assert fedsim.Experiment(data={"name": "emnist", "split": "letters"}).model.params["classes"] == 26
    train, _ = fedsim.load_dataset("mnist5k")
    assert dataset.get("mnist5k").target.declared() == fedsim.data.shapes.SampleShape.of(train)


def test_every_dimension_belongs_to_a_model():
    assert {name for each in model for name in each.parameter_names} >= DIMENSIONS.keys()
