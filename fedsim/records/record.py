"""Records of rounds: one schema for `metrics.jsonl`, the terminal, TensorBoard, reports and comparisons.

To add a number to all of these, declare a field annotated with a `Metric`. Numbers that components record need no
field: they are in `RoundRecord.metrics`, and are shown under their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationInfo
from pydantic.dataclasses import dataclass as validated_dataclass

from fedsim.core.equality import same
from fedsim.core.numbers import Count
from fedsim.errors import cut
from fedsim.hints.attributes import attribute_error, attribute_hint

LARGEST = 1e145  # largest number that is read from a file; a sum of squares of such numbers is finite
MOST_NAMES = 50  # maximum number of phases, and of metrics, in a round

Better = Literal["higher", "lower", "by name"] | None
OF_COMPONENTS: dict[str, Literal["higher", "lower"] | None] = {  # numbers that built-in components record
    "available_workers": None,
    "clip_norm": None,
    "clipped_share": None,
    "clipped_updates": None,
    "consensus_distance": "lower",
    "epsilon": "lower",
    "kept_energy": "higher",
    "weiszfeld_iterations": None,
}
LOWER_IS_BETTER, INEQUALITY = ("loss", "error", "mse", "mae", "perplexity"), ("_std", "_gini")


@dataclass(frozen=True)
class Metric:
    """A number that is recorded in each round: its name, and how it is shown.

    Attributes:
        label: name in charts. `{}` is replaced by the key if the field is a dict of numbers.
        better: whether "higher" or "lower" values are better, or None. "by name": `better_called` decides.
        unit: "s" (seconds), "B" (bytes), or "" for a plain number.
        share: whether all values are between 0 and 1.
        decimals: number of decimals in the terminal's table.
        column: heading in the terminal's table, or "" to leave the number out.
        tag: name in TensorBoard, or "" to leave the number out.
        chart: whether the report has a chart of the number.
        path: field names from the record to the number, such as ("asynchronous", "updates").
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
        """Dotted key of the number in `metrics.jsonl`, such as "asynchronous.updates"."""
        return ".".join(self.path)

    @property
    def sign(self) -> int:
        """-1 if lower numbers are better, otherwise 1."""
        return -1 if self.better == "lower" else 1

    def reaches(self, value: float, target: float) -> bool:
        """Whether `value` is at least as good as `target`, or equal up to rounding."""
        return same(value, target) or self.sign * value > self.sign * target

    def decimals_for(self, value: float, uncertainty: float = 0.0) -> int:
        """Return the number of decimals to show for `value`. Very small values get more decimals.

        They have four significant digits, but not more than the first two of the `uncertainty`, such as the half-width
        of an interval.
        """
        if self.unit == "B":
            return 0
        if self.share or not 0 < abs(value) < 1e-3:
            return self.decimals
        decimals = 3 - math.floor(math.log10(abs(value)))
        if 0 < uncertainty < math.inf:
            decimals = min(decimals, 1 - math.floor(math.log10(uncertainty)))
        return max(self.decimals, decimals)

    def read(self, record: RoundRecord) -> float | None:
        """Return this number from a record, or None if it is missing or not finite."""
        value: Any = record
        for name in self.path:
            value = value.get(name) if type(value) is dict else getattr(value, name, None)
        return value if value is not None and math.isfinite(value) else None

    def named(self, name: str) -> Metric:
        """For a field that is a dict of numbers, return the metric of the number with the key `name`."""
        words = {part: getattr(self, part).format(name) for part in ("label", "column", "tag")}
        better = better_called(name) if self.better == "by name" else self.better
        return replace(self, **words, better=better, path=(*self.path, name))


def better_called(name: str) -> Literal["higher", "lower"] | None:
    """Return whether higher or lower values of a number are better, judging by its name, or None if neither is.

    Lower is better for losses, errors and measures of inequality. For most other numbers, higher is better.

    >>> better_called("macro_f1"), better_called("global_worker_accuracy_gini"), better_called("available_workers")
    ('higher', 'lower', None)
    """
    if name in OF_COMPONENTS:
        return OF_COMPONENTS[name]
    return "lower" if name.endswith(INEQUALITY) or any(word in name for word in LOWER_IS_BETTER) else "higher"


