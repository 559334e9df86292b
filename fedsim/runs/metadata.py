"""Metadata of a run: what is known about it before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.config.experiment import Experiment
from fedsim.data import label_counts
from fedsim.engines import Engine, RunTask
from fedsim.rounds.participants import workers_to_describe
from fedsim.runs.memory import RunBytes
from fedsim.runs.setup import engine_of
from fedsim.system.devices import describe_device
from fedsim.training.shared_state import SharedState


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run: what is known about it before its first round.

    Attributes:
        device: description of the device.
        how: how the run is computed, such as the number of processes.
        arithmetic: floating-point precision settings of the device.
        parameters: number of parameters of the model.
        train_samples, test_samples: number of training and test samples.
        validation_samples: number of training samples that are held out for validation.
        sampled_workers: IDs of the workers in `label_counts`; None if it contains all workers.
        label_counts: number of samples per worker and class, int [workers, classes], or [workers, 1] if the targets are
            not class labels.
        byzantine: IDs of the Byzantine workers; empty if they are drawn in each round.
        record_bytes: approximate size in bytes of the large files that the run writes.
        worker_names: name of each worker, followed by the names of owners who have only test samples. Empty if the data
            has no names.
        topology: metadata of the graph of workers, such as its spectral gap; empty without a graph.
        assumed: what was assumed when the data was read, such as how test samples were drawn.
        noise: noise multiplier for `privacy.target_epsilon`, by its key; empty without a target.
        done: number of rounds that were finished before the run was resumed, otherwise 0.
    """

    device: str
    how: dict[str, Any]
    arithmetic: dict[str, Any]
    parameters: int
    train_samples: int
    test_samples: int
    validation_samples: int
    sampled_workers: list[int] | None
    label_counts: np.ndarray
    byzantine: list[int]
    record_bytes: int
    worker_names: tuple[str | None, ...] = ()
    topology: dict[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    noise: Mapping[str, float] = field(default_factory=dict)
    done: int = 0

    @classmethod
    def of(cls, experiment: Experiment, task: RunTask, engine: Engine) -> RunMetadata:
        """Collect the metadata of the run of an experiment whose engine is ready for the first round."""
        shared = engine.shared
        sampled = workers_to_describe(shared.data.shards, experiment.seed)
        workers = range(len(shared.data.shards)) if sampled is None else sampled
        shards = [shared.data.shards.of(worker).numpy() for worker in workers]
        counts = np.array([[len(shard)] for shard in shards])
        if shared.data.train.has_labels:
            counts = label_counts(shared.data.train.sample_targets.cpu().numpy(), shards, shared.data.classes)
        how = _how_it_runs(task, engine)
        return cls(
            device=describe_device(task.device),
            how=how,
            arithmetic=task.precision.metadata(),
            parameters=len(shared.server.row),
            train_samples=len(shared.data.train),
            test_samples=len(shared.data.test),
            validation_samples=len(shared.data.validation),
            sampled_workers=sampled,
            label_counts=counts,
            byzantine=sorted(task.byzantine.fixed),
            worker_names=task.worker_names,
            topology=experiment.topology_metadata,
            assumed=shared.data.train.assumed,
            noise=experiment.noise_found(task.experiment),
            record_bytes=_record_bytes(task, shared, how),
        )

    @property
    def shard_sizes(self) -> list[int]:
        """Number of samples of each worker in `label_counts`."""
        return self.label_counts.sum(1).tolist()

    def for_record(self) -> dict[str, Any]:
        """Return the metadata as a JSON-serializable dict."""
        return {
            "device": self.device,
            "arithmetic": self.arithmetic,
            **self.how,
            **self.noise,
            "parameters": self.parameters,
            "train_samples": self.train_samples,
            "test_samples": self.test_samples,
            **({"validation_samples": self.validation_samples} if self.validation_samples else {}),
            "smallest_shard": min(self.shard_sizes),
            "largest_shard": max(self.shard_sizes),
            **({"topology": self.topology} if self.topology else {}),
            **({"assumed": list(self.assumed)} if self.assumed else {}),
            **({} if self.sampled_workers is None else {"workers_looked_at": len(self.sampled_workers)}),
        }


def _how_it_runs(task: RunTask, engine: Engine) -> dict[str, Any]:
    """Describe how the run is computed, such as the number of processes, as a dict."""
    experiment = task.experiment
    race = {"repeatable": False, "runs": experiment.race.runs} if experiment.mode == "race" else {}
    how = {"engine": engine_of(experiment)} | race | engine.metadata()
    if task.storage_of_updates is not None:
        how["updates"] = task.storage_of_updates
    if engine.shared.server.row.device.type == "cuda":
        how["cuda_graphs"] = engine.replayed()
    return how


def _record_bytes(task: RunTask, shared: SharedState, how: dict[str, Any]) -> int:
    """Return the approximate size of the run's large files in bytes. `how` is the result of `_how_it_runs`."""
    experiment, row = task.experiment, shared.server.row
    nbytes = (experiment.records.model + len(experiment.records.updates) * experiment.largest_cohort) * row.nbytes
    if experiment.checkpoint.every != 0:
        of_run = RunBytes.of(task, len(row), len(shared.server.buffers), experiment.largest_cohort)
        checkpoint = experiment.repetitions * of_run.saved
        if experiment.gradient_hook is not None and experiment.gradient_hook.keeps:
            checkpoint += how["ranks"] * row.nbytes
        nbytes += (experiment.checkpoint.keep + 1) * checkpoint  # the oldest is removed after the newest is written
    return nbytes
