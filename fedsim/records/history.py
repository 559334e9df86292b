"""List the files of a run folder, and read its `metrics.jsonl`, which may be damaged, unfinished or untrusted."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim.config.files import EXPERIMENT
from fedsim.core.input_limits import problem_with_words
from fedsim.errors import RecordError, cut
from fedsim.records.record import MOST_NAMES, RECORD, RoundRecord
from fedsim.system.files import is_file, read_bounded, to_json

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
RACE_LOG = "race.csv"
MOST_METRICS_BYTES, MOST_LINE_BYTES, MOST_ROUNDS = 2**29, 2**26, 500_000  # much more than any run writes
MOST_OBJECT_BYTES = 2**24

FILES = {
    EXPERIMENT: "The experiment as it was run, with all its settings. `fedsim run` accepts it again.",
    "environment.json": "Software versions, machine, engine and why it was chosen, parameter and sample counts.",
    "metrics.jsonl": "One JSON object for each round. Its fields are described below.",
    "events.jsonl": "One JSON object for each event: a lost process, an early stop, settings changed when resuming.",
    "partition.json": "The number of samples per worker and class, the Byzantine workers, and the names of workers.",
    "model.safetensors": "The final `state_dict` of the global model. Omitted if `records.model = false`.",
    "curve.png": "Figure of accuracy and losses over the rounds (PNG, SVG or PDF). Omitted if `records.curve = false`.",
    "workers.png": "Figure of the last test of single workers (PNG, SVG or PDF). Needs `data.local_test_fraction`.",
    "workers-*.csv": "The test results of single workers after a round, one row for each worker.",
    "unseen-*.csv": "The test results of clients who have only test samples, if the data has such clients.",
    "updates-*.safetensors": "The updates in a round that `records.updates` lists, for `fedsim replay`.",
    RACE_LOG: "The order of events in a race, for `clock.replay_log`.",
    "checkpoints/round-*.safetensors": "The tensors of a checkpoint, from which `fedsim run --resume` continues.",
    "checkpoints/round-*.json": "The remaining state of a checkpoint, with checksums.",
    "events.out.tfevents.*": "The log for TensorBoard. Needs the logger `tensorboard`.",
    "error.txt": "The reason why the run failed.",
    "report.html": "The report that `fedsim report` writes.",
}
PATTERNS = [name.replace(".png", ".*") for name in FILES]  # figures may also be svg and pdf files


def not_a_run(folder: Path, otherwise: str = "") -> str:
    """Return the error for a path that is not the folder of a run, with the path that was probably meant.

    If no such path is known, the error ends with `otherwise`.
    """
    if is_file(folder / "comparison.json"):
        return f"{folder}: is a comparison (see fedsim.load_comparison); its runs are in {folder / 'runs'}"
    inside = f"; name the folder, {folder.parent}" if is_file(folder.parent / EXPERIMENT) else otherwise
    return f"{folder}: is not a run folder (no {EXPERIMENT}){inside}"


def experiment_of_run(folder: Path) -> Path:
    """Return the path of the experiment file in the folder of a run. Raises RecordError if there is none."""
    if not (folder / EXPERIMENT).is_file():
        raise RecordError(not_a_run(folder, "; to start a new run there, name an experiment file too"))
    return folder / EXPERIMENT


def to_line(record: RoundRecord) -> str:
    """Return a record as a line of JSON for `metrics.jsonl`. NaN and infinity become null."""
    return to_json(record) + "\n"


def read_history(folder: Path) -> list[RoundRecord]:
    """Return the records of the finished rounds in the folder of a run, so that the run can be continued.

    Everything after the first invalid line is ignored.
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


def records_digest(folder: Path, rounds: int) -> str:
    """Return the SHA-256 of the records of the first `rounds` rounds, as they are stored in the folder of a run."""
    lines = read_bounded(folder / METRICS, MOST_METRICS_BYTES, folder).split(b"\n")[:rounds] if rounds else []
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def with_nan_losses(record: RoundRecord) -> RoundRecord:
    """Replace missing losses in a record by NaN, which JSON files store as null."""
    losses = {key: math.nan for key in ("test_loss", "train_loss") if record[key] is None}
    return replace(record, **losses) if losses else record


def read_metrics(path: Path) -> tuple[list[RoundRecord], bool]:
    """Return the records in a file, and whether its last line is incomplete.

    Raises RecordError if any other line is invalid.
    """
    lines = io.BytesIO(read_file(path, MOST_METRICS_BYTES))
    records: list[RoundRecord] = []
    phases: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        if len(line) > MOST_LINE_BYTES or len(records) == MOST_ROUNDS:
            limit = f"{MOST_LINE_BYTES:,} bytes per line" if len(line) > MOST_LINE_BYTES else f"{MOST_ROUNDS:,} rounds"
            raise RecordError(f"{where}: exceeds the limit of {limit}")
        try:
            record = RECORD.validate_json(line)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] == "json_invalid" and not lines.read().strip():
                return records, True
            raise RecordError(f"{where}: is damaged: {first_problem(error)}") from None
        records.append(record)
        phases.update(record.seconds)
        if len(phases) > MOST_NAMES:
            raise RecordError(f"{where}: seconds: the file contains the names of more than {MOST_NAMES} phases")
    return records, False


def noted_stop(folder: Path, round: int) -> str | None:
    """Return why the run in `folder` ended early after `round`, as noted in `events.jsonl`, or None if it did not."""
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
    """Return the first problem of a pydantic error as one line, such as "cohort.3: Input should be a valid integer"."""
    problem: Any = error.errors(include_url=False)[0]
    place = [".".join(map(str, problem["loc"]))] if problem["loc"] else []
    return cut(": ".join([*place, problem["msg"].removeprefix("Value error, ")]))


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a file.

    Raises RecordError if the file cannot be read, has more than `most` bytes, or links to a file outside its folder.
    """
    try:
        return read_bounded(path, most, inside=path.parent)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises RecordError if the file does not contain a JSON object."""
    try:
        value = json.loads(read_file(path, MOST_OBJECT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: is damaged: it is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}: is damaged: it does not contain a JSON object")
    if problem := problem_with_words(value, any_text=True):
        raise RecordError(f"{path}: is damaged: {problem}")
    return value