def _drop_huge(value: float | None, info: ValidationInfo) -> float | None:
    """Replace a number by None if it is NaN, infinite or extremely large."""
    return None if value is not None and info.mode == "json" and not abs(value) <= LARGEST else value


def _drop_huge_of(values: list[float | None], info: ValidationInfo) -> list[float | None]:
    """Apply `_drop_huge` to a list, which may have one number per worker."""
    return [_drop_huge(value, info) for value in values] if info.mode == "json" else values


Number = Annotated[float | None, AfterValidator(_drop_huge)]
Numbers = Annotated[list[float | None], AfterValidator(_drop_huge_of)]
Duration = Annotated[float, Field(ge=0, le=LARGEST)]
Text = Annotated[str, AfterValidator(cut)]
Named = Annotated[dict[Text, Number], Field(max_length=MOST_NAMES)]


class Record(dict[str, Any]):
    """Immutable dataclass that can also be used as a dict of its fields, for example by `json.dumps` and pandas."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: {attribute_hint(key, self)}")

    def __getattr__(self, name: str) -> Any:
        raise attribute_error(f"{type(self).__name__!r} object", name, self)

    def __post_init__(self) -> None:
        self.update({item.name: getattr(self, item.name) for item in fields(self)})


record_class = validated_dataclass(config=ConfigDict(extra="ignore"), eq=False, repr=False)


@record_class
class AsyncRecord(Record):
    """Additional numbers of a round in asynchronous training."""

    updates: Annotated[
        Count | None, Metric("Updates", None, decimals=0, column="updates", tag="asynchronous/updates")
    ] = None
    """Number of updates of the global model since the start of the run."""
    arrivals: Annotated[Count | None, Metric("Arrivals", None, tag="asynchronous/arrivals", chart=False)] = None
    """Number of worker results that the server has accepted since the start of the run."""
    staleness: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")], Count] = field(default_factory=dict)
    """Maps each staleness to the number of results with this staleness that were applied in the round."""
    buffered: Annotated[Count | None, Metric("Buffered", None, tag="asynchronous/buffered", chart=False)] = None
    """Number of accepted results that no update has used yet."""
    discarded: Annotated[Count | None, Metric("Discarded", "lower", tag="asynchronous/discarded")] = None
    """Number of results in the round that were cancelled or were too stale on arrival."""
    rejected: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")], Count] = field(default_factory=dict)
    """Maps the ID of a worker to the number of its results in the round that the aggregation rule has rejected."""


@record_class
class TimelineRecord(Record):
    """How each worker spent a round on the virtual clock. All lists have one number per worker in `workers`.

    In an asynchronous round, `training` + `waiting` is the length of the round, unless the worker left
    (`clock.departures`) or `cohort` is less than `workers`. Work that lasts several rounds counts in each of them.
    """

    workers: list[Count] = field(default_factory=list)
    """IDs of the workers that were present. If `cohort` is less than `workers`: of the workers that trained."""
    training: list[Duration] = field(default_factory=list)
    """Virtual seconds that each worker trained, including the time for communication."""
    waiting: list[Duration] = field(default_factory=list)
    """Virtual seconds that each worker waited for other workers."""
    used: list[Count] = field(default_factory=list)
    """Number of each worker's results that were used."""
    dropped: list[Count] = field(default_factory=list)
    """Number of each worker's results that were cancelled, excluded or rejected."""
    staleness: list[Duration] = field(default_factory=list)
    """Mean staleness of each worker's used and rejected results, or 0 without such results."""

    def __post_init__(self) -> None:
        if len({len(getattr(self, item.name)) for item in fields(self)}) > 1:
            raise ValueError("the lists of the timeline differ in length")
        super().__post_init__()

    @classmethod
    def of(
        cls,
        training: Mapping[int, float],
        waiting: Mapping[int, float],
        results: Mapping[tuple[int, int], int],
        dropped: Mapping[int, int],
        rejected: Mapping[int, int],
    ) -> TimelineRecord:
        """Return the record of a round.

        Args:
            training, waiting: virtual seconds by worker ID.
            results: number of results that arrived, by (worker ID, staleness).
            dropped: number of results that were not used, by worker ID.
            rejected: number of dropped results that are also in `results`, by worker ID.
        """
        arrived, stale = Counter[int](), Counter[int]()
        for (worker, staleness), count in results.items():
            arrived[worker] += count
            stale[worker] += staleness * count
        workers = sorted({*training, *waiting})
        return cls(
            workers=workers,
            training=[training.get(worker, 0.0) for worker in workers],
            waiting=[waiting.get(worker, 0.0) for worker in workers],
            used=[max(0, arrived[worker] - rejected.get(worker, 0)) for worker in workers],
            dropped=[dropped.get(worker, 0) for worker in workers],
            staleness=[stale[worker] / max(1, arrived[worker]) for worker in workers],
        )


