"""The hint at the end of an error about a wrong name: the nearest right name, or the allowed names."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.errors import MAX_NAME, cut, show
from fedsim.synonyms import KEYS, NAMES, NOTES

MOST_IN_RANGE = 100  # numbers that a hint writes for 0..99
SHORT = 4  # characters: below, one wrong letter is a large part of a name
CERTAIN = 0.85  # difflib's ratio from which the nearest name is the only guess
CUTOFF, CUTOFF_SHORT = 0.75, 0.65  # difflib's ratio from which a name counts as a misspelling

LISTS = ("metrics", "data.augment", "processors", "records.loggers")  # keys whose values are lists of names
FIRST_STAGE = ", before a rule"  # after the key of pre-aggregators

KeyFinder = Callable[[str], list[str]]  # from a name to dotted keys of experiments


@dataclass
class Vocabulary:
    """The keys and plugs of experiments, for hints; `fedsim.config.source_catalog` sets both functions.

    Attributes:
        keys_called: the dotted keys that a name may mean.
        keys_of_plug: the dotted keys whose value may be the plug of this name.
    """

    keys_called: KeyFinder = lambda name: list(KEYS.get(name, ()))
    keys_of_plug: KeyFinder = lambda name: []


VOCABULARY = Vocabulary()


def nearest(name: str, allowed: Iterable[str], *, is_plug: bool = False) -> str:
    """The hint for a name that is not allowed: `did you mean "x"?`, or else the allowed names.

    `is_plug`: the name is that of a plug, so a plug of another kind may be meant.
    """
    allowed = list(allowed)
    known = [each for each in NAMES.get(normalized(name), ()) if each in allowed]
    return _hint(name, known, {each: [each] for each in allowed}, allowed, may_be_plug=is_plug)


def nearest_key(
    name: str, allowed: Iterable[str], place: str = "", elsewhere: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The hint for an unknown key.

    Args:
        name: the key.
        allowed: the keys of its table.
        place: the table, such as `local`; "" for top-level keys.
        elsewhere: keys of other tables, each with the dotted keys to suggest.
    """
    allowed, form = list(dict.fromkeys(allowed)), normalized(name)
    known = VOCABULARY.keys_called(form) if place else list(KEYS.get(form, ())) if elsewhere else []
    if place and known == [form]:
        return f"{form} is a top-level key: in a file it stands above the first [table]"
    if here := [each.removeprefix(f"{place}.") for each in known if each.startswith(f"{place}.")]:
        known = [each for each in here if each in allowed]  # a key of another plug is no help
    candidates = {**(elsewhere or {}), **{each: [each] for each in allowed}}
    return _hint(name, known, candidates, allowed, may_be_plug=form not in candidates)


def _hint(
    name: str,
    known: Sequence[str],
    candidates: Mapping[str, Sequence[str]],
    allowed: Sequence[str],
    *,
    may_be_plug: bool,
) -> str:
    """A hint from, in this order: known synonyms, notes, plugs, the closest candidates, all that is allowed."""
    if "," in name:
        return f"for several values use fedsim compare, for a list write {cut(as_list(name))}"
    if not known and normalized(name) in NOTES:
        return NOTES[normalized(name)]
    if not known and may_be_plug and (settings := _settings_of_plug(normalized(name))):
        return f"write {' or '.join(settings)}"
    if not known and len(name) <= MAX_NAME:
        known = [each for match in closest(name, candidates) for each in candidates[match]]
    return f"did you mean {' or '.join(map(show, known))}?" if known else f"allowed: {', '.join(allowed) or 'none'}"


def _settings_of_plug(name: str) -> list[str]:
    """How an experiment names a plug, for each key that may name it: `local.solver=scaffold`."""
    settings: dict[str, str] = {}
    for text in VOCABULARY.keys_of_plug(name):
        for key in text.removesuffix(FIRST_STAGE).split(", "):
            value = f'["{name}","mean"]' if text.endswith(FIRST_STAGE) else f'["{name}"]' if key in LISTS else name
            settings.setdefault(key, f"{key}={value}" if value == name else f"{key}='{value}'")
    return list(settings.values())


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """The one or two allowed names that `name` may mean.

    They are equal but for - and _, have it as initials, begin with it, contain it, or are the nearest by spelling.
    """
    forms = {normalized(each): each for each in allowed}
    form = normalized(name)
    if form in forms:
        return [forms[form]]
    found = [each for each in forms if _initials(each) == form or _initials(form) == each]
    if not found and len(form) >= SHORT:
        found = [each for each in forms if each.startswith(form)] or [each for each in forms if f"_{form}" in each]
    cutoff = CUTOFF if len(form) >= SHORT else CUTOFF_SHORT
    found = found or difflib.get_close_matches(name.replace("-", "_"), forms, n=1, cutoff=cutoff)  # MyNet is not net
    found = difflib.get_close_matches(form, found, n=2, cutoff=0.0)
    is_certain = found and difflib.SequenceMatcher(None, found[0], form).ratio() >= CERTAIN
    return [forms[each] for each in (found[:1] if is_certain else found)]


def has_words(search: str, *texts: str) -> bool:
    """Whether each word of `search` is in one of the texts, in upper or lower case; True for no words."""
    return all(word in "\n".join(texts).lower() for word in search.lower().split())


def normalized(name: str) -> str:
    """A name in lower case with underscores, for comparison."""
    return re.sub(r"[\s-]", "_", name.strip().lower())


def _initials(name: str) -> str | None:
    """`bs` for `batch_size`; None for a single word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else None


def as_range(text: str) -> str | None:
    """`0,1,2` for `0..2`; None for other texts, and for more than MOST_IN_RANGE numbers."""
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text.strip())
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    return ",".join(map(str, numbers)) if 0 < len(numbers) <= MOST_IN_RANGE else None


def as_list(text: str) -> str:
    """`[0,1]` for `0,1`; names get quotes."""
    pieces = (piece.strip() for piece in text.split(","))
    return f"[{','.join(piece if piece.isdecimal() else json.dumps(piece) for piece in pieces)}]"
