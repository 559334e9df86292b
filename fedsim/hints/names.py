"""Names that are spelled alike or have the same words, for hints."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from fedsim.errors import show
from fedsim.toml import tomllib

SHORT = 4  # characters; shorter names are not completed
PLURAL = re.compile(r"(?<=[^_]{3})(?<!ou)(?<!tu)(?<!s)s(?=_|$)")  # the s of words that are not like "previous"
CUTOFF = 0.75  # difflib ratio from which a name with the right first letter counts as a misspelling


@functools.cache
def synonyms(table: str) -> dict[str, str]:
    """Return a table of `synonyms.toml`, with a separate entry for each phrase of a key."""
    entries = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))[table]
    return {phrase: text for phrases, text in entries.items() for phrase in phrases.split()}


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Return at most two allowed names that are similar to `name`.

    Similar means: the same words, nearly the same spelling, or `name` is a part of the allowed name.
    """
    form, forms = normalized(name), {normalized(each): each for each in allowed}
    matches = with_words(form, forms) or [each for each in forms if len(form) >= SHORT and f"_{form}" in f"_{each}"]
    alike = [each for each in forms if each[:1] == form[:1]]
    swapped = [each for each in alike if sorted(each) == sorted(form)]  # "modle" is model, although mode is nearer
    spelled = swapped or difflib.get_close_matches(form, alike, n=1, cutoff=CUTOFF)
    return [forms[each] for each in difflib.get_close_matches(form, matches or spelled, n=2, cutoff=0.0)]


def did_you_mean(names: Iterable[str]) -> str:
    """Return a hint with at most two names, or "" without names."""
    names = [*dict.fromkeys(names)][:2]
    return f"did you mean {' or '.join(map(show, names))}?" if names else ""


def with_words(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names with the words of `name`: ["layers"] for `num_layers`."""
    return [each for each in allowed if squeezed(each) == squeezed(name) or words_of(each) == words_of(name)]


def named(name: str, components: Iterable[str]) -> list[str]:
    """Return the component that a name means, such as ["cross_entropy"] for `CrossEntropyLoss`, or [] if there is none.

    Case and underscores are ignored, and also a final word for a kind of component, such as `Loss`.
    """
    forms = {squeezed(name).removesuffix(kind) for kind in ("", *synonyms("kinds"))}
    return [each for each in components if squeezed(each) in forms][:1]


def is_kind(name: str) -> bool:
    """Whether a name ends with the name of a component registry, such as `rule` or `partition_strategy`."""
    return normalized(name).rpartition("_")[2] in synonyms("kinds")


@functools.lru_cache(4096)
def words_of(name: str) -> frozenset[str]:
    """Return the significant words of a name, in a form that is equal for synonyms.

    >>> words_of("num_clients") == words_of("numberOfWorkers") == words_of("node-count")
    True
    """
    same = synonyms("same")
    if name.lower() not in synonyms("answers"):  # FedAvg is one word
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    text = normalized(name.replace(".", "_"))
    for pair in (each for each in same if "_" in each):
        text = text.replace(pair, same[pair])
    words = PLURAL.sub("", text).split("_")
    return frozenset(filter(None, (same.get(word, word) for word in words))) or frozenset(words)


def has_words(search: str, *texts: str) -> bool:
    """Whether each word of `search` is the beginning of a word in the texts, or a synonym of a word there.

    Case, the plural, and words such as "of" and "number" are ignored. True if there are no words.

    >>> has_words("clients aggreg", "Aggregate the updates of all workers.")
    True
    >>> has_words("rop", "dropout")
    False
    """
    text, same = "\n".join(texts).lower(), synonyms("same")
    words = [PLURAL.sub("", word) for word in re.findall(r"[^\W_]+", search.lower())]
    return all(_stands_in(text, word) for word in [word for word in words if same.get(word, word)] or words)


def _stands_in(text: str, word: str) -> bool:
    """Whether a word in the text starts with `word`, or is a synonym of `word`."""
    same = synonyms("same")
    meant = same.get(word, word)
    alike = [meant, *(phrase for phrase, meaning in same.items() if meaning == meant)]
    whole = "|".join(alike).replace("_", r"[\W_]+")
    return bool(re.search(rf"(?<![^\W_])(?:{word}|(?:{whole})s?(?![^\W_]))", text))


def normalized(name: str) -> str:
    """Return a name in lower case, with underscores instead of spaces and hyphens, to compare spellings."""
    return re.sub(r"[\s-]", "_", name.lower()).strip("_")


def squeezed(name: str) -> str:
    """Return a name in lower case, without separators."""
    return normalized(name).replace("_", "")


def as_range(text: str) -> str | None:
    """Return a range, `0..2` or `0-2`, as the list `0,1,2`, or None if it is not a range or is too long."""
    ends = re.fullmatch(r"(\d{1,9})(?:\.\.|-|:)(\d{1,9})", text.strip())
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    return ",".join(map(str, numbers)) if 0 < len(numbers) <= 100 else None


def as_list(text: str) -> str:
    """Return a comma-separated text as a TOML list: `[0,1]` for `0,1`. Names are quoted."""
    pieces = (piece.strip() for piece in text.split(","))
    return f"[{','.join(piece if piece.isdecimal() else json.dumps(piece) for piece in pieces)}]"
