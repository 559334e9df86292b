"""Terminal display of a run. The display of a comparison is in `comparison/displays.py`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from fedsim.asynchronous.policies.topologies import line_of
from fedsim.callbacks.callback import Callback
from fedsim.clients import PersonalModel
from fedsim.config.engines import traits_of
from fedsim.config.experiment import Experiment
from fedsim.config.from_data import taken_from_data
from fedsim.config.schema import TopAttack
from fedsim.errors import plural, show, show_bytes
from fedsim.records.checkpoints import CheckpointFolder
from fedsim.records.formatting import race_caveat, score_text
from fedsim.records.record import Metric, RoundRecord
from fedsim.records.round_table import columns_of, table_header, table_line
from fedsim.records.worker_results import workers_line
from fedsim.runs.live_run import LiveRun
from fedsim.runs.result import Result

BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} rounds, {remaining} left{postfix}"
DRAWING = "drawing the figures ..."


class ProgressBar(tqdm):
    """A progress bar that is updated after each round."""

    monitor_interval = 0


ProgressBar.set_lock(threading.RLock())  # tqdm's default lock leaks a semaphore if the process is killed


def progress_bar(rounds: int, *, quiet: bool) -> ProgressBar:
    """Return a progress bar for `rounds` rounds. It is not shown if the output is not a terminal."""
    watched = not quiet and sys.stderr.isatty()
    return ProgressBar(total=rounds, bar_format=BAR, smoothing=0.05, leave=False, miniters=1, disable=not watched)


def print_line(line: str, *, quiet: bool) -> None:
    """Print a line above the progress bar. With `quiet`, print nothing."""
    if not quiet:
        with ProgressBar.external_write_mode():
            print(line, flush=True)


class Display(Callback):
    """Shows a run in the terminal: a description, one line per round, and a progress bar.

    Use it as a context manager around the run.

    Args:
        experiment: the experiment of the run.
        folder: folder of the run, or None.
        quiet: print nothing.
    """

    def __init__(self, experiment: Experiment, folder: Path | None, *, quiet: bool) -> None:
        self._experiment, self._folder, self._quiet = experiment, folder, quiet
        self._done = self._before = 0  # number of finished rounds in total, and in earlier sessions
        self._last: RoundRecord | None = None  # last record of a finished run
        self._columns: list[Metric] = []  # set when the first record arrives
        self._begun = time.perf_counter()
        self._bar = progress_bar(experiment.rounds, quiet=quiet)

    def announce(self) -> None:
        """Print a description of the experiment before its data and model are loaded."""
        if self._experiment.mode == "race":
            self._print(race_caveat(self._experiment.race.runs))
        self._print(announcement(self._experiment))

    def on_setup(self, step: str) -> None:
        self._bar.set_description(step)

    def on_start(self, run: LiveRun) -> None:
        self._run, done = run, run.metadata.done
        self._bar.set_description()
        self._print(headline(run))
        if run.metadata.assumed:
            self._print(f"data: {'; '.join(run.metadata.assumed)}")
        if run.metadata.topology:
            self._print(line_of(run.metadata.topology))
        for key, noise in run.metadata.noise.items():
            self._print(f"{key} = {noise:g} for privacy.target_epsilon = {run.experiment.privacy.target_epsilon:g}")
        if done:
            self._done = self._before = done
            self._print(f"continuing after round {done} of {self._bar.total}")
        self._started = time.perf_counter()
        self._bar.reset()
        # The estimate of the remaining time must not count rounds of earlier sessions.
        self._bar.n = self._bar.last_print_n = self._bar.initial = done
        if run.ended:
            self._print(f"this run is finished: {run.ended}")

    def on_round(self, record: RoundRecord) -> None:
        self._done = record.round
        self._show_round(record)
        if tests := self._run.tests_after(record.round):
            self._print(workers_line(tests))

    def _show_round(self, record: RoundRecord) -> None:
        self._bar.set_postfix_str(score_text(record).removeprefix("test "), refresh=False)
        self._bar.update()
        if not self._columns:
            self._columns = columns_of(record, of_workers=bool(self._experiment.data.local_test_fraction))
            self._print(table_header(self._columns))
        self._print(table_line(self._columns, record))

    def on_end(self, result: Result) -> None:
        self._last = result.history[-1]
        if result.stopped and not self._run.ended:
            self._print(f"stopped after round {len(result.history)} of {result.experiment.rounds}: {result.stopped}")
        if at_top := sum(record.top_bytes or 0 for record in result.history):
            in_all = sum(record.total_bytes or 0 for record in result.history)
            self._print(f"{show_bytes(in_all - at_top)} between workers and groups, {show_bytes(at_top)} at the top")
        if updates := sum(record.race.updates or 0 for record in result.history if record.race):
            lost = sum(record.race.updates_lost or 0.0 for record in result.history if record.race)
            self._print(f"{lost:,.0f} of {updates:,} updates were lost (estimated), {100 * lost / updates:.2f} %")

    def on_drawing(self) -> None:
        """Tell the user why the run waits: drawing the figures takes longer than a second."""
        self._print(DRAWING)

    def _finish(self, last: RoundRecord) -> None:
        """Print the final accuracy (or loss) and the time."""
        seconds = time.perf_counter() - self._started
        timed = self._columns and last.virtual_seconds is not None  # no columns if a finished run was resumed
        virtual = f" and {last.virtual_seconds:.1f} virtual seconds" if timed else ""
        now = f", {self._done - self._before} of them in this session," if self._before else ""
        self._print(
            f"final {score_text(last)} after {plural(self._done, 'round')}{virtual}{now} in {seconds:.1f} s "
            f"(and {self._started - self._begun:.1f} s to start)"
        )
        experiment = self._experiment
        untested = isinstance(experiment.local.component, PersonalModel) and not experiment.data.local_test_fraction
        if untested and experiment.in_rounds:
            clusters = experiment.local.component.clusters
            tested = "the global model" if clusters == 1 else f"the first of {clusters} global models"
            self._print(
                f"this is the result of {tested}; data.local_test_fraction=0.2 also tests the workers' personal models"
            )

    def _leave(self) -> None:
        """Print how an unfinished run can be continued."""
        if self._done and self._folder:
            with contextlib.suppress(OSError):  # the run may have ended because stdout is closed
                rounds = f"{self._done} of {plural(self._bar.total, 'round')}"
                saved = CheckpointFolder(self._folder, None, 0).rounds()
                start = f"continue after round {max(saved)}" if saved else "there is no checkpoint yet; start again"
                self._print(f"{rounds} are in {self._folder}; {start} with --resume {self._folder}")

    def _print(self, line: str) -> None:
        print_line(line, quiet=self._quiet)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.close()
        if kind is not None:
            self._leave()
        elif self._last is not None:
            self._finish(self._last)


def _attack(attack: TopAttack) -> str:
    resampled = ", redrawn each round" if attack.resample else ""
    return attack.name + resampled + (f", from round {attack.start_round}" if attack.start_round > 1 else "")


def announcement(experiment: Experiment) -> str:
    """Return a line that describes an experiment: its name, workers, rounds and algorithm."""
    at_work = "per round" if experiment.in_rounds else "at a time"
    cohort = f", {experiment.cohort_size:,} {at_work}" if experiment.cohort_size < experiment.workers else ""
    byzantine = experiment.attack.count(experiment.workers)
    attackers = f", {byzantine} of them Byzantine ({_attack(experiment.attack)})" if byzantine else ""
    workers = f"{experiment.workers:,} worker{'s' * (experiment.workers > 1)}{attackers}{cohort}"
    ranks = f"; {experiment.engine}" if traits_of(experiment.engine).ranks else ""
    return f"{experiment.name}: {workers}; {plural(experiment.rounds, 'round')}; {_algorithm(experiment)}{ranks}"


def headline(run: LiveRun) -> str:
    """Return a line that describes a run: its data, model, partition, engine and device."""
    experiment, metadata = run.experiment, run.metadata
    smallest, largest = min(metadata.shard_sizes), max(metadata.shard_sizes)
    shards = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    seen = "" if metadata.sampled_workers is None else f", estimated from {len(metadata.sampled_workers):,} workers"
    started = {"fork": "forked ", "spawn": "spawned "}.get(metadata.how.get("start_method", ""), "")
    count, engine = metadata.how["processes"], metadata.how["engine"]
    processes = f"{count} {started}process{'es' * (count > 1)}" if started or count > 1 else ""
    way = processes if engine in ("processes", "spawn") else ", ".join(filter(None, (engine, processes)))
    width = f", stacks of {metadata.how['width']} workers" if "width" in metadata.how else ""
    updates = f"; {metadata.how['updates']}" if "updates" in metadata.how else ""
    held_out = f"{metadata.validation_samples:,} validation, " if metadata.validation_samples else ""
    dimensions = "".join(f"{words}, " for words in taken_from_data(experiment))
    samples = f"{metadata.train_samples:,} train, {held_out}{metadata.test_samples:,} test"
    return (
        f"{experiment.data.name} ({samples}), "
        f"{experiment.model.name} ({dimensions}{metadata.parameters:,} parameters); "
        f"{shards} samples each ({experiment.partition.name}{seen}); {way}{width} on {metadata.device}{updates}"
    )


def _algorithm(experiment: Experiment) -> str:
    """Return a description of the algorithm, such as "weighted_mean of updates"."""
    policy, clock = experiment.policy, experiment.clock
    params = ", ".join(f"{name} = {value}" for name, value in policy.params.items() if value is not None)
    described = f"{policy.name} ({params})" if params else policy.name
    if policy.component.in_rounds:
        described = f"{experiment.aggregate.label} of {_aggregated(experiment)}"
    elif not experiment.rule.is_mean:
        described = f"{experiment.aggregate.label} with {described}"
    if count := experiment.group_count:
        every = f"{experiment.group_rounds} rounds" if experiment.group_rounds > 1 else "round"
        byzantine = experiment.top_attack.count(count)
        attackers = f" ({byzantine} of them Byzantine: {_attack(experiment.top_attack)})" if byzantine else ""
        at_top = f"{experiment.top_aggregate.label} of the groups every {every}"
        described += f" in {plural(count, 'group')}{attackers}, {at_top}"
    if experiment.local.algorithm != type(experiment.local).model_fields["algorithm"].default:
        described = f"{experiment.local.algorithm}; {described}"
    if experiment.mode == "rounds":
        return described
    if experiment.mode == "race":
        return f"{described} in mode race"
    source = f"{clock.slowdown.name} slowdowns, {clock.noise.name} noise"
    if clock.replay_log is not None:
        source = f"order from clock.replay_log = {show(clock.replay_log)}"
    return f"{described} on the virtual clock ({source})"


def _aggregated(experiment: Experiment) -> str:
    if experiment.sync != "post_local":
        return "gradients" if experiment.sync == "gradients" else "updates"
    return f"gradients, of updates after round {experiment.switch_after_round}"
