"""Settings that are derived from the data unless the user sets them: the task, the model, and its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedsim.config import schema
from fedsim.config.settings import Settings
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.learning_task import LearningTask, Regression
from fedsim.data.shapes import SampleShape
from fedsim.errors import DataError, ExperimentError, show
from fedsim.models.base import DIMENSIONS

AnyTable = TypeVar("AnyTable", bound=ComponentTable)
NOUNS = {"inputs": "input", "channels": "channel", "vocabulary": "token", "outputs": "output"}
OUTPUTS = "classes", "outputs"


def tables_from_data(
    settings: Settings, shape_of: Callable[[schema.Data], SampleShape | None]
) -> dict[str, Table] | None:
    """Return the tables `task` and `model` with unset values derived from the data, or None if the data is missing.

    Args:
        settings: experiment whose tables have been checked one by one.
        shape_of: function that returns the shape of a data set's samples, or None if the data is not downloaded yet.

    Raises DataError if the data cannot be read and parameters of the task or the model depend on it, and
    ExperimentError if the data lacks a dimension that the model needs.
    """
    task, model, data = settings.task, settings.model, settings.data
    if {"name"} <= task.model_fields_set & model.model_fields_set and not model.from_data:
        return {}
    try:
        shape = shape_of(data)
    except DataError:  # the run reports it, unless keys belong to a component that the data would name
        if any(table.named_by not in table.model_fields_set and table.model_fields_set for table in (task, model)):
            raise
        shape = None
    if shape is None:
        _named(task, task.name), _named(model, model.name)  # checks their parameters
        return None
    task, model = _named(task, shape.task), _named(model, shape.model).model_copy()
    values, taken = shape.dimensions(task.component), model.from_data
    if lacking := [name for name in taken if name not in values]:
        raise ExperimentError(_unsuitable(model, data, shape, lacking[-1]))
    if shape.gaps and (names := [name for name in OUTPUTS if name in taken and values[name] == shape.classes]):
        raise ExperimentError(
            f"data.name = {show(data.name)}: the largest label is {shape.classes - 1}, but most smaller labels do not "
            "occur; if the targets are measured numbers, set task=regression; if they are classes, set "
            f"model.{names[0]}={shape.classes} or renumber the classes from 0"
        )
    model.params.update({name: values[name] for name in taken})
    return {"task": task, "model": model}


def _named(table: AnyTable, name: str) -> AnyTable:
    """Return `table`, with the component `name` as an unset default if the user has not selected a component."""
    if table.named_by in table.model_fields_set:
        return table
    given = {key: value for key, value in table.model_dump().items() if key in table.model_fields_set}
    named = type(table).model_validate({**given, table.named_by: name})
    named.model_fields_set.discard(table.named_by)
    return named


def mismatches(model: schema.Model, data: schema.Data, shape: SampleShape, task: LearningTask) -> list[str]:
    """Return one error line for each dimension of the model that differs from the data."""
    values, params, lines = shape.dimensions(task), model.params, []
    names, own = [name for name in DIMENSIONS if name in params], model.registration.imported
    if not own and (lacking := [name for name in names if name not in values]):
        return [_unsuitable(model, data, shape, lacking[-1])]
    for name in names:
        value, needed = params[name], values.get(name)
        may_exceed = DIMENSIONS[name] in ("tokens", "") and not isinstance(task, Regression)
        if needed is None or type(value) is not type(needed) or value == needed or (may_exceed and value > needed):
            continue
        labels = f" (0 to {needed - 1})" if name in OUTPUTS and needed == shape.classes else ""
        remove = f"remove model.{name} or set {show(needed)}"
        remedy = remove if name in model.model_fields_set else f"set model.{name}={show(needed)}"
        has = f"{'images of ' * (name == 'size')}{_words(name, needed, task)}{labels}"
        lines.append(f"model.{name} = {show(value)}, but {_called(data)} has {has}; {remedy}")
    return lines


def _unsuitable(model: schema.Model, data: schema.Data, shape: SampleShape, name: str) -> str:
    """Return the error line for a model with a parameter `name` for which the data has no value."""
    other = (
        "your own class, whose `forward` takes them" if shape.several else f"another model, such as model={shape.model}"
    )
    return f"{model.setting}: needs {DIMENSIONS[name]}, but each sample of {_called(data)} has {shape}; use {other}"


def _called(data: schema.Data) -> str:
    """Return the path or the name of a data set, for error messages."""
    return show(data.params.get("path", data.name))


def taken_from_data(settings: Settings) -> list[str]:
    """Return the settings that are derived from the data as texts: ["1 channel", "28x28", "10 classes"]."""
    task, model = settings.task, settings.model
    words = [_words(name, model.params[name], task.component) for name in DIMENSIONS if name in model.from_data]
    named = "name" not in task.model_fields_set and task.name != type(task).default_component()
    return [*filter(None, words), *[f"task {task.name}"] * named]


def _words(name: str, value: int, task: LearningTask) -> str:
    if isinstance(value, bool):
        return "one target per sample" if value else ""
    if name == "size":
        return f"{value}x{value}"
    if name == "context":
        return f"samples of length {value}"
    if name == "classes" and value > 1 and not isinstance(task, Regression):
        return f"{value:,} classes"
    return f"{value:,} {NOUNS.get(name, 'output')}{'s' * (value != 1)}"
