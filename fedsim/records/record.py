"""The record of a round: one schema for `metrics.jsonl`, the terminal, TensorBoard, reports and comparisons.

A number that is to be shown is declared once, as a field with a `Metric`. A component needs no field: a number in
`RoundRecord.metrics` reaches the same places under its name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationInfo
from pydantic.dataclasses import dataclass as validated_dataclass

from fedsim.errors import cut

LARGEST = 1e145  # of a number that is read: the sum of squares of such numbers is finite
MOST_NAMES = 50  # of phases and of metrics, in a round

Better = Literal["higher", "lower", "by name"] | None
OF_COMPONENTS: dict[str, Literal["higher", "lower"] | None] = {  # recorded by components of fedsim
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
        """Return the number in a record; None if the record has no finite one."""
        value: Any = record
        for name in self.path:
            value = value.get(name) if type(value) is dict else getattr(value, name, None)
        return value if value is not None and math.isfinite(value) else None

    def named(self, name: str) -> Metric:
        """Return the metric of one key of a dict of numbers."""
        words = {part: getattr(self, part).format(name) for part in ("label", "column", "tag")}
        better = better_called(name) if self.better == "by name" else self.better
        return replace(self, **words, better=better, path=(*self.path, name))


def better_called(name: str) -> Literal["higher", "lower"] | None:
    """Return which of two values is better of a number of a component or a metric; None: neither.

    A higher value is better, except of the numbers in `OF_COMPONENTS`, and of losses, errors and measures of
    inequality, whose names hold one of the words in `LOWER_IS_BETTER` or end in one of `INEQUALITY`.

    >>> better_called("macro_f1"), better_called("global_worker_accuracy_gini"), better_called("available_workers")
    ('higher', 'lower', None)
    """
    if name in OF_COMPONENTS:
        return OF_COMPONENTS[name]
    return "lower" if name.endswith(INEQUALITY) or any(word in name for word in LOWER_IS_BETTER) else "higher"


def _drop_huge(value: float | None, info: ValidationInfo) -> float | None:
    """None in place of a number in a file that is not finite, or too large to compute with."""
    return None if value is not None and info.mode == "json" and not abs(value) <= LARGEST else value


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float | None, AfterValidator(_drop_huge)]
Text = Annotated[str, AfterValidator(cut)]
Named = Annotated[dict[Text, Number], Field(max_length=MOST_NAMES)]


class Record(dict[str, Any]):
    """A dataclass that is also a dict of its fields, so that `json.dumps` and pandas accept it. Never changed."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        self.update({each.name: getattr(self, each.name) for each in fields(self)})


record_class = validated_dataclass(config=ConfigDict(extra="ignore"), eq=False, repr=False)


@record_class
class AsyncRecord(Record):
    """Asynchronous work of a round."""

    updates: Annotated[
        Count | None, Metric("Updates", None, decimals=0, column="updates", tag="asynchronous/updates")
    ] = None
    """Updates of the global row since the start."""
    arrivals: Annotated[Count | None, Metric("Arrivals", None, tag="asynchronous/arrivals", chart=False)] = None
    """Results of workers that the server has taken since the start."""
    staleness: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")], Count] = field(default_factory=dict)
    """How many results of each staleness were applied in the round."""
    buffered: Annotated[Count | None, Metric("Buffered", None, tag="asynchronous/buffered", chart=False)] = None
    """Results that the server has taken and no update has used yet."""
    discarded: Annotated[Count | None, Metric("Discarded", "lower", tag="asynchronous/discarded")] = None
    """Results of the round that were cancelled, or too stale on arrival."""


@record_class
class RaceRecord(Record):
    """Measurements of a round of a race. Lists have one number per run; counts are sums over the runs.

    Without a lock, torn coordinates and lost updates cannot be seen. The counts are of observable substitutes; see
    docs/explanation/asynchronous.md.
    """

    runs: Count | None = None
    test_accuracies: list[Number] = field(default_factory=list)
    test_accuracy_half_width: Number = None
    """Of the 95 percent interval around their mean; None of a single run."""
    test_losses: list[Number] = field(default_factory=list)
    train_losses: list[Number] = field(default_factory=list)
    samples_per_second: list[Number] = field(default_factory=list)
    """Training samples, without the time of tests."""
    updates: Count | None = None
    updates_lost: Number = None
    """Updates that another process overwrote, estimated by a counter beside the model; 0 under a lock."""
    lost_fraction: Annotated[Number, Metric("Updates lost (fraction)", "lower", share=True)] = None
    """`updates_lost` / `updates`."""
    torn_reads: Annotated[Number, Metric("Torn reads (fraction)", "lower", share=True)] = None
    """Fraction of the gradients during whose computation another process wrote the model."""
    locks_taken: Count | None = None
    lock_contention: Annotated[Number, Metric("Contended locks (fraction)", "lower", share=True)] = None
    """Fraction of the locks that another process held."""
    lock_seconds: Number = None
    """Time that processes waited for locks, summed over them."""
    held_back: Count | None = None
    """How often a worker could not end its round because no other worker was left to release it."""


