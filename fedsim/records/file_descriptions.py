"""What each file of a run folder is."""

from __future__ import annotations

from pathlib import Path

from fedsim.errors import RecordError

EXPERIMENT = "experiment.toml"

FILES = {
    EXPERIMENT: "The experiment as it was run, with all its settings. `fedsim run` accepts it again.",
    "environment.json": "Versions, machine, engine and the reason for its choice, numbers of parameters and samples.",
    "metrics.jsonl": "One JSON object for each round; its fields are below.",
    "events.jsonl": "One JSON object for each event: a lost process, an early end, a resumed run.",
    "partition.json": "The number of samples of each class of each worker, and the Byzantine workers.",
    "model.safetensors": "The global model after the last round: its `state_dict`. Unless `records.model = false`.",
    "curve.png": "Accuracy and losses over the rounds. Unless `records.curve = false`; also svg and pdf.",
    "workers.png": "The last test of single workers, with `data.worker_test`; also svg and pdf.",
    "workers-*.csv": "The test of single workers after a round: one row for each worker.",
    "updates-*.safetensors": "The updates of a round of `records.updates`, for `fedsim replay`.",
    "race.csv": "The order of events of a race, for `clock.log`.",
    "checkpoints/round-*.safetensors": "The tensors of a checkpoint, from which `fedsim run --resume` continues.",
    "checkpoints/round-*.json": "The other state of a checkpoint, and checksums.",
    "events.out.tfevents.*": "What TensorBoard shows, with the logger `tensorboard`.",
    "error.txt": "In a comparison: why this run failed.",
    "report.html": "What `fedsim report` writes.",
}


def experiment_of_run(folder: Path) -> Path:
    """The experiment file of a run folder. Raises RecordError if there is none."""
    if not (folder / EXPERIMENT).is_file():
        raise RecordError(
            f"{folder}: is not a run folder (no {EXPERIMENT}); to start a new run there, name an experiment file too"
        )
    return folder / EXPERIMENT


PATTERNS = [name.replace(".png", ".*") for name in FILES]  # of their names; figures are also svg and pdf
