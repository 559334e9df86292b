"""Base classes for the tables of an experiment.

A `Table` is a strict pydantic model. A `ComponentTable` contains a component's name (`partition.name`,
`aggregate.rule`, ...) and its parameters, which are checked against the component's signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from fedsim.core.objects import ObjectName
from fedsim.core.registry import Registration, Registry, with_key
from fedsim.errors import ExperimentError, show
from fedsim.hints.attributes import attribute_error
from fedsim.hints.meanings import VOCABULARY
from fedsim.hints.names import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self
else:  # for typing.get_type_hints
    Self = Any

# Type of a field that names a component: a string or the name of an object.
Name = Annotated[str, WrapValidator(lambda name, check: name if isinstance(name, ObjectName) else check(name))]


class Table(BaseModel):
    """Base class of the tables (sections of settings, as in TOML) of an experiment.

    Tables are frozen pydantic models with strict types, which reject unknown keys.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if hasattr(type(self), name):
                    raise
                names = [*type(self).model_fields, *(self.__pydantic_extra__ or ())]
                keys = [key for key in VOCABULARY.keys_called(name) if key.partition(".")[0] in names]
                raise attribute_error(f"{type(self).__name__!r} object", name, names, did_you_mean(keys)) from None

    def model_copy(self, **options: Any) -> Self:
        """Return a copy with changed fields, without cached properties (see `BaseModel.model_copy`)."""
        copied = super().model_copy(**options)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def tables(self) -> Iterator[Table]:
        """Yield this table and all nested tables."""
        yield self
        for value in (getattr(self, name) for name in type(self).model_fields):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Table):
                    yield from item.tables()


class ComponentTable(Table):
    """Base class of tables that select a component by its name, and contain the component's parameters.

    If no parameters are set, the name alone can replace the table: `partition = "iid"`. The key of the name depends on
    the table, such as `rule` in `aggregate`, but every table also accepts `name`.

    Attributes:
        place: dotted key of the table, such as "aggregate".
        index: "[]" for a table in a list, such as that of a processor.
        named_by: key of the component's name, such as "rule".
        registry: components that the table may select.
        alternatives: keys of which at most one may be set.
        follows_data: whether the data determines the component if its name is not set. The parameters are checked
            afterwards.
    """

    model_config = ConfigDict(extra="allow")

    place: ClassVar[str]
    index: ClassVar[str] = ""
    named_by: ClassVar[str]
    registry: ClassVar[Registry]
    alternatives: ClassVar[tuple[str, ...]] = ()
    follows_data: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _as_table(cls, value: Any) -> Any:
        table = {cls.named_by: value} if cls.is_name(value) else value
        if isinstance(table, cls):
            return table
        if not isinstance(table, dict):
            raise ValueError("must be a name or a table")
        table = with_key(table, cls.named_by, cls.place)
        name = table.get(cls.named_by)
        if isinstance(name, str) and name.startswith("__main__:"):  # other processes have a different __main__
            table = {**table, cls.named_by: cls.registry.get(name, f"{cls.place}.{cls.named_by}").name}
        return cls.completed(table)

    @model_serializer(mode="wrap")
    def _as_dict(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        table = handler(self)
        return {key: value for key, value in table.items() if not info.exclude_unset or key in self.model_fields_set}

    @classmethod
    def is_name(cls, value: Any) -> bool:
        """Whether `value` is a component's name, which can be given instead of a table."""
        annotation = cls.model_fields[cls.named_by].annotation
        kinds = get_args(annotation) or (annotation,)
        return isinstance(value, tuple(getattr(kind, "__origin__", kind) for kind in kinds))

    @classmethod
    def default_component(cls) -> str | None:
        """Return the name of the component that the table selects by default, or None if the name is required."""
        default = cls.model_fields[cls.named_by].default
        return default if isinstance(default, str) else None

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `table` with further defaults. The base class adds none.

        Subclasses override this method if the default of a key depends on other keys.
        """
        return table

    @classmethod
    def not_both(cls) -> ExperimentError:
        """Return the error for a table that sets more than one of the keys in the attribute `alternatives`."""
        return ExperimentError(f"{cls.place}: set only one of {', '.join(cls.alternatives)}")

    @model_validator(mode="after")
    def _check(self) -> ComponentTable:
        if not (self.follows_data and self.params and self.named_by not in self.model_fields_set):
            self.check_parameters()
        return self

    def check_parameters(self) -> None:
        """Validate the component's parameters, and add the defaults of missing parameters.

        Raises ExperimentError for an invalid parameter.
        """
        table_keys = [key for key in type(self).model_fields if key != self.named_by]
        clash = sorted(({"name", *table_keys} - {self.named_by}) & set(self.registration.fields))
        if clash:
            raise ExperimentError(
                f"{self.place}.{clash[0]}: {self.registration.name} has a parameter with this name, but it is a "
                f"built-in key of [{self.place}]; rename the parameter"
            )
        checked = self.registration.check(self.params, self.place, beside=[self.named_by, *table_keys])
        for name, value in checked.items():
            if value is None and self.registration.fields[name].default is not None:
                raise ExperimentError(f"{self.place}.{name} = None: TOML cannot express None; omit the key")
        self.registration.bind(checked)  # __post_init__ of a dataclass may check combinations of fields
        self.params.update(checked)

    @property
    def setting(self) -> str:
        """The component's key and name as text for messages, such as `aggregate.rule = "krum"`."""
        return f"{self.place}.{self.named_by} = {show(getattr(self, self.named_by))}"

    @property
    def registration(self) -> Registration:
        """The registration of the component that this table names."""
        return self.registry.get(getattr(self, self.named_by), f"{self.place}{self.index}.{self.named_by}")

    @property
    def params(self) -> dict[str, Any]:
        """The component's parameters by name, including defaults."""
        return cast(dict[str, Any], self.__pydantic_extra__)

    @cached_property
    def component(self) -> Any:
        """The component with its parameters, created on first access."""
        return self.registry.bind(self.registration, self.params)