@record_class
class RaceRecord(Record):
    """Additional numbers of a round in mode "race", in which concurrent processes train one shared model.

    Lists have one number per repetition of the race, and counts are summed over the repetitions. The numbers of lost
    updates are estimates (see docs/explanation/asynchronous.md).
    """

    runs: Count | None = None
    """Number of repetitions."""
    test_accuracies: Numbers = field(default_factory=list)
    """Test accuracy of each repetition."""
    test_accuracy_half_width: Number = None
    """Half width of the 95 percent interval around the mean test accuracy, or None for a single repetition."""
    test_losses: Numbers = field(default_factory=list)
    """Test loss of each repetition."""
    train_losses: Numbers = field(default_factory=list)
    """Train loss of each repetition."""
    samples_per_second: Numbers = field(default_factory=list)
    """Training samples per second of each repetition, not counting the time of tests."""
    updates: Count | None = None
    """Number of updates in the round."""
    updates_lost: Number = None
    """Number of updates that another process overwrote, estimated with a shared counter. 0 if locks are used."""
    lost_fraction: Annotated[Number, Metric("Updates lost (fraction)", "lower", column="lost", share=True)] = None
    """`updates_lost` / `updates`."""
    overlapped_gradients: Annotated[
        Number, Metric("Gradients overlapped by a write (fraction)", "lower", share=True)
    ] = None
    """Fraction of gradients during whose forward and backward pass another process was writing to the model. Such a
    gradient may be computed from a mixture of two versions, but need not be. 0 if locks are used."""
    locks_taken: Count | None = None
    """Number of times that a process acquired a lock."""
    lock_contention: Annotated[Number, Metric("Contended locks (fraction)", "lower", share=True)] = None
    """Fraction of lock requests for which another process held the lock."""
    lock_seconds: Number = None
    """Total time in seconds that the processes waited for locks."""
    held_back: Count | None = None
    """Number of times that a waiting worker ended its round early, because no other worker could make progress."""


