"""Errors for attributes that do not exist, with the attributes to use instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedsim.core.suggestions import VOCABULARY, closest, normalized
from fedsim.errors import show

# Attributes of other libraries, each with the attributes that it may mean.
ATTRIBUTES = {
    word: meanings.split()
    for words, meanings in {
        "acc accuracy score test_acc final_accuracy": "accuracy test_accuracy",
        "df to_df pandas to_pandas dataframe table": "to_dataframe",
        "net weights params parameters state_dict final_model": "model",
        "config cfg args settings": "experiment",
        "logs losses metrics records rounds accuracies": "history runs",
        "results histories": "runs",
        "path out dir directory": "folder",
        "fit train simulate simulation start_simulation fedavg": "run",
        "load load_result": "load_run",
        "draw_partition": "plot_partition",
    }.items()
    for word in words.split()
}


def attribute_error(owner: str, name: str, names: Iterable[str], otherwise: str = "") -> AttributeError:
    """Return the error for a missing attribute, with a hint: similar attributes, or all of them.

    Args:
        owner: text about the object, such as "module 'fedsim'".
        name: the missing attribute.
        names: attributes of the object, of which only public ones are suggested.
        otherwise: hint if no attribute is similar; "" to list all attributes.
    """
    is_private = name.startswith("_")  # Python and its tools try many private names
    hint = "" if is_private else f"; {attribute_hint(name, names, otherwise)}"
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


def attribute_hint(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of `attribute_error`."""
    public, form = [each for each in names if not each.startswith("_")], normalized(name)
    known = [each for each in ATTRIBUTES.get(form, ()) if each in public]
    known = known or closest(form.removeprefix("get_").removeprefix("list_"), public)
    known = known or [key for key in VOCABULARY.keys_called(form) if key.partition(".")[0] in public]
    hint = f"did you mean {' or '.join(map(show, known))}?" if known else otherwise
    return hint or f"its attributes are {', '.join(public)}"


class HintingAttributes:
    """Base class of results: the error for a missing attribute suggests the attribute to use instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the AttributeError of the property again
            raise attribute_error(f"{type(self).__name__!r} object", name, dir(self))
