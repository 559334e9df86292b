"""Draw all pairs of top-level keys evenly, and count which pairs were run together."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import fedsim
from tests.fuzz.draw import Settings, changed_keys

Pair = tuple[str, str]


class Pairs:
    """Counts of the pairs of top-level keys whose values were both changed in an experiment that was run.

    Args:
        seed: of the order in which pairs are tried.

    Attributes:
        all: all pairs, in the order of `Experiment`.
        run: number of draws in which each pair was run.
        refused: why the latest experiment with a pair was refused.
    """

    def __init__(self, seed: int) -> None:
        self.all = list(itertools.combinations(fedsim.Experiment.model_fields, 2))
        random.Random(f"pairs {seed}").shuffle(self.all)
        self.run: Counter[Pair] = Counter()
        self.refused: dict[Pair, str] = {}
        self._tried: Counter[Pair] = Counter()

    def rarest(self) -> Pair:
        """Return the pair with the fewest runs and tries, which then has one more try."""
        pair = min(self.all, key=lambda pair: self.run[pair] + self._tried[pair])
        self._tried[pair] += 1
        return pair

    def count(self, experiments: Iterable[Settings]) -> None:
        """Count the pairs in the experiments that were run for one draw, each once."""
        changed = map(changed_keys, {repr(settings): settings for settings in experiments}.values())
        self.run.update({pair for keys in changed for pair in self.all if keys.issuperset(pair)})

    def lines(self) -> list[str]:
        """Return a line for each key, and one for each pair that was never run, with the reason."""
        never = [pair for pair in self.all if not self.run[pair]]
        counts = sorted(self.run[pair] for pair in self.all if self.run[pair]) or [0]
        refused = {pair: self.refused[pair] for pair in never if pair in self.refused}
        first = f"pairs of {len(fedsim.Experiment.model_fields)} keys: {len(self.all) - len(never)} drawn, each "
        first += f"{counts[0]} to {counts[-1]} times, median {counts[len(counts) // 2]}; {len(refused)} refused in one "
        lines = [first + f"line, {len(never) - len(refused)} never drawn"]
        for key in fedsim.Experiment.model_fields:
            of_key = [pair for pair in self.all if key in pair]
            drawn = sorted(self.run[pair] for pair in of_key if self.run[pair])
            absent = [_other(pair, key) for pair in of_key if pair in never and pair not in refused]
            times = f"{len(drawn)} drawn, each {drawn[0]} to {drawn[-1]} times" if drawn else "none drawn"
            lines.append(f"  {key:22} {times}" + (f"; never {', '.join(sorted(absent))}" if absent else ""))
        return lines + [f"  refused {' + '.join(pair)}: {line}" for pair, line in sorted(refused.items())]


def _other(pair: Pair, key: str) -> str:
    return pair[pair[0] == key]