@record_class
class RoundRecord(Record):
    """The results of one round, as in `Result.history` and in each line of `metrics.jsonl`.

    In mode "race", losses and accuracies are means over the repetitions of the race, and seconds are sums.

    >>> record = RoundRecord(round=1, test_accuracy=0.5, metrics={"update_norm": 2.0})
    >>> record["test_accuracy"], record.test_accuracy
    (0.5, 0.5)
    >>> [metric.key for metric in metrics_in([record])]
    ['test_accuracy', 'metrics.update_norm']
    """

    round: Count
    """Number of the round, counted from 1."""
    test_accuracy: Annotated[
        Number, Metric("Test accuracy", "higher", share=True, column="accuracy", tag="test/accuracy")
    ] = None
    """Test accuracy of the global model after the round, between 0 and 1."""
    test_loss: Annotated[Number, Metric("Test loss", "lower", column="test loss", tag="test/loss")] = None
    """Test loss of the global model after the round, averaged over the test samples."""
    validation_accuracy: Annotated[
        Number, Metric("Validation accuracy", "higher", share=True, column="val accuracy", tag="validation/accuracy")
    ] = None
    """Accuracy on the samples held out by `data.validation_fraction`, or None without such samples."""
    validation_loss: Annotated[Number, Metric("Validation loss", "lower", column="val loss", tag="validation/loss")] = (
        None
    )
    """Loss on the samples held out by `data.validation_fraction`, or None without such samples."""
    worker_accuracy: Annotated[
        Number, Metric("Worker accuracy", "higher", share=True, column="worker accuracy", tag="worker/accuracy")
    ] = None
    """Accuracy on the workers' local test samples, averaged over the tested workers. Each worker uses its personal
    model, or the global model if the client algorithm has no personal models. None in a round without such tests."""
    worker_loss: Annotated[Number, Metric("Worker loss", "lower", column="worker loss", tag="worker/loss")] = None
    """Loss of the models of `worker_accuracy` on the workers' local test samples, averaged over the tested workers."""
    train_loss: Annotated[Number, Metric("Train loss", "lower", column="train loss", tag="train/loss")] = None
    """Loss during training, averaged over the samples of all workers in the cohort that were not excluded."""
    attack_success: Annotated[Number, Metric("Attack success", "lower", share=True, tag="attack/success")] = None
    """Success rate of a targeted attack on the global model, between 0 and 1 (a lower rate is a better defence). None
    if the attack has no such measure."""
    seconds: Annotated[Named, Metric("{}", "lower", "s", decimals=3, column="{} s", tag="seconds/{}", chart=False)] = (
        field(default_factory=dict)
    )
    """Seconds of each phase: `broadcast` (copying the global model to the workers), `train`, `aggregate`, `test`."""
    cohort: list[Count] = field(default_factory=list)
    """IDs of the workers that took part. Empty if no worker was available or no worker reported."""
    weights: Numbers | None = None
    """Weight of each worker of the cohort in the aggregate, or None if the rule has no weights."""
    clusters: list[Count] = field(default_factory=list)
    """Index of the global model that each worker of the cohort selected and trained. Empty if there is only one."""
    excluded: list[Count] = field(default_factory=list)
    """IDs of the workers whose results were excluded because they contained NaN or infinity. With an asynchronous
    policy, an ID occurs for each excluded result and, on a graph, for each neighbour that excluded a model."""
    diverged: Text | None = None
    """Description of the NaN or infinity that ended the run (`aggregate.nonfinite = "stop"`). In such a round, test
    results are those of the global model before the round, and the record has no other numbers."""
    dropped: list[Count] = field(default_factory=list)
    """IDs of the workers that were sampled but did not report (`sampling.dropout_rate`)."""
    bytes_up: Annotated[Count | None, Metric("Bytes up", "lower", "B", tag="bytes/up", chart=False)] = None
    """Bytes that a real network would carry from workers to server."""
    bytes_down: Annotated[Count | None, Metric("Bytes down", "lower", "B", tag="bytes/down", chart=False)] = None
    """Bytes that a real network would carry from server to workers."""
    top_bytes: Annotated[Count | None, Metric("Bytes at the top", "lower", "B", tag="bytes/top", chart=False)] = None
    """Bytes between the groups and the top level, in both directions, or None without `groups`."""
    samples: list[Count] = field(default_factory=list)
    """Number of samples that each worker of the cohort trained on. A sample in two epochs counts twice."""
    train_losses: Numbers = field(default_factory=list)
    """Mean loss of each worker of the cohort during training, over its `samples`. None for a worker without samples or
    with a loss that is not finite. Empty with asynchronous policies and in races."""
    virtual_seconds: Annotated[
        Number, Metric("Virtual seconds", "lower", "s", decimals=1, column="virtual s", tag="clock/virtual_seconds")
    ] = None
    """Time on the virtual clock since the start of the run, or None without a clock."""
    asynchronous: AsyncRecord | None = None
    """Numbers of asynchronous training, or None for a synchronous round."""
    timeline: TimelineRecord | None = None
    """How each worker spent the round on the virtual clock, or None without a clock."""
    race: RaceRecord | None = None
    """Measurements of mode "race", or None in other modes."""
    metrics: Annotated[Named, Metric("{}", "by name", column="{}", tag="metrics/{}")] = field(default_factory=dict)
    """Numbers that components recorded, by name."""

    def __post_init__(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.cohort):
            raise ValueError(
                f"the number of weights, {len(self.weights)}, differs from the size of the cohort, {len(self.cohort)}"
            )
        super().__post_init__()

    @property
    def total_seconds(self) -> float | None:
        """Seconds spent in all phases, or None if no phase was measured."""
        return _sum(self.seconds.values())

    @property
    def total_bytes(self) -> float | None:
        """Bytes sent in both directions and on all levels, or None if none were counted."""
        return _sum([self.bytes_up, self.bytes_down, self.top_bytes])

    @property
    def staleness(self) -> float | None:
        """Mean staleness of the results that the server used in this round, or None if there are none."""
        return mean_staleness([self])

    @property
    def weights_by_worker(self) -> list[tuple[int, float | None]]:
        """Pairs of worker ID and aggregation weight. Empty if the rule has no weights."""
        return [] if self.weights is None else list(zip(self.cohort, self.weights, strict=True))


