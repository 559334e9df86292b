"""What fedsim raises, and how a failed check becomes one clear line."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedsim.synonyms import KEYS, NAMES, NOTES

SHORT = 4  # characters; in a name of fewer, one wrong letter is a large part of it
CLOSE, CLOSE_OF_SHORT = 0.75, 0.65  # difflib's ratio from which on a name may be a slip of the other
MOST_PROBLEMS = 100  # of an experiment that are told; nobody reads more
LONGEST_TEXT = 300  # characters of a path, or of somebody else's message, in an error line
DEVICE_ASSERT = (
    "mostly an index is out of range, such as a token of nn.Embedding or a label: device=cpu says which; this process "
    "cannot use the GPU any more"
)
LONGEST_NAME = 100  # characters; nothing that has a name is called by more, and difflib would take long over them


class FedsimError(Exception):
    """Base of every error that fedsim raises on purpose."""


class ExperimentError(FedsimError, ValueError):
    """The experiment cannot be run as described: one line per problem, with place, value and what is allowed.

    Of very many problems the first MOST_PROBLEMS are told.
    """

    def __init__(self, *lines: str) -> None:
        if len(lines) > MOST_PROBLEMS + 1:
            lines = (*lines[:MOST_PROBLEMS], f"and {len(lines) - MOST_PROBLEMS} more problems")
        super().__init__("\n".join(lines))
        self.lines = lines


class DataError(FedsimError):
    """A data set is missing, cannot be downloaded or is damaged."""


class RecordError(FedsimError):
    """A run folder cannot be made, written or read."""


class FedsimWarning(UserWarning):
    """A run goes on, though not in every respect as described: one line."""


class SettingWarning(FedsimWarning):
    """A run is as described, but one of its settings makes it do nothing, or something nobody means: one line."""


class MissingPackageError(FedsimError, ImportError):
    """A package of one of fedsim's extras is needed, and not installed."""


class WorkerError(FedsimError, RuntimeError):
    """A worker, or the process that ran it, failed: says which worker, process and round, and how."""


class ProcessLostError(WorkerError):
    """A process in which workers train has died, or hangs: another one in its place could do its work again.

    Attributes:
        why: what became of it, as the end of a sentence of which it is the subject.
        process, processes: its number, and how many there were.
        worker: whom it was working on; None: on nobody, or on several together.
    """

    def __init__(self, line: str, why: str, process: int, processes: int, worker: int | None) -> None:
        super().__init__(line)
        self.why, self.process, self.processes, self.worker = why, process, processes, worker


def show_warnings_as_lines() -> None:
    """Show fedsim's own warnings from now on as a line on stderr, `warning: ...`, and others as before."""
    show_other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, FedsimWarning):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            show_other(message, category, *place, **further)

    warnings.showwarning = show


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """The same until the block ends."""
    before = warnings.showwarning
    show_warnings_as_lines()
    try:
        yield
    finally:
        warnings.showwarning = before


def show(value: Any) -> str:
    """A value as an error line shows it: short, and as an experiment file would say it."""
    text = _as_in_toml(value)
    return text if len(text) <= 80 else f"{text[:47]}...{text[-30:]}"  # of a path, the end says most


def _as_in_toml(value: Any) -> str:
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_in_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_as_in_toml(each)}' for key, each in value.items())}}}"
    return " ".join(repr(value).split())


def show_bytes(count: float) -> str:
    """A number of bytes, in powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def plural(count: int, thing: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def cut(text: str) -> str:
    """A text that may be of any length, as an error line can hold it."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def one_line(error: BaseException) -> str:
    """An exception of somebody else's as `Type: message`, on one line."""
    message = str(error)
    if "device-side assert" in message:  # CUDA says no more; the rest of the message is for programmers of kernels
        message = f"{message.partition(chr(10))[0]}; {DEVICE_ASSERT}"
    return f"{type(error).__name__}: {cut(' '.join(message.split()))}"


def first_line(error: BaseException) -> str:
    """What an exception says first: the first line of fedsim's own errors, any other as `one_line`."""
    return str(error).splitlines()[0] if isinstance(error, FedsimError) else one_line(error)


def printable(text: str) -> str:
    """A text without what a terminal would obey, or what could break its line: each such character as a `?`."""
    return "".join(character if character.isprintable() else "?" for character in text)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """The hint for a name that is not among `allowed`: `did you mean "x"?`, or else what is allowed."""
    allowed = list(allowed)
    known = [each for each in NAMES.get(_form(name), ()) if each in allowed]
    return _hint(name, known, {each: [each] for each in allowed}, allowed)