@record_class
class RoundRecord(Record):
    """One round: an item of `Result.history`, an argument of `on_round`, and a line of `metrics.jsonl`.

    In a race, losses and accuracies are means over its runs, seconds are sums, and the rest is of the first run. Fields
    that a file lacks have their defaults, and unknown ones are ignored.

    >>> record = RoundRecord(round=1, test_accuracy=0.5, metrics={"update_norm": 2.0})
    >>> record["test_accuracy"], record.test_accuracy
    (0.5, 0.5)
    >>> [metric.key for metric in metrics_in([record])]
    ['test_accuracy', 'metrics.update_norm']
    """

    round: Count
    """From 1."""
    test_accuracy: Annotated[
        Number, Metric("Test accuracy", "higher", share=True, column="accuracy", tag="test/accuracy")
    ] = None
    """Of the global model after the round, as a fraction."""
    test_loss: Annotated[Number, Metric("Test loss", "lower", column="test loss", tag="test/loss")] = None
    """Of the global model after the round, mean per test sample."""
    validation_accuracy: Annotated[
        Number,
        Metric("Validation accuracy", "higher", share=True, column="val accuracy", tag="validation/accuracy"),
    ] = None
    """As `test_accuracy`, of the samples that `data.validation_fraction` holds out; None without such samples."""
    validation_loss: Annotated[Number, Metric("Validation loss", "lower", column="val loss", tag="validation/loss")] = (
        None
    )
    """As `test_loss`, of these samples."""
    train_loss: Annotated[Number, Metric("Train loss", "lower", column="train loss", tag="train/loss")] = None
    """Mean per training sample, while the cohort trained, without excluded workers."""
    attack_success: Annotated[Number, Metric("Attack success", "lower", share=True, tag="attack/success")] = None
    """Fraction of the attacker's goal that the global model does, so that a lower one is a better defence; None if the
    attack has no such goal."""
    seconds: Annotated[Named, Metric("{}", "lower", "s", decimals=3, column="{} s", tag="seconds/{}", chart=False)] = (
        field(default_factory=dict)
    )
    """By phase: pull_down, train, aggregate, test."""
    cohort: list[Count] = field(default_factory=list)
    """The workers that took part; empty if no worker was available, or none reported."""
    coefficients: list[Number] | None = None
    """The coefficient of each worker's row in the aggregate; None if the rule has none."""
    excluded: list[Count] = field(default_factory=list)
    """Workers whose rows were excluded because they were not finite."""
    diverged: Text | None = None
    """What held NaN or infinity and ended the run (`aggregate.nonfinite = "stop"`); the tests are those of the global
    model before the round, and there are no other numbers."""
    lost: list[Count] = field(default_factory=list)
    """Workers that were chosen and did not report (`sampling.client_dropout`)."""
    bytes_up: Annotated[Count | None, Metric("Bytes up", "lower", "B", tag="bytes/up", chart=False)] = None
    """Bytes that a real network would carry from workers to server."""
    bytes_down: Annotated[Count | None, Metric("Bytes down", "lower", "B", tag="bytes/down", chart=False)] = None
    """Bytes that a real network would carry from server to workers."""
    samples: list[Count] = field(default_factory=list)
    """Training samples of each worker of the cohort, repetitions counted."""
    virtual_seconds: Annotated[
        Number, Metric("Virtual seconds", "lower", "s", decimals=1, column="virtual s", tag="clock/virtual_seconds")
    ] = None
    """Since the start, on the virtual clock; None without a clock."""
    asynchronous: AsyncRecord | None = None
    """None of a synchronous round."""
    race: RaceRecord | None = None
    """None if the mode is no race."""
    metrics: Annotated[Named, Metric("{}", "by name", column="{}", tag="metrics/{}")] = field(default_factory=dict)
    """Numbers of components, by name."""

    def __post_init__(self) -> None:
        if self.coefficients is not None and len(self.coefficients) != len(self.cohort):
            raise ValueError(f"{len(self.coefficients)} coefficients for a cohort of {len(self.cohort)}")
        super().__post_init__()

    @property
    def total_seconds(self) -> float | None:
        """Of all phases."""
        return _sum(self.seconds.values())

    @property
    def total_bytes(self) -> float | None:
        """Up and down."""
        return _sum([self.bytes_up, self.bytes_down])

    @property
    def staleness(self) -> float | None:
        """The mean over all results that were applied."""
        return mean_staleness([self])

    @property
    def weights(self) -> list[tuple[int, float | None]]:
        """(worker, coefficient) of the cohort; empty if the rule has no coefficients."""
        return [] if self.coefficients is None else list(zip(self.cohort, self.coefficients, strict=True))