RECORD = TypeAdapter(RoundRecord)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean_staleness(records: Iterable[RoundRecord]) -> float | None:
    """Return the mean staleness of all results that the server used in these rounds, or None if there are none."""
    counts: Counter[int] = Counter()
    for record in records:
        for staleness, count in (record.asynchronous.staleness if record.asynchronous else {}).items():
            counts[int(staleness)] += count
    applied = counts.total()
    return sum(staleness * count for staleness, count in counts.items()) / applied if applied else None


Declared = TypeVar("Declared", bound=type[Record])


def _declared(record_type: Declared, path: tuple[str, ...] = ()) -> list[Metric]:
    """Return the metrics of the fields of a record class.

    `path` is () for RoundRecord, or the name of the RoundRecord field that contains the record.
    """
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
    """Return the default metric by which runs are compared: test accuracy, or test loss for a task without accuracy.

    >>> score_in([RoundRecord(round=1, test_loss=0.5)]).key
    'test_loss'
    """
    accuracy, loss = SCORES
    without_accuracy = any(record.test_accuracy is None and record.test_loss is not None for record in records)
    return loss if without_accuracy else accuracy


SIGNS: dict[str, Literal["higher", "lower"]] = {"+": "higher", "-": "lower"}


class History(list[RoundRecord]):
    """List of the rounds' records. With a metric's name as index (`history["test_loss"]`), KeyError gives a hint."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            hint = f'write history[-1]["{index}"]' if self and index in self[-1] else attribute_hint(index, self[-1])
            raise KeyError(
                f"{index}: history is a list with one record per round, and history[-1] is the last record; {hint}"
            )
        return super().__getitem__(index)


def metric_called(name: str) -> Metric:
    """Return the metric with this name. A sign before the name says whether higher (+) or lower (-) is better.

    >>> metric_called("-metrics.drift").key, metric_called("-metrics.drift").better, metric_called("test_loss").better
    ('metrics.drift', 'lower', 'lower')
    """
    key = name.removeprefix(name[:1]) if name[:1] in SIGNS else name
    path = tuple(key.split(".", 1))
    declared = [metric.named(path[-1]) if "{}" in metric.label else metric for metric in METRICS]
    metric = next((known for known in declared if known.key == key), Metric(key, None, path=path))
    return replace(metric, better=SIGNS.get(name[:1], metric.better))


def metrics_in(records: Iterable[RoundRecord]) -> list[Metric]:
    """Return the metrics that have a finite value in at least one record."""
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
