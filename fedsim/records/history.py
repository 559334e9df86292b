"""The files of a run folder, and its rounds: `metrics.jsonl`, perhaps damaged, unfinished, or of an unknown author."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim.core.input_limits import problem_with_words
from fedsim.errors import RecordError, cut
from fedsim.records.record import MOST_NAMES, RECORD, RoundRecord
from fedsim.system.files import is_file, read_bounded, to_json

EXPERIMENT, METRICS, EVENTS = "experiment.toml", "metrics.jsonl", "events.jsonl"
MOST_METRICS_BYTES, MOST_LINE_BYTES, MOST_ROUNDS = 2**29, 2**26, 500_000  # much more than any run writes
MOST_OBJECT_BYTES = 2**24

FILES = {
    EXPERIMENT: "The experiment as it was run, with all its settings. `fedsim run` accepts it again.",
    "environment.json": "Versions, machine, engine and the reason for its choice, numbers of parameters and samples.",
    "metrics.jsonl": "One JSON object for each round; its fields are below.",
    "events.jsonl": "One JSON object for each event: a lost process, an early end, a resumed run.",
    "partition.json": "The number of samples of each class of each worker, and the Byzantine workers.",
    "model.safetensors": "The global model after the last round: its `state_dict`. Unless `records.model = false`.",
    "curve.png": "Accuracy and losses over the rounds. Unless `records.curve = false`; also svg and pdf.",
    "workers.png": "The last test of single workers, with `data.local_test_fraction`; also svg and pdf.",
    "workers-*.csv": "The test of single workers after a round: one row for each worker.",
    "updates-*.safetensors": "The updates of a round of `records.updates`, for `fedsim replay`.",
    "race.csv": "The order of events of a race, for `clock.replay_log`.",
    "checkpoints/round-*.safetensors": "The tensors of a checkpoint, from which `fedsim run --resume` continues.",
    "checkpoints/round-*.json": "The other state of a checkpoint, and checksums.",
    "events.out.tfevents.*": "What TensorBoard shows, with the logger `tensorboard`.",
    "error.txt": "In a comparison: why this run failed.",
    "report.html": "What `fedsim report` writes.",
}
PATTERNS = [name.replace(".png", ".*") for name in FILES]  # of their names; figures are also svg and pdf


def experiment_of_run(folder: Path) -> Path:
    """Return the experiment file of a run folder. Raises RecordError if there is none."""
    if not (folder / EXPERIMENT).is_file():
        raise RecordError(
            f"{folder}: is not a run folder (no {EXPERIMENT}); to start a new run there, name an experiment file too"
        )
    return folder / EXPERIMENT


def to_line(record: RoundRecord) -> str:
    """Return a record as a line of `metrics.jsonl`; numbers that are not finite become null."""
    return to_json(record) + "\n"


def read_history(folder: Path) -> list[RoundRecord]:
    """Return the finished rounds of a run folder, from the first to the last that can be used to resume the run.

    An incomplete last line is ignored, and so is everything after a line that no run writes.
    """
    try:
        lines = read_bounded(folder / METRICS, MOST_METRICS_BYTES, folder).split(b"\n")[:-1]
    except OSError:
        return []
    records: list[RoundRecord] = []
    for line in lines:
        try:
            record = RECORD.validate_json(line)
        except ValidationError:
            break
        accuracy, first = record.test_accuracy, records[0] if records else record
        has_gaps = None in record.seconds.values() or (accuracy is None) != (first.test_accuracy is None)
        if record.round != len(records) + 1 or has_gaps or not (accuracy is None or 0 <= accuracy <= 1):
            break
        records.append(with_nan_losses(record))
    return records


def with_nan_losses(record: RoundRecord) -> RoundRecord:
    """Return a record that was read, with NaN for its losses that the file has as null."""
    losses = {key: math.nan for key in ("test_loss", "train_loss") if record[key] is None}
    return replace(record, **losses) if losses else record


def read_metrics(path: Path) -> tuple[list[RoundRecord], bool]:
    """Return the rounds of a metrics file, and whether its last line is incomplete, which is then left out.

    Raises RecordError, with the number of the line, if any other line is no record.
    """
    lines = io.BytesIO(read_file(path, MOST_METRICS_BYTES))
    records: list[RoundRecord] = []
    phases: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        if len(line) > MOST_LINE_BYTES or len(records) == MOST_ROUNDS:
            raise RecordError(f"{where}: at most {MOST_LINE_BYTES:,} bytes a line, and {MOST_ROUNDS:,} rounds")
        try:
            record = RECORD.validate_json(line)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] == "json_invalid" and not lines.read().strip():
                return records, True
            raise RecordError(f"{where}: {first_problem(error)}") from None
        records.append(record)
        phases.update(record.seconds)
        if len(phases) > MOST_NAMES:
            raise RecordError(f"{where}: seconds: more than {MOST_NAMES} phases have been named")
    return records, False


def noted_stop(folder: Path, round: int) -> str | None:
    """Why the run in a folder ended early after this round, as its events say; None if they do not."""
    if not is_file(folder / EVENTS):
        return None
    reason = None
    for line in read_file(folder / EVENTS, MOST_OBJECT_BYTES).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and (event.get("event"), event.get("round")) == ("stopped", round):
                reason = cut(str(event.get("reason")))
    return reason


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found, in one line: `cohort.3: Input should be a valid integer`."""
    problem: Any = error.errors(include_url=False)[0]
    place = [".".join(map(str, problem["loc"]))] if problem["loc"] else []
    return cut(": ".join([*place, problem["msg"].removeprefix("Value error, ")]))


def read_file(path: Path, most: int) -> bytes:
    """Return a file that lies in its own folder, and is not a link out of it.

    Raises RecordError if it cannot be read.
    """
    try:
        return read_bounded(path, most, inside=path.parent)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises RecordError if there is none."""
    try:
        value = json.loads(read_file(path, MOST_OBJECT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}: must be an object")
    if problem := problem_with_words(value, any_text=True):
        raise RecordError(f"{path}: {problem}")
    return value
