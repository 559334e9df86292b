"""Check parameters of components with pydantic, which is imported only for what `fedsim.core.numbers.fitted` leaves."""

from __future__ import annotations

import enum
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedsim.core.validation_errors import explain


def parameter_model(name: str, fields: Mapping[str, inspect.Parameter], accepts_any: bool) -> type[BaseModel]:
    """Return a pydantic model that checks parameters.

    Args:
        name: name of the component.
        fields: the component's parameters by name, with evaluated annotations.
        accepts_any: whether the component has a parameter `**params`.
    """
    config = ConfigDict(
        extra="allow" if accepts_any else "forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    defaults = {key: ... if field.default is field.empty else field.default for key, field in fields.items()}
    typed: dict[str, Any] = {key: (field.annotation, defaults[key]) for key, field in fields.items()}
    return create_model(f"{name}_parameters", __config__=config, **typed)


def checked_by_pydantic(model: type[BaseModel], values: dict[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """Check the values of parameters. Returns the checked values, and one error line per missing or invalid value.

    `place`: dotted key of the table that contains the parameters, for error messages.
    """
    try:
        found = _validated(model, values)
    except ValidationError as error:
        return {}, explain(error, model, place)
    every = {**vars(found), **(found.model_extra or {})}
    return {name: every[name] for name in values}, []


def _validated(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    try:
        return model(**values)
    except ValidationError as error:
        try:  # JSON rules: arrays become tuples, strings become paths or enumeration members
            return model.model_validate_json(json.dumps(values, default=_as_json))
        except ValidationError as by_json:  # names the wrong element of a tuple
            raise (error if by_json.errors()[0]["type"] == "json_invalid" else by_json) from None
        except (TypeError, ValueError):
            raise error from None


def _as_json(value: Any) -> Any:
    """Return the JSON value of an enumeration member or a path. Raise TypeError for other types."""
    return value.value if isinstance(value, enum.Enum) else os.fspath(value)
