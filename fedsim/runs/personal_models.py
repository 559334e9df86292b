"""Personal models of the workers after a run, from a checkpoint in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.clients.algorithm import state_at_first
from fedsim.clients.capabilities import personal_model
from fedsim.config.experiment import Experiment
from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError, RecordError, show
from fedsim.records.checkpoints import CheckpointFolder
from fedsim.runs.setup import task_of
from fedsim.training.shared_state import CLUSTERS
from fedsim.training.task import RunTask

CPU = torch.device("cpu")


def module_of(task: RunTask, row: Tensor, buffers: Tensor) -> nn.Module:
    """Return a model with the parameters `row` [d] and the buffers [b], on the CPU and in evaluation mode."""
    module = task.new_module()
    layout = Layout.of(module)
    layout.write(row, module)
    layout.write_buffers(buffers, module)
    return module.cpu().eval()


@dataclass(frozen=True)
class PersonalModels:
    """Personal models of the workers after a run.

    Attributes:
        task: description of the run, on the CPU.
        models: parameters [d] and buffers [b] of each global model.
        clusters: with several global models, the index of the model that each worker selected last, by worker ID.
        positions: for each worker that has taken part, the index of its state in `rows`.
        rows: states that these workers keep between rounds, as tensors by name.
    """

    task: RunTask
    models: list[tuple[Tensor, Tensor]]
    clusters: Mapping[int, int]
    positions: Mapping[int, int]
    rows: State

    @classmethod
    def in_folder(cls, experiment: Experiment, folder: Path, round: int, clusters: Mapping[int, int]) -> PersonalModels:
        """Return the personal models after the last round of a run, from the checkpoint of this round in its folder.

        `clusters`: the attribute with this name. Raises RecordError if there is no such checkpoint, or if it is
        damaged.
        """
        checkpoints = CheckpointFolder(folder, None, 0)
        if round not in checkpoints.rounds():
            raise RecordError(
                f"{folder}: contains no personal models, because there is no checkpoint of round {round}; run the "
                f"experiment with checkpoint.every={round}"
            )
        snapshot = checkpoints.read(round)
        rows = {name.removeprefix("rows."): rows for name, rows in snapshot.under("worker_state.").items()}
        try:
            positions = {
                worker: position for position, worker in enumerate(rows.pop("workers").tolist() if rows else ())
            }
            models = [(snapshot.tensors["global_row"], snapshot.tensors["global_buffers"])]
            if clusters:
                models += zip(*(snapshot.tensors[f"algorithm.{name}"] for name in CLUSTERS), strict=True)
        except KeyError as error:
            raise RecordError(
                f"{folder}: the checkpoint of round {round} is damaged: it has no tensor {error}"
            ) from None
        return cls(task_of(experiment, CPU, weights=False), models, clusters, positions, rows)

    def of(self, worker: int | str) -> nn.Module:
        """Return the personal model of a worker, or the initial model if the worker has not taken part."""
        task, workers = self.task, self.task.experiment.workers
        if not isinstance(worker, Integral) or isinstance(worker, bool) or not 0 <= worker < workers:
            raise ExperimentError(
                f"worker = {show(worker)}: must be an ID from 0 to {workers - 1}, or a name in worker_names"
            )
        if self.task.algorithm.clusters > 1 and worker not in self.clusters:
            raise ExperimentError(
                f"worker = {worker}: has selected no global model, because it has not taken part; choose another worker"
            )
        row, buffers = self.models[self.clusters.get(worker, 0)]
        if worker in self.positions:
            state = {name: rows[self.positions[worker]] for name, rows in self.rows.items()}
        elif task.algorithm.starts_from_current:
            state = state_at_first(task.algorithm, row, buffers)
        else:
            state = self._initial()
        return module_of(task, *personal_model(task.algorithm, row, state.get("buffers", buffers), state))

    def _initial(self) -> State:
        """Return the state of a worker before its first round."""
        module = task_of(self.task.experiment, CPU).new_module()
        layout = Layout.of(module)
        buffers = layout.read_buffers(module, out=torch.empty_like(self.models[0][1]))
        local = {"buffers": buffers} if self.task.experiment.buffers == "local" else {}
        return local | state_at_first(self.task.algorithm, layout.read(module), buffers)
