"""Lines of a table as a run goes, and a curve when it is over."""

from __future__ import annotations

import io

from fedsim.experiment import Experiment
from fedsim.preparation import Setting
from fedsim.records import RoundRecord

PHASES = ("pull_down", "train", "aggregate", "test")
HEADER = f"{'round':>5}  {'test loss':>9}  {'accuracy':>8}  {'train loss':>10}" + "".join(
    f"  {phase + ' s':>11}" for phase in PHASES
)


def headline(setting: Setting) -> str:
    """What runs, where, on what, in two lines."""
    experiment = setting.experiment
    smallest, largest = min(setting.shard_sizes), max(setting.shard_sizes)
    shards = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    seen = "" if setting.looked_at is None else f", as seen in {len(setting.looked_at):,} of them"
    cohort = f", {experiment.cohort_size} per round" if experiment.cohort_size < experiment.workers else ""
    processes = f", {setting.how['processes']} processes" if setting.how["processes"] > 1 else ""
    width = f", stacks of {setting.how['width']} rows" if "width" in setting.how else ""
    samples = f"{setting.train_samples:,} train, {setting.test_samples:,} test"
    return (
        f"{experiment.name}: {experiment.data.dataset} ({samples}), "
        f"{experiment.model.name} ({setting.parameters:,} parameters)\n"
        f"{experiment.workers} workers{cohort}, {shards} samples each ({experiment.partition.strategy}{seen}); "
        f"{experiment.aggregate.label} of {_what(experiment)}; "
        f"{setting.how.get('engine', experiment.engine)}{processes}{width} "
        f"on {setting.device}"
    )


def _what(experiment: Experiment) -> str:
    """What is aggregated."""
    if experiment.sync != "post_local":
        return experiment.sync
    return f"gradients, of parameters after round {experiment.gradient_rounds}"


def table_line(record: RoundRecord) -> str:
    """One round as a line under HEADER."""
    numbers = f"{record['round']:>5}  {record['test_loss']:>9.4f}  {record['test_accuracy']:>8.4f}"
    seconds = "".join(f"  {record['seconds'][phase]:>11.3f}" for phase in PHASES)
    return f"{numbers}  {record['train_loss']:>10.4f}{seconds}"


def draw_curve(history: list[RoundRecord], title: str) -> bytes:
    """Accuracy and losses against rounds, as a PNG."""
    # Imported here: it takes half a second, and only the end of a run needs it. No pyplot, so no display and no state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rounds = [record["round"] for record in history]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    marker = "o" if len(rounds) <= 50 else None
    accuracies = [record["test_accuracy"] for record in history]
    figure.suptitle(f"{title}: test accuracy {accuracies[-1]:.4f} after {rounds[-1]} rounds", fontsize="medium")
    accuracy.plot(rounds, accuracies, marker=marker, markersize=4)
    accuracy.set(xlabel="round", ylabel="test accuracy")
    loss.plot(rounds, [record["test_loss"] for record in history], marker=marker, markersize=4, label="test")
    loss.plot(rounds, [record["train_loss"] for record in history], marker=marker, markersize=4, label="train")
    loss.set(xlabel="round", ylabel="loss")
    loss.legend()
    for axes in (accuracy, loss):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
