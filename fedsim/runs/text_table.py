"""The lines that a run prints: headline and table of rounds; and the curve of its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsim.config.experiment import Experiment
from fedsim.core.confidence import fixed
from fedsim.core.plotting import line_style, prepare_axes
from fedsim.errors import plural, show
from fedsim.records.formatting import score_text
from fedsim.records.record import METRICS, Metric, RoundRecord, metrics_in, score_in
from fedsim.runs.setup import PreparedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_METRICS = 4  # of plugs in the table; the files have all
ROUND = Metric("Round", None, decimals=0, column="round", path=("round",))


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
        shown = [each for each in metrics_in([record]) if each.path[0] == group and "_worker_" not in each.key]
        columns += shown[:most]
    return columns


def _attack(experiment: Experiment) -> str:
    attack = experiment.attack
    others = ", others in each round" if attack.redraw else ""
    return attack.name + others + (f", from round {attack.start_round}" if attack.start_round > 1 else "")


def announcement(experiment: Experiment) -> str:
    """The line that describes a run before anything is prepared: name, workers, rounds and algorithm."""
    at_work = "per round" if experiment.policy.bind().in_rounds else "at a time"
    cohort = f", {experiment.cohort_size:,} {at_work}" if experiment.cohort_size < experiment.workers else ""
    byzantine = experiment.attack.count(experiment.workers)
    attackers = f", {byzantine} of them Byzantine ({_attack(experiment)})" if byzantine else ""
    workers = f"{experiment.workers:,} worker{'s' * (experiment.workers > 1)}{attackers}{cohort}"
    return f"{experiment.name}: {workers}; {plural(experiment.rounds, 'round')}; {_algorithm(experiment)}"


def headline(prepared: PreparedRun) -> str:
    """The line that describes a prepared run: data, model, partition, engine and device."""
    experiment = prepared.experiment
    smallest, largest = min(prepared.shard_sizes), max(prepared.shard_sizes)
    shards = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    seen = "" if prepared.sampled_workers is None else f", estimated from {len(prepared.sampled_workers):,} workers"
    processes = f", {prepared.how['processes']} processes" if prepared.how["processes"] > 1 else ""
    width = f", stacks of {prepared.how['width']} rows" if "width" in prepared.how else ""
    held_out = f"{prepared.validation_samples:,} validation, " if prepared.validation_samples else ""
    samples = f"{prepared.train_samples:,} train, {held_out}{prepared.test_samples:,} test"
    return (
        f"{experiment.data.dataset} ({samples}), {experiment.model.name} ({prepared.parameters:,} parameters); "
        f"{shards} samples each ({experiment.partition.strategy}{seen}); "
        f"{prepared.how.get('engine', experiment.engine)}{processes}{width} on {prepared.device}"
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
    return "  ".join(f"{table_cell(column, record):>{_width(column)}}" for column in columns)


def table_cell(column: Metric, record: RoundRecord) -> str:
    """A number of a round, rounded for its column; "-" if the round does not have it."""
    value = column.read(record)
    if value is None:
        return "-"
    counted = column.path[0] == "metrics" and float(value).is_integer()
    return fixed(value, 0 if counted else column.decimals)


def _width(column: Metric) -> int:
    return max(len(column.column), 5 if column is ROUND else 8)


def draw_curve(history: Sequence[RoundRecord], title: str) -> Figure:
    """Accuracy and losses over rounds, and the test's score over virtual seconds if the run has a clock."""
    # Imported here, since it takes half a second. Without pyplot there is no global state.
    from matplotlib.figure import Figure

    def numbers(key: str) -> list[Any]:
        return [record[key] for record in history]

    rounds, times, score = numbers("round"), numbers("virtual_seconds"), score_in(history)
    timed = times[-1] is not None
    shown = [what for what in ("accuracy", "loss") if numbers(f"test_{what}")[-1] is not None]
    panels = len(shown) + timed
    figure = Figure(figsize=(max(6, (4.25 if panels < 3 else 4) * panels), 3.4), layout="constrained")
    figure.suptitle(f"{title}: {score_text(history[-1])} after {plural(rounds[-1], 'round')}", fontsize="medium")
    each = figure.subplots(1, panels, squeeze=False)[0]
    for axes, what in zip(each, shown, strict=False):
        for index, split in enumerate(("test", "train", "validation")):
            key = f"{split}_{what}"
            if key in history[-1] and (split != "validation" or numbers(key)[-1] is not None):
                axes.plot(rounds, numbers(key), **line_style(index, len(rounds)), label=split)
        prepare_axes(axes, whole_numbers=True)
        axes.set(xlabel="round", ylabel="loss" if what == "loss" else "test accuracy")
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    if timed:
        axes = each[-1]
        axes.plot(times, numbers(score.key), **line_style(0, len(rounds)))
        prepare_axes(axes, whole_numbers=False)
        axes.set(xlabel="virtual seconds", ylabel=score.label.lower())
    for axes in each:
        if axes.get_ylabel() == "test accuracy":
            axes.set(ylim=(None, 1))
    return figure
