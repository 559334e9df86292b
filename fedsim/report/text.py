"""Lines of a table as a run goes, and a curve when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsim.errors import plural, show
from fedsim.experiment import Experiment
from fedsim.intervals import fixed
from fedsim.plotting import line_style, prepare_axes
from fedsim.preparation import Setting
from fedsim.records import AsyncRecord, RoundRecord
from fedsim.runs.progress import mean_staleness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("pull_down", "train", "aggregate", "test")


class Column(NamedTuple):
    """A column of the table of rounds: its head, how wide it is, and what stands in it."""

    head: str
    width: int
    show: Callable[[RoundRecord], str]


def _phase(name: str) -> Column:
    return Column(f"{name} s", 11, lambda record: f"{record['seconds'][name]:.3f}")


def _of_asynchronous(show: Callable[[AsyncRecord], object]) -> Callable[[RoundRecord], str]:
    """What there is to show of asynchronous work; of a synchronous round, nothing."""
    return lambda record: "" if record["asynchronous"] is None else str(show(record["asynchronous"]))


def _staleness(record: RoundRecord) -> str:
    mean = mean_staleness([record])
    return "-" if mean is None else f"{mean:.2f}"


RESULTS = (
    Column("round", 5, lambda record: str(record["round"])),
    Column("test loss", 9, lambda record: fixed(record["test_loss"])),
    Column("accuracy", 8, lambda record: fixed(record["test_accuracy"])),
    Column("train loss", 10, lambda record: fixed(record["train_loss"])),
)
TIMES = tuple(map(_phase, PHASES))
VIRTUAL = (Column("virtual s", 11, lambda record: f"{record['virtual_seconds']:.1f}"),)
ASYNCHRONOUS = (
    Column("updates", 9, _of_asynchronous(lambda work: work["updates"])),
    Column("staleness", 9, _staleness),
)


def columns_of(experiment: Experiment) -> Sequence[Column]:
    """The columns of the table of rounds: the time of each phase, or virtual time, which a replay of a race has not."""
    if experiment.mode != "clock":
        return (*RESULTS, *TIMES)
    timed = VIRTUAL if experiment.clock.log is None else ()
    return (*RESULTS, *timed, *(() if experiment.policy.bind().in_rounds else ASYNCHRONOUS))


def headline(setting: Setting) -> str:
    """What runs, where, on what, in two lines."""
    experiment = setting.experiment
    smallest, largest = min(setting.shard_sizes), max(setting.shard_sizes)
    shards = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    seen = "" if setting.looked_at is None else f", estimated from {len(setting.looked_at):,} workers"
    at_work = "per round" if experiment.policy.bind().in_rounds else "at a time"
    cohort = f", {experiment.cohort_size:,} {at_work}" if experiment.cohort_size < experiment.workers else ""
    byzantine = experiment.attack.count(experiment.workers)
    attackers = f", {byzantine} of them Byzantine ({experiment.attack.name})" if byzantine else ""
    processes = f", {setting.how['processes']} processes" if setting.how["processes"] > 1 else ""
    width = f", stacks of {setting.how['width']} rows" if "width" in setting.how else ""
    samples = f"{setting.train_samples:,} train, {setting.test_samples:,} test"
    return (
        f"{experiment.name}: {experiment.data.dataset} ({samples}), "
        f"{experiment.model.name} ({setting.parameters:,} parameters)\n"
        f"{experiment.workers:,} workers{attackers}{cohort}, {shards} samples each "
        f"({experiment.partition.strategy}{seen}); "
        f"{_what_happens(experiment)}; "
        f"{setting.how.get('engine', experiment.engine)}{processes}{width} "
        f"on {setting.device}"
    )


def _what_happens(experiment: Experiment) -> str:
    """`weighted_mean of parameters`, or `ssp (s = 3) on the virtual clock (linear speeds, lognormal noise)`."""
    policy, clock = experiment.policy, experiment.clock
    params = ", ".join(f"{name} = {value}" for name, value in policy.params.items() if value is not None)
    described = f"{policy.name} ({params})" if params else policy.name
    if policy.bind().in_rounds:
        described = f"{experiment.aggregate.label} of {_what(experiment)}"
    if experiment.mode == "rounds":
        return described
    if experiment.mode == "race":
        return f"{described} in mode race"
    source = f"{clock.speed.name} speeds, {clock.noise.name} noise"
    if clock.log is not None:
        source = f"order from clock.log = {show(clock.log)}"
    return f"{described} on the virtual clock ({source})"


def _what(experiment: Experiment) -> str:
    """What is aggregated."""
    if experiment.sync != "post_local":
        return experiment.sync
    return f"gradients, of parameters after round {experiment.gradient_rounds}"


def table_header(columns: Sequence[Column]) -> str:
    """The heads of the columns."""
    return "  ".join(f"{column.head:>{column.width}}" for column in columns)


def table_line(columns: Sequence[Column], record: RoundRecord) -> str:
    """One round as a line under them."""
    return "  ".join(f"{column.show(record):>{column.width}}" for column in columns)


def draw_curve(history: list[RoundRecord], title: str) -> Figure:
    """Accuracy and losses against rounds, and accuracy against virtual seconds where there are such."""
    # Imported here: it takes half a second, and only the end of a run needs it. No pyplot, so no display and no state.
    from matplotlib.figure import Figure

    def numbers(key: str) -> list[Any]:
        return [record[key] for record in history]

    rounds, accuracies, times = numbers("round"), numbers("test_accuracy"), numbers("virtual_seconds")
    timed = times[-1] is not None
    figure = Figure(figsize=(12 if timed else 8.5, 3.4), layout="constrained")
    reached = f"test accuracy {fixed(accuracies[-1])} after {plural(rounds[-1], 'round')}"
    figure.suptitle(f"{title}: {reached}", fontsize="medium")
    accuracy, loss, *further = figure.subplots(1, 3 if timed else 2)
    style, second = line_style(0, len(rounds)), line_style(1, len(rounds))
    accuracy.plot(rounds, accuracies, **style)
    loss.plot(rounds, numbers("test_loss"), **style, label="test")
    loss.plot(rounds, numbers("train_loss"), **second, label="train")
    loss.set(xlabel="round", ylabel="loss")
    loss.legend(fontsize="small")
    for axes in further:
        axes.plot(times, accuracies, **style)
        prepare_axes(axes, whole_numbers=False)
        axes.set(xlabel="virtual seconds")
    for axes in (accuracy, loss):
        prepare_axes(axes, whole_numbers=True)
    accuracy.set(xlabel="round")
    for axes in (accuracy, *further):
        axes.set(ylabel="test accuracy", ylim=(None, 1))  # how far it is from perfect
    return figure
