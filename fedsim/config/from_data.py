"""What an experiment takes from its data unless it is set: the task, the model, and the dimensions of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from fedsim.config import schema
from fedsim.config.settings import Settings
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.learning_task import LearningTask, Regression
from fedsim.data.shapes import SampleShape
from fedsim.errors import ExperimentError, plural, show
from fedsim.models.base import DIMENSIONS

AnyTable = TypeVar("AnyTable", bound=ComponentTable)
NOUNS = {"inputs": "input", "channels": "channel", "outputs": "output", "vocabulary": "token"}


def tables_from_data(
    settings: Settings, shape_of: Callable[[schema.Data], SampleShape | None]
) -> dict[str, Table] | None:
    """Return the tables `task` and `model` with everything that is not set taken from the data, or None without data.

    Args:
        settings: experiment whose tables have been checked one by one.
        shape_of: function that returns the shape of a data set's samples, or None if it is not known yet.

    Raises ExperimentError if the data does not have a dimension that the model takes.
    """
    task, model, data = settings.task, settings.model, settings.data
    if {"name"} <= task.model_fields_set & model.model_fields_set and not model.from_data:
        return {}
    if (shape := shape_of(data)) is None:
        return None
    task, model = _named(task, shape.task), _named(model, shape.model).model_copy()
    values, taken = shape.dimensions(task.component), model.from_data
    if lines := [*_unsuitable(model, data.name, shape, [name for name in taken if name not in values])]:
        raise ExperimentError(*lines)
    if shape.gaps and "classes" in taken and values["classes"] == shape.classes:
        raise ExperimentError(
            f"data.name = {show(data.name)}: the labels go up to {shape.classes - 1}, but most smaller numbers are the "
            f"label of no sample; for numbers, use task=regression, and for classes, set model.classes={shape.classes} "
            "or renumber the labels from 0"
        )
    model.params.update({name: values[name] for name in taken})
    return {"task": task, "model": model}


def _named(table: AnyTable, name: str) -> AnyTable:
    """Return a table with the component `name`, which does not count as set, unless the user has selected one."""
    if table.named_by in table.model_fields_set or name == getattr(table, table.named_by):
        return table
    given = {key: value for key, value in table.model_dump().items() if key in table.model_fields_set}
    named = type(table).model_validate({**given, table.named_by: name})
    named.model_fields_set.discard(table.named_by)
    return named


def _unsuitable(model: schema.Model, dataset: str, shape: SampleShape, lacking: list[str]) -> Iterator[str]:
    """Yield the error line for a model with parameters for which the data has no value, if there are any."""
    if lacking:
        yield (
            f"{model.setting}: needs {DIMENSIONS[lacking[-1]]}, but each sample of {show(dataset)} has {shape}; "
            f"use another model, such as model={shape.model}"
        )


def mismatches(model: schema.Model, dataset: str, shape: SampleShape, task: LearningTask) -> list[str]:
    """Return one error line for each dimension of the model that differs from the data."""
    values, params = shape.dimensions(task), model.params
    if lines := [
        *_unsuitable(model, dataset, shape, [name for name in DIMENSIONS if name in params and name not in values])
    ]:
        return lines
    lines = []
    for name in filter(params.__contains__, DIMENSIONS):
        value, needed = params[name], values[name]
        may_exceed = DIMENSIONS[name] in ("tokens", "") and not isinstance(task, Regression)
        if type(value) is not type(needed) or value == needed or (may_exceed and value > needed):
            continue
        labels = f" (0 to {needed - 1})" if name == "classes" and needed == shape.classes else ""
        remove = f"remove model.{name} or set {show(needed)}"
        remedy = remove if name in model.model_fields_set else f"set model.{name}={show(needed)}"
        lines.append(f"model.{name} = {show(value)}, but {show(dataset)} has {_words(name, needed)}{labels}; {remedy}")
    return lines


def taken_from_data(settings: Settings) -> list[str]:
    """Return what an experiment has taken from its data, in words: ["1 channel", "28x28", "10 classes"]."""
    task, model = settings.task, settings.model
    words = [_words(name, model.params[name]) for name in DIMENSIONS if name in model.from_data]
    named = "name" not in task.model_fields_set and task.name != type(task).default_component()
    return [*filter(None, words), *[f"task {task.name}"] * named]


def _words(name: str, value: int) -> str:
    if isinstance(value, bool):
        return "one target per sample" if value else ""
    if name == "size":
        return f"{value}x{value}"
    if name == "context":
        return f"samples of length {value}"
    if name == "classes":
        return "1 class" if value == 1 else f"{value:,} classes"
    return plural(value, NOUNS[name])