RECORD = TypeAdapter(RoundRecord)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean_staleness(records: Iterable[RoundRecord]) -> float | None:
    """Return the mean over all results that were applied in these rounds; None if there are none."""
    counts: Counter[int] = Counter()
    for record in records:
        for staleness, count in (record.asynchronous.staleness if record.asynchronous else {}).items():
            counts[int(staleness)] += count
    applied = counts.total()
    return sum(staleness * count for staleness, count in counts.items()) / applied if applied else None


Declared = TypeVar("Declared", bound=type[Record])


def _declared(record_type: Declared, path: tuple[str, ...] = ()) -> list[Metric]:
    """Return the metrics of a record's fields, in order; `path` leads to the record."""
    hints = get_type_hints(record_type, include_extras=True)
    return [
        replace(metric, path=(*path, name))
        for name, hint in hints.items()
        for metric in getattr(hint, "__metadata__", ())
        if isinstance(metric, Metric)
    ]


DERIVED = (
    Metric("Seconds", "lower", "s", path=("total_seconds",)),
    Metric("Bytes", "lower", "B", path=("total_bytes",)),
    Metric(
        "Mean staleness", "lower", decimals=2, column="staleness", tag="asynchronous/staleness", path=("staleness",)
    ),
)
METRICS = (
    *_declared(RoundRecord),
    *_declared(AsyncRecord, ("asynchronous",)),
    *DERIVED,
    *_declared(RaceRecord, ("race",)),
)


SCORES = tuple(metric for metric in METRICS if metric.key in ("test_accuracy", "test_loss"))


def score_in(records: Iterable[RoundRecord]) -> Metric:
    """Return the number that runs are compared by: the test accuracy, or of a task without accuracy the test loss.

    >>> score_in([RoundRecord(round=1, test_loss=0.5)]).key
    'test_loss'
    """
    accuracy, loss = SCORES
    return loss if any(each.test_accuracy is None and each.test_loss is not None for each in records) else accuracy


SIGNS: dict[str, Literal["higher", "lower"]] = {"+": "higher", "-": "lower"}


def metric_called(name: str) -> Metric:
    """Return the metric with this key, known or not; a name that begins with + or - says which value is better.

    >>> metric_called("-metrics.drift").key, metric_called("-metrics.drift").better, metric_called("test_loss").better
    ('metrics.drift', 'lower', 'lower')
    """
    key = name.removeprefix(name[:1]) if name[:1] in SIGNS else name
    path = tuple(key.split(".", 1))
    declared = [metric.named(path[-1]) if "{}" in metric.label else metric for metric in METRICS]
    metric = next((each for each in declared if each.key == key), Metric(key, None, path=path))
    return replace(metric, better=SIGNS.get(name[:1], metric.better))


def metrics_in(records: Iterable[RoundRecord]) -> list[Metric]:
    """Return the metrics of which at least one record has a finite value, in the order of their declaration."""
    records = list(records)
    present: list[Metric] = []
    for metric in METRICS:
        if "{}" in metric.label:
            names = dict.fromkeys(name for record in records for name in record[metric.path[0]])
            candidates = [metric.named(name) for name in names]
        else:
            candidates = [metric]
        present += [metric for metric in candidates if any(metric.read(record) is not None for record in records)]
    return present
