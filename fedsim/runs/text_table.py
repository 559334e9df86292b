"""The lines that a run prints: headline and table of rounds; and the curve of its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsim.config.experiment import Experiment
from fedsim.core.confidence import fixed
from fedsim.core.plotting import line_style, prepare_axes
from fedsim.errors import plural, show
from fedsim.records.record import METRICS, Metric, RoundRecord, metrics_in
from fedsim.runs.setup import PreparedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_METRICS = 4  # of plugs in the table; the files have all
ROUND = Metric("Round", decimals=0, column="round", path=("round",))


def columns_of(record: RoundRecord) -> list[Metric]:
    """The columns of the table, found in the first record.

    They include the seconds of each phase, or, on the clock, virtual seconds and asynchronous work.
    """
    asynchronous = record.asynchronous is not None and record.race is None
    on_clock = asynchronous or record.virtual_seconds is not None
    optional = ("virtual_seconds", "test_accuracy", "validation_accuracy", "validation_loss")
    absent = {key for key in optional if record[key] is None}
    absent |= set() if asynchronous else {"asynchronous.updates", "staleness"}
    columns = [ROUND]
    columns += [each for each in METRICS if each.column and each.key not in absent and "{}" not in each.column]
    for group, most in (("seconds", 0 if on_clock else None), ("metrics", MOST_METRICS)):
        shown = [each for each in metrics_in([record]) if each.path[0] == group and "_worker_accuracy_" not in each.key]
        columns += shown[:most]
    return columns


def headline(prepared: PreparedRun) -> str:
    """Two lines that describe the run."""
    experiment = prepared.experiment
    smallest, largest = min(prepared.shard_sizes), max(prepared.shard_sizes)
    shards = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    seen = "" if prepared.sampled_workers is None else f", estimated from {len(prepared.sampled_workers):,} workers"
    at_work = "per round" if experiment.policy.bind().in_rounds else "at a time"
    cohort = f", {experiment.cohort_size:,} {at_work}" if experiment.cohort_size < experiment.workers else ""
    byzantine = experiment.attack.count(experiment.workers)
    attackers = f", {byzantine} of them Byzantine ({experiment.attack.name})" if byzantine else ""
    processes = f", {prepared.how['processes']} processes" if prepared.how["processes"] > 1 else ""
    width = f", stacks of {prepared.how['width']} rows" if "width" in prepared.how else ""
    held_out = f"{prepared.validation_samples:,} validation, " if prepared.validation_samples else ""
    samples = f"{prepared.train_samples:,} train, {held_out}{prepared.test_samples:,} test"
    return (
        f"{experiment.name}: {experiment.data.dataset} ({samples}), "
        f"{experiment.model.name} ({prepared.parameters:,} parameters)\n"
        f"{experiment.workers:,} workers{attackers}{cohort}, {shards} samples each "
        f"({experiment.partition.strategy}{seen}); "
        f"{_algorithm(experiment)}; "
        f"{prepared.how.get('engine', experiment.engine)}{processes}{width} "
        f"on {prepared.device}"
    )


def _algorithm(experiment: Experiment) -> str:
    """`weighted_mean of parameters`, or `ssp (s = 3) on the virtual clock (linear speeds, lognormal noise)`."""
    policy, clock = experiment.policy, experiment.clock
    params = ", ".join(f"{name} = {value}" for name, value in policy.params.items() if value is not None)
    described = f"{policy.name} ({params})" if params else policy.name
    if policy.bind().in_rounds:
        described = f"{experiment.aggregate.label} of {_aggregated(experiment)}"
    if experiment.local.solver != type(experiment.local).model_fields["solver"].default:
        described = f"{experiment.local.solver}; {described}"
    if experiment.mode == "rounds":
        return described
    if experiment.mode == "race":
        return f"{described} in mode race"
    source = f"{clock.speed.name} speeds, {clock.noise.name} noise"
    if clock.log is not None:
        source = f"order from clock.log = {show(clock.log)}"
    return f"{described} on the virtual clock ({source})"


def _aggregated(experiment: Experiment) -> str:
    if experiment.sync != "post_local":
        return experiment.sync
    return f"gradients, of parameters after round {experiment.gradient_rounds}"


def table_header(columns: Sequence[Metric]) -> str:
    """The heads of the columns."""
    return "  ".join(f"{column.column:>{_width(column)}}" for column in columns)


def table_line(columns: Sequence[Metric], record: RoundRecord) -> str:
    """One round as a line of the table."""
    return "  ".join(f"{_cell(column, record):>{_width(column)}}" for column in columns)


def _cell(column: Metric, record: RoundRecord) -> str:
    value = column.read(record)
    return "-" if value is None else fixed(value, column.decimals)


def _width(column: Metric) -> int:
    return max(len(column.column), 5 if column is ROUND else 8)


def draw_curve(history: Sequence[RoundRecord], title: str) -> Figure:
    """Accuracy and losses over rounds, and accuracy over virtual seconds if the run has a clock."""
    # Imported here, since it takes half a second. Without pyplot there is no global state.
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
    accuracy.plot(rounds, accuracies, **style, label="test")
    loss.plot(rounds, numbers("test_loss"), **style, label="test")
    loss.plot(rounds, numbers("train_loss"), **second, label="train")
    if numbers("validation_accuracy")[-1] is not None:
        third = line_style(2, len(rounds))
        accuracy.plot(rounds, numbers("validation_accuracy"), **third, label="validation")
        loss.plot(rounds, numbers("validation_loss"), **third, label="validation")
        accuracy.legend(fontsize="small")
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
        axes.set(ylabel="test accuracy", ylim=(None, 1))
    return figure
