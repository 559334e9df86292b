"""RunTask: an experiment with its device, client algorithm and attackers, as passed to the processes of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.byzantine import Attackers
from fedsim.clients import ClientAlgorithm
from fedsim.clients.schedule import Numbers, Schedule, Varying
from fedsim.core.learning_task import LearningTask
from fedsim.core.randomness import draw_key, preserve_random_state, seed_everything
from fedsim.core.rows import ColumnSpans
from fedsim.core.training import Objective
from fedsim.data.partitions import Transform
from fedsim.errors import ExperimentError, show, show_bytes
from fedsim.models.trainable import ADAPTERS, add_adapters, load_weights, share_frozen, train_only
from fedsim.processing import UpdateProcessor, initial_states
from fedsim.server import ServerStep
from fedsim.system.devices import to_device
from fedsim.system.files import user_path
from fedsim.system.precision import PRECISIONS, Precision

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

Sync = Literal["parameters", "gradients"]
STORED_BYTES = 2**30  # maximum size of a cohort's updates that are stored although only their sum is needed


class Fragment(NamedTuple):
    """Parameters that workers send in a round: all of them, or one of several fragments (`local.fragments`).

    Attributes:
        columns: positions of the parameters in the flat vector of all parameters.
        shapes: shapes of the parameters, in this order.
        prefix: first part of the names of the states that processors keep for the fragment; "" for a single fragment.
    """

    columns: ColumnSpans = ColumnSpans()
    shapes: tuple[tuple[int, ...], ...] = ()
    prefix: str = ""

    def states_of(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return those `states` of processors that belong to this fragment, by their names without the prefix."""
        return {name.removeprefix(self.prefix): state for name, state in states.items() if name.startswith(self.prefix)}