def nearest_key(
    name: str, allowed: Iterable[str], place: str = "", elsewhere: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The hint for a key that is not among `allowed`, the keys of the table `place` of an experiment.

    `elsewhere` are keys of other tables, each with what to write instead; with neither, `allowed` is all there is.
    """
    from fedsim.experiment import keys_called  # which imports this module

    allowed, form = list(dict.fromkeys(allowed)), _form(name)
    known = keys_called(form) if place else list(KEYS.get(form, ())) if elsewhere else []
    if place and known == [form]:
        return f"{form} is a top-level key: in a file it stands above the first [table]"
    if here := [each.removeprefix(f"{place}.") for each in known if each.startswith(f"{place}.")]:
        known = [each for each in here if each in allowed]  # else it is a key of another plug, which the line says
    return _hint(name, known, {**(elsewhere or {}), **{each: [each] for each in allowed}}, allowed)


def _hint(name: str, known: Sequence[str], meant: Mapping[str, Sequence[str]], allowed: Sequence[str]) -> str:
    """The hint for a name: what is known to be meant by it, or else what `meant` has for the name closest to it."""
    if "," in name:
        return f"for several values use fedsim compare, for a list write {cut(_listed(name))}"
    if not known and _form(name) in NOTES:
        return NOTES[_form(name)]
    if not known and len(name) <= LONGEST_NAME:
        known = [each for match in closest(name, meant) for each in meant[match]]
    return f"did you mean {' or '.join(map(show, known))}?" if known else f"allowed: {', '.join(allowed) or 'none'}"


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Which of `allowed` were probably meant: the same but for - and _, an abbreviation, part of it, a slip."""
    forms = {_form(each): each for each in allowed}
    form = _form(name)
    if form in forms:
        return [forms[form]]
    found = [each for each in forms if _initials(each) == form or _initials(form) == each]
    if not found and len(form) >= SHORT:
        found = [each for each in forms if each.startswith(form)]
        found = found or [each for each in forms if f"_{form}" in each]
    cutoff = CLOSE if len(form) >= SHORT else CLOSE_OF_SHORT
    found = found or difflib.get_close_matches(name.replace("-", "_"), forms, n=1, cutoff=cutoff)  # MyNet is not net
    return [forms[each] for each in found]


def _form(name: str) -> str:
    """A name as it is compared: in lower case, with underscores."""
    return re.sub(r"[\s-]", "_", name.strip().lower())


def _initials(name: str) -> str | None:
    """`bs` of `batch_size`; None of a single word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else None


def explain(
    error: ValidationError,
    model: type[BaseModel],
    place: str = "",
    elsewhere: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """One line per problem that pydantic found in `model`, whose keys stand under `place` in the experiment.

    `elsewhere` are keys that belong in another table, for hints; see `nearest_key`.
    """
    lines: list[str] = []
    wanted: dict[str, tuple[Any, list[str]]] = {}  # by place: the value, and what would do instead of it
    keys: dict[str, list[str]] = {}  # by place, of tables
    for problem in error.errors(include_url=False)[:MOST_PROBLEMS]:
        unknown = (
            problem["type"] == "extra_forbidden"
        )  # then the last part is a key of the user's, whatever it looks like
        location = [part for part in problem["loc"][:-1] if not _is_choice(part)]
        location += [part for part in problem["loc"][-1:] if unknown or not _is_choice(part)]
        where = _dotted([place, *location])
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ExperimentError):  # raised by one of our own validators: complete but for places in lists
            unnumbered = _dotted([place, *(part for part in location if isinstance(part, str))])
            lines.extend(re.sub(rf"^{re.escape(unnumbered)}\b", where, line) for line in cause.lines)
            continue
        if unknown:
            allowed = _keys_at(model, location[:-1])
            table = _dotted([place, *location[:-1]])
            hint = nearest_key(str(location[-1]), allowed, table, None if table else elsewhere)
            lines.append(f"{where} = {show(problem['input'])}: unknown key; {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: is required")
        else:
            wanted.setdefault(where, (problem["input"], []))[1].append(_requirement(problem["msg"]))
            if problem["type"] == "model_type":
                keys[where] = _keys_at(model, location)
    for where, (value, requirements) in wanted.items():
        if not any(other.startswith((f"{where}.", f"{where}[")) for other in wanted):  # what is wrong within says more
            hint = f"; its keys are {', '.join(keys[where])}" if where in keys else _of_commas(value, requirements)
            lines.append(f"{where} = {show(value)}: must be {' or '.join(requirements)}{hint}")
    lines = list(dict.fromkeys(lines))
    more = error.error_count() - MOST_PROBLEMS
    return lines if more <= 0 else [*lines, f"and {plural(more, 'more problem')}"]


def _of_commas(value: Any, requirements: Sequence[str]) -> str:
    """What to write for a value that was meant to be a list, or several values."""
    has_comma = isinstance(value, str) and "," in value
    if requirements == ["a list"] or (has_comma and "a list" in requirements):
        return f"; write {cut(_listed(str(value)))}" if isinstance(value, (str, int)) else ""
    return "; for several values use fedsim compare" if has_comma else ""


def _listed(text: str) -> str:
    """`[0,1]` for `0,1`, and names in quotes."""
    pieces = (piece.strip() for piece in text.split(","))
    return f"[{','.join(piece if piece.isdecimal() else json.dumps(piece) for piece in pieces)}]"


def _is_choice(part: int | str) -> bool:
    """Whether a part of pydantic's location names one type of a union rather than a key."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))


def _dotted(parts: Iterable[int | str]) -> str:
    """`data.augment[0].pixels`; empty parts are left out."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "")
    return text.removeprefix(".")


def _requirement(message: str) -> str:
    """What pydantic's message asks for, in the words of experiment files: what must be, without the "must be"."""
    message = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    message = re.sub(r"^(String|List|Tuple|Set) should (match|have) ", _thing_that, message)
    message = (
        message.replace(" after validation", "")
        .replace("a valid boolean", "true or false")
        .replace("a valid list", "a list")
    )
    return re.sub(r"^(Input should be|Value error,) ", "", message).replace("'", '"')


def _thing_that(found: re.Match[str]) -> str:
    """`a list that has` for `List should have`."""
    thing, verb = found.groups()
    return f"a {thing.lower()} that {'has' if verb == 'have' else 'matches the'} "


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys allowed in the (sub)table of `model` that `location` leads to."""
    for part in (part for part in location if isinstance(part, str)):
        annotation = model.model_fields[part].annotation
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
                break
    return list(model.model_fields)
