"""The best combination of each group, and the answer of a comparison in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedsim.core.confidence import Estimate
from fedsim.errors import plural
from fedsim.records.combinations import Combination, groups_of
from fedsim.records.comparison_settings import ComparisonSettings

MOST_CASES = 6  # groups with a line each; of more the values are counted
MOST_NAMES = 6  # names in a sentence

LabelOf = Callable[[Combination, str], str]  # of a combination's value on an axis


@dataclass(frozen=True)
class Best:
    """The best of a group: of the combinations that differ in the first axis only; see `Combination.quality`.

    Attributes:
        combination: the one with the best mean score, the first of equals.
        score: its mean.
        tied: those that are not significantly different from it, the best first: the 95 percent interval of the
            difference, paired by seed, includes 0.
        next: the best of the others, if there are any.
    """

    combination: Combination
    score: Estimate
    tied: list[Combination]
    next: Combination | None

    @property
    def tied_text(self) -> str:
        """How many are tied, for a cell: `~ +2 tied`; empty if none is."""
        return f"~ +{len(self.tied)} tied" if self.tied else ""


def best_of(group: Sequence[Combination]) -> Best | None:
    """The best of a group; None if each of its combinations has a run that failed, diverged or has no result."""
    ranked = [(each, score) for each in group if (score := each.score) and each.quality(score) > -math.inf]
    if not ranked:
        return None
    ranked.sort(key=lambda pair: -pair[0].quality(pair[1]))  # stable: the first of equals stays in front
    (best, score), *others = ranked
    gaps = {each: each.difference_to(best) for each, _ in others}
    tied = [each for each, gap in gaps.items() if gap and gap.includes(0.0)]
    return Best(best, score, tied, next((each for each in gaps if each not in tied), None))


class Answer(NamedTuple):
    """What a comparison found: a sentence, a line for each group if there are a few, and what limits the answer."""

    sentence: str
    cases: list[str]
    remarks: list[str]


def answer(
    combined: Sequence[Combination],
    axes: Sequence[str],
    settings: ComparisonSettings,
    label_of: LabelOf,
    name_of: Callable[[str], str] = str,
) -> Answer | None:
    """The best value of the first axis in each group, with its interval; None if there is nothing to compare.

    Args:
        combined: the combinations of the compared axes.
        axes: the keys of these axes.
        settings: of the comparison.
        label_of: the label of a combination's value on an axis.
        name_of: the name of an axis.
    """
    groups = groups_of(combined)
    if max(map(len, groups), default=0) < 2:
        return None
    first, *others = axes
    case = "" if settings.worst is None else f" in its worst case over {name_of(settings.worst)}"
    what = f"{name_of(first)} by {combined[0].metric.label.lower()}{case}"
    cases: list[str] = []
    if len(groups) == 1:
        sentence = f"Best {what}: {_line(groups[0], first, settings, label_of)}."
    elif len(groups) <= MOST_CASES:
        sentence = f"Best {what}, for each {_joined(map(name_of, others))}:"
        for group in groups:
            keys = [f"{name_of(axis)} " if len(others) > 1 else "" for axis in others]
            values = ", ".join(key + label_of(group[0], axis) for key, axis in zip(keys, others, strict=True))
            cases.append(f"{values}: {_line(group, first, settings, label_of)}")
    else:
        cases_named = f"{'values' if len(others) == 1 else 'combinations'} of {_joined(map(name_of, others))}"
        sentence = f"Most often the best {what}: {_most_often(groups, first, label_of)} {cases_named}."
    return Answer(sentence, cases, _remarks(combined))


def _line(group: Sequence[Combination], first: str, settings: ComparisonSettings, label_of: LabelOf) -> str:
    """`caf 0.9231 ± 0.0040, not significantly different from krum`, or `caf ...; the next, krum, is 0.0210 lower`."""
    found = best_of(group)
    if found is None:
        return "none is ranked"
    best, decimals = found.combination, found.combination.metric.decimals_for(found.score.mean)
    texts = settings.headings | ({settings.worst: "worst"} if settings.worst else {})
    chosen = ", ".join(f"{text}: {label_of(best, axis)}" for axis, text in texts.items())
    line = f"{label_of(best, first)}{f' ({chosen})' if chosen else ''} {found.score.text(decimals)}"
    if found.tied:
        return f"{line}, not significantly different from {_listed([label_of(each, first) for each in found.tied])}"
    if found.next is None:  # the others failed, or are invalid
        return f"{line}, the only one that is ranked"
    if (gap := found.next.difference_to(best)) is None:
        return line
    size = Estimate(abs(gap.mean), gap.half_width, tuple(map(abs, gap.values)))
    side = "lower" if gap.mean < 0 else "higher"
    return f"{line}; the next, {label_of(found.next, first)}, is {size.text(decimals)} {side}"


def _most_often(groups: Sequence[Sequence[Combination]], first: str, label_of: LabelOf) -> str:
    """`caf, for 9 of 12`: the values that have the best mean in most groups."""
    ranked = [found for group in groups if (found := best_of(group))]
    equal = [[each for each in found.tied if each.score and each.score.mean == found.score.mean] for found in ranked]
    best = [each for found, others in zip(ranked, equal, strict=True) for each in (found.combination, *others)]
    count = Counter(label_of(each, first) for each in best)
    if not count:
        return "none is ranked"
    most = max(count.values())
    names = [name for name, times in count.items() if times == most]
    each = ", each" if len(names) > 1 else ","
    return f"{_listed(names)}{each} for {most} of {len(ranked)}"


def _remarks(combined: Sequence[Combination]) -> list[str]:
    remarks = []
    if max(len(each.runs) for each in combined) == 1:
        remarks.append("With one seed there is no interval, and a difference may be chance.")
    if missing := sum(not each.is_complete(each.score) for each in combined):
        runs = sum(len(each.runs) - len(each.finished) + each.diverged for each in combined)
        why = (
            f"{plural(runs, 'run')} of theirs failed, did not finish or diverged"
            if runs
            else "a run has no finite value"
        )
        are = "is" if missing == 1 else "are"
        remarks.append(f"{missing} of {plural(len(combined), 'combination')} {are} not ranked: {why}.")
    return remarks


def _joined(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