@dataclass(frozen=True)
class RunTask:
    """Description of a run for every process: experiment, device, client algorithm and attackers.

    Attributes:
        experiment: experiment, without its dataset.
        device: device of the run.
        algorithm: client algorithm, prepared for the model.
        byzantine: Byzantine workers of each round.
        fragments: parameters that workers send: one fragment, or several of which each round has one.
        scratch_folder: folder for temporary files; None for the system's folder.
        class_weights: weight of each class in the training loss; None for equal weights.
        row_bytes: size of an update in memory, in bytes.
        worker_names: names of the workers (None for a worker without a name), followed by the names of the owners who
            have only test samples; empty if the data has no names.
        streams: whether a round trains its cohort in waves, and keeps only sums of updates after each wave. Waves
            change how sums are rounded, so this attribute depends only on the experiment (see `with_streaming`).
    """

    experiment: Experiment
    device: torch.device
    algorithm: ClientAlgorithm
    byzantine: Attackers
    fragments: tuple[Fragment, ...] = (Fragment(),)
    scratch_folder: str | None = None
    class_weights: tuple[float, ...] | None = None
    row_bytes: int = 0
    worker_names: tuple[str | None, ...] = ()
    streams: bool = False

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.experiment.precision]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters, updates and gradients."""
        return self.precision.rows

    @property
    def learning_task(self) -> LearningTask:
        """Learning task, such as classification, which defines the loss and the correct predictions."""
        return self.experiment.task.component

    @cached_property
    def schedule(self) -> Schedule:
        """Number of epochs or steps, and batch size, that each worker trains in a round."""
        local, seed = self.experiment.local, self.experiment.seed
        batch_size, epochs, steps = (local.amount(key, seed) for key in ("batch_size", "epochs", "steps"))
        return Schedule(batch_size, epochs, steps, local.drop_last, local.accumulation_steps)

    def batch_sizes(self, work: Any) -> np.ndarray:
        """Return the batch size of each of the n workers in `work` (`WorkItems`), int64 [n]."""
        return np.broadcast_to(self.schedule.of(work.workers, work.rounds).batch_size, len(work))

    @cached_property
    def varying(self) -> dict[str, Varying]:
        """Settings of a step that differ between workers or rounds, by key: `lr`, `momentum` and `clip_norm`."""
        amounts = {k: self.experiment.local.amount(k, self.experiment.seed) for k in ("lr", "momentum", "clip_norm")}
        return {key: amount for key, amount in amounts.items() if isinstance(amount, Varying)}

    def step_settings(self, worker: Numbers, round: Numbers) -> dict[str, Any]:
        """Return the settings `varying` of a worker in `round`, by key: numbers, or columns [k, 1] for k workers."""
        values = {key: amount.of(worker, round) for key, amount in self.varying.items()}
        if not isinstance(worker, np.ndarray):
            return values
        columns = {key: torch.from_numpy(column).to(self.dtype) for key, column in values.items()}
        return {key: to_device(column.unsqueeze(1), self.device) for key, column in columns.items()}

    @cached_property
    def transforms(self) -> Sequence[Transform | None] | None:
        """For each worker, the transform of its samples; None if there are no transforms."""
        make = getattr(self.experiment.partition.component, "transforms", None)
        return None if make is None else make(self.experiment.workers)

    @property
    def worker_state_memory(self) -> int | None:
        """Maximum memory for worker states, in bytes; None for no limit. If they need more, files store them."""
        return None if self.experiment.mode == "race" else self.experiment.worker_state_memory

    @property
    def keeps_last(self) -> bool:
        """Whether the aggregation rule or the attack uses the previous aggregated update."""
        by_attack = bool(self.byzantine) and "last" in self.experiment.attack.component.accepts
        return self.experiment.rule.accepts("last") or by_attack

    @cached_property
    def top(self) -> RunTask:
        """Task of the server above all groups of a hierarchy, whose workers are the groups."""
        top: Any = self.experiment.top
        drawn = (top.seed, top.workers, top.attack.count(top.workers)) if top.attack.resample else None
        return replace(
            self, experiment=top, byzantine=Attackers(frozenset(top.byzantine), drawn, top.attack.start_round)
        )

    def of_group(self, group: int) -> RunTask:
        """Return the task of a group's server, which has the group's own seed and number of attackers."""
        experiment = self.experiment
        f, seed = experiment.f_of_groups(self.byzantine.fixed)[group], experiment.seed
        own: Any = {"aggregate": experiment.aggregate.model_copy(update={"f": f}), "server": type(experiment.server)()}
        own["seed"] = draw_key(seed, "group", group) if group else seed  # one group draws as no groups do
        return replace(self, experiment=experiment.model_copy(update=own))

    @property
    def attackers_skip_chain(self) -> bool:
        """Whether attackers send updates that no processor, such as compression, has changed."""
        attack = self.experiment.attack
        return bool(self.experiment.chain) and attack.component.alters_rows and not attack.before_processors

    def fragment_sent(self, round: int) -> Fragment:
        """Return the parameters that workers send at the end of `round`."""
        return self.fragments[self.algorithm.fragment_at(round)]

    def unsent_columns(self, round: int, d: int) -> ColumnSpans:
        """Return the columns of rows [..., d] that workers do not send in `round`."""
        return self.fragment_sent(round).columns.others(d)

    def fragment_received(self, round: int) -> Fragment:
        """Return the parameters that have changed since the round before, which workers receive in `round`."""
        return self.fragment_sent(round - 1)

    def chain_states(self, chain: Sequence[UpdateProcessor], row: Tensor) -> dict[str, Tensor]:
        """Return what a sender of vectors like `row` [d] keeps for a chain of processors before its first message."""
        return {
            f"{fragment.prefix}{name}": state
            for fragment in self.fragments
            for name, state in initial_states(chain, fragment.columns.of(row), fragment.shapes).items()
        }

    def sync_in(self, round: int) -> Sync:
        """Return "gradients" if `round` aggregates the gradients of each step, otherwise "parameters"."""
        return self.experiment.sync_in(round)

    @property
    def objective(self) -> Objective:
        """Loss function with the floating-point precision and the class weights of the run, for training."""
        if self.class_weights is None:
            return Objective(self.precision, self.learning_task)
        weights = torch.tensor(self.class_weights, dtype=self.dtype, device=self.device)
        return Objective(self.precision, self.learning_task, weights)

    @property
    def syncs(self) -> tuple[Sync, ...]:
        """What the rounds aggregate: ("gradients",), ("parameters",), or both if later rounds differ from the first."""
        return tuple(dict.fromkeys(map(self.sync_in, (1, self.experiment.rounds))))

    @property
    def has_rows(self) -> bool:
        """Whether any round stores the parameters or gradients of each worker."""
        return self.experiment.gradient_hook is None or "parameters" in self.syncs

    def with_streaming(self, d: int) -> RunTask:
        """Return a copy of this task in which `row_bytes` and `streams` are set for a model with d parameters.

        `streams` is true if the updates of a whole cohort would take more than `STORED_BYTES`, and no setting needs
        them all at the same time.
        """
        row_bytes = d * self.dtype.itemsize
        large = self.experiment.largest_cohort * row_bytes > STORED_BYTES
        return replace(self, row_bytes=row_bytes, streams=large and self.experiment.stores_updates is None)

    @property
    def storage_of_updates(self) -> str | None:
        """Message that says whether updates are added up or stored, and why; None if a cohort's updates are small."""
        nbytes, needed = self.experiment.largest_cohort * self.row_bytes, self.experiment.stores_updates
        if nbytes <= STORED_BYTES:
            return None
        if self.streams or needed is None:
            return f"updates are added up as workers finish, because all of them would take {show_bytes(nbytes)}"
        return f"all updates are stored ({show_bytes(nbytes)}), because of {needed[0]}"

    @property
    def remedy_for_updates(self) -> str:
        """End of an out-of-memory message: which setting to change so that updates need not be stored; "" if none."""
        needed = self.experiment.stores_updates
        if self.storage_of_updates is None or needed is None:
            return ""
        return f", or {needed[1]}, because {needed[0]} needs the updates of all workers at once"

    def clip_norm(self, settings: Mapping[str, Any]) -> Any:
        """Return the maximum gradient norm of workers with `settings` (see `step_settings`); None for no clipping."""
        return settings.get("clip_norm", self.experiment.local.clip_norm)

    def algorithm_at(self, round: int, step: int = 0, *, settings: Mapping[str, Any] | None = None) -> ClientAlgorithm:
        """Return the client algorithm with the learning rate of step `step` (from 0) in `round`.

        `settings` are those of the workers, as returned by `step_settings`.
        """
        values: dict[str, Any] = {key: value for key, value in (settings or {}).items() if key != "clip_norm"}
        lr = self.experiment.local_lr_at(round, step)
        if self.experiment.local_schedule is not None and lr is not None:
            values["lr"] = lr * values.get("lr", 1)
        return self.algorithm.having(**values) if values else self.algorithm

    def server_at(self, round: int) -> ServerStep:
        """Return the server optimizer with the learning rate of `round`."""
        server: Any = self.experiment.server.component
        schedule = self.experiment.server_schedule
        return server if schedule is None else replace(server, lr=schedule.rate(server.lr, round))

    def stepper(self, sync: Sync) -> ClientAlgorithm | ServerStep:
        """Return the object whose method `step` updates the global parameters.

        This is the server optimizer if `sync` is "parameters", and the client algorithm if `sync` is "gradients".
        """
        return self.experiment.server.component if sync == "parameters" else self.algorithm

    def stepper_at(self, moment: tuple[int, ...]) -> ClientAlgorithm | ServerStep:
        """Return the object that updates the global parameters (see `stepper`), with its learning rate at `moment`.

        `moment` is (round,), or (round, step) if every step aggregates gradients.
        """
        return self.server_at(moment[0]) if self.sync_in(moment[0]) == "parameters" else self.algorithm_at(*moment)

    def new_module(self, cluster: int = 0) -> nn.Module:
        """Return a new module with the initial parameters of the global model `cluster`, the same in every process.

        All modules of a process share their frozen parameters. Raises ExperimentError if the model has complex tensors,
        or does not fit the settings `model` and `local.trainable`.
        """
        model, train = self.experiment.model, self.experiment.local.trainable
        with preserve_random_state(torch.device("cpu")):
            seed_everything(torch.device("cpu"), self.experiment.seed, "model", *([cluster] if cluster else []))
            module = model.component()
            if model.lora.rank:
                add_adapters(module, model.lora.rank, model.lora.alpha, model.lora.targets)
        _require_real(module)
        if model.weights is not None:
            place = f"model.weights = {show(model.weights)}"
            load_weights(module, user_path(model.weights), place, ExperimentError, optional=ADAPTERS)
        if train:
            train_only(module, train)
        module = module.to(self.device, self.dtype)
        if train or model.lora.rank:
            share_frozen(module, self._frozen)
        return module

    @cached_property
    def _frozen(self) -> dict[str, nn.Parameter]:
        """Parameters that are not trained, by name, which all modules of this process share."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_frozen"}


def _require_real(module: nn.Module) -> None:
    """Raise ExperimentError if the model has complex tensors."""
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_complex():
                raise ExperimentError(
                    f"model: the {kind} {name} is complex ({tensor.dtype}), but must be real; store its real and "
                    "imaginary parts in one real tensor [..., 2], and use torch.view_as_complex in forward"
                )
