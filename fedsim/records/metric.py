"""How a number of a round is named and shown, and which of two values is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedsim.records.record import RoundRecord

Better = Literal["higher", "lower", "by name"] | None
OF_PLUGS: dict[str, Literal["higher", "lower"] | None] = {  # recorded by plugs of fedsim
    "available_workers": None,
    "clipped_share": None,
    "kept_energy": "higher",
    "weiszfeld_iterations": None,
}
LOWER_IS_BETTER, INEQUALITY = ("loss", "error", "mse", "mae", "perplexity"), ("_std", "_gini")


@dataclass(frozen=True)
class Metric:
    """How a number of a round is named and shown.

    Attributes:
        label: its name in charts; `{}` stands for the key where the field is a dict of numbers.
        better: which of two values is better where runs are compared; "by name": see `better_called`; None: neither.
        unit: "s" (seconds), "B" (bytes), or "" for a plain number.
        share: whether it lies between 0 and 1.
        decimals: of the value in the terminal's table.
        column: its head in the terminal's table; "" leaves it out of the table.
        tag: its tag in TensorBoard; "" leaves it out there.
        chart: whether the report has a chart of it.
        path: the fields that lead to it; `metrics_in` fills it in.
    """

    label: str
    better: Better
    unit: Literal["", "s", "B"] = ""
    share: bool = False
    decimals: int = 4
    column: str = ""
    tag: str = ""
    chart: bool = True
    path: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The dotted path of the number in a line of `metrics.jsonl`: `asynchronous.updates`."""
        return ".".join(self.path)

    @property
    def sign(self) -> int:
        """-1 if a lower number is better, else 1."""
        return -1 if self.better == "lower" else 1

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target, or better."""
        return self.sign * value >= self.sign * target

    def decimals_for(self, value: float) -> int:
        """`decimals`, or more for four digits of a small number without bounds, such as a squared error."""
        if self.unit == "B":
            return 0
        small = not self.share and 0 < abs(value) < 1e-3
        return 3 - math.floor(math.log10(abs(value))) if small else self.decimals

    def read(self, record: RoundRecord) -> float | None:
        """The number in a record; None if the record has no finite one."""
        value: Any = record
        for name in self.path:
            value = value.get(name) if type(value) is dict else getattr(value, name, None)
        return value if value is not None and math.isfinite(value) else None

    def named(self, name: str) -> Metric:
        """The metric of one key of a dict of numbers."""
        words = {part: getattr(self, part).format(name) for part in ("label", "column", "tag")}
        better = better_called(name) if self.better == "by name" else self.better
        return replace(self, **words, better=better, path=(*self.path, name))


def better_called(name: str) -> Literal["higher", "lower"] | None:
    """Return which of two values is better of a number of a plug or a metric; None: neither.

    A higher value is better, except of the numbers in `OF_PLUGS`, and of losses, errors and measures of inequality,
    whose names hold one of the words in `LOWER_IS_BETTER` or end in one of `INEQUALITY`.

    >>> better_called("macro_f1"), better_called("global_worker_accuracy_gini"), better_called("available_workers")
    ('higher', 'lower', None)
    """
    if name in OF_PLUGS:
        return OF_PLUGS[name]
    return "lower" if name.endswith(INEQUALITY) or any(word in name for word in LOWER_IS_BETTER) else "higher"
