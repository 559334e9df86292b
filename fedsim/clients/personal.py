"""SGD with personal parameters, which workers do not send: fedper, fedrep, lg_fedavg, fedbn, local_only.

A worker keeps the columns of its personal parameters between its rounds. At the start of a round they replace these
columns of the global model. At the end of a round the server's values are restored, so that the update is 0 in these
columns. Buffers of layers with personal parameters, such as BatchNorm statistics, are personal too, whatever the
setting `buffers` is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import State
from fedsim.clients.capabilities import PersonalModel, client_algorithm
from fedsim.clients.schedule import Schedule
from fedsim.clients.sgd import LocalSGD
from fedsim.core.name_patterns import matches, matching
from fedsim.core.numbers import Example, PositiveInt
from fedsim.core.rows import ColumnSpans, Layout
from fedsim.errors import ExperimentError, show

NORMALISATION_LAYERS: tuple[Any, ...] = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class PersonalSGD(LocalSGD, PersonalModel):
    """Base class of SGD in which some parameters are personal: each worker keeps its own and does not send them."""

    def personal_names(self, module: nn.Module) -> Collection[str]:
        """Return the names of a model's personal parameters and buffers."""
        raise NotImplementedError(f"{type(self).__name__} must define `personal_names`")

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        names, layout = self.personal_names(module), Layout.of(module)
        parameters = [entry for entry in layout.parameters if entry.name in names]
        layers = {_layer(entry.name) for entry in parameters}
        buffers = [entry for entry in layout.buffers if entry.name in names or _layer(entry.name) in layers]
        if not parameters and not buffers:
            return LocalSGD(self.lr, self.momentum, self.weight_decay, self.nesterov, dampening=self.dampening)
        return self._copy(
            personal_columns=ColumnSpans.of_entries(parameters), personal_buffers=ColumnSpans.of_entries(buffers)
        )

    def worker_state(self, row: Tensor) -> State:
        return {"personal": self.personal_columns.of(row)}

    def server_state(self, row: Tensor) -> State:
        """Return the initial personal parameters. The global model has these values in all rounds."""
        return {"personal": self.personal_columns.of(row)}

    def numbers_sent(self, d: int) -> tuple[int, int]:
        return 0, 0  # the server state is constant, so workers need not receive it

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        self.personal_columns.write(rows, worker.kept["personal"])
        return self.start(rows)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept["personal"] = self.personal_columns.of(rows)
        self.personal_columns.write(rows, worker.received["personal"])
        return {}

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        rows = rows.clone()
        self.personal_columns.write(rows, worker_state["personal"])
        return rows


@client_algorithm("fedper")
@dataclass(frozen=True)
class FedPer(PersonalSGD):
    """FedPer: SGD on all parameters, some of which are personal and stay with the worker (Arivazhagan et al. 2019).

    The server averages only the shared parameters. The global model's personal parameters keep their initial values, so
    the models to test are the workers' personal models. Buffers of layers with personal parameters, such as BatchNorm
    statistics, are personal too.

    Args:
        personal: shell-style patterns for the names of the personal parameters, such as `["fc2.*"]`.
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`. Each worker that has taken part keeps its p personal parameters, [p].

    >>> algorithm = fedsim.clients.FedPer(personal=["fc2.*"]).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns, algorithm.worker_state(torch.zeros(21840))["personal"].shape
    (ColumnSpans(spans=((21330, 21840),)), torch.Size([510]))
    """

    personal: Annotated[list[str], Example(["fc2.*"])] = field(kw_only=True)

    def personal_names(self, module: nn.Module) -> Collection[str]:
        names = [entry.name for entry in Layout.of(module).parameters]
        personal = matching(self.personal, names, "local.personal", "parameter")
        if len(personal) in (0, len(names)):
            all_or_none, instead = ("all", "local_only") if personal else ("none", "sgd")
            place = f"local.personal = {show(self.personal)}"
            raise ExperimentError(
                f"{place}: {all_or_none} of the model's parameters are personal; use local.algorithm={instead}"
            )
        buffers = (entry.name for entry in Layout.of(module).buffers)
        return [*personal, *(name for name in buffers if any(matches(name, pattern) for pattern in self.personal))]


@client_algorithm("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """LG-FedAvg: SGD on all parameters, where the first layers are personal and not sent (Liang et al. 2020).

    The algorithm is that of `fedper`. In `fedper` the last layers are usually personal. Here the first layers, which
    compute the representation, are personal, and the server averages the last layers.

    Args:
        personal: shell-style patterns for the parameter names of the first layers, such as `["conv*"]`.
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`. Each worker that has taken part keeps the p parameters of the first layers, [p].

    >>> algorithm = fedsim.clients.LGFedAvg(personal=["conv*", "fc1.*"]).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns
    ColumnSpans(spans=((0, 21330),))
    """


@client_algorithm("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    """FedRep: SGD that trains first the personal and then the shared parameters in each round (Collins et al. 2021).

    A round begins with `head_epochs` or `head_steps` in which only the personal parameters move. In the rest of
    `local.epochs` or `local.steps`, only the shared parameters move, which the server averages. Parameters that do not
    train in a phase stay constant: momentum and weight decay do not change them either. Fine-tuning before an
    evaluation has the same two phases.

    In the paper the last layer (the head) is personal, and the other layers are trained for one epoch: for example
    `local.epochs = 11` with `head_epochs = 10`.

    Args:
        personal: shell-style patterns for the names of the personal parameters, such as `["fc2.*"]`.
        head_epochs: number of epochs in a round that train the personal parameters, less than `local.epochs`. By
            default, half of the steps of a round (rounded down).
        head_steps: number of steps in a round that train the personal parameters, less than `local.steps`, if
            `local.steps` is set.
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`, a mask [d], and one more pass over the row per step (two with momentum). Each worker that has
    taken part keeps its p personal parameters, [p].

    >>> algorithm = fedsim.clients.FedRep(personal=["fc2.*"], head_steps=2).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns.width
    510
    """

    element_wise: ClassVar[bool] = False

    head_epochs: PositiveInt | None = None
    head_steps: PositiveInt | None = None

    def check_work(self, schedule: Schedule, sizes: Mapping[int, int]) -> None:
        key, unused_key = ("epochs", "head_steps") if schedule.steps is None else ("steps", "head_epochs")
        minimum = min(getattr(schedule.shortest(worker), key) for worker in sizes)
        if getattr(self, unused_key) is not None:
            raise ExperimentError(f"local.{unused_key}: cannot be combined with local.{key}; use local.head_{key}")
        head = getattr(self, f"head_{key}")
        if head is not None and head >= minimum:
            raise ExperimentError(
                f"local.head_{key} = {head}: must be less than local.{key} = {minimum}, so that the shared "
                f"parameters are trained too; use local.{key} = {head + 1} or more"
            )

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        state = super().start_round(rows, worker)
        head_steps = worker.steps // 2 if self.head_steps is None else torch.full_like(worker.steps, self.head_steps)
        if self.head_epochs is not None:
            head_steps = self.head_epochs * worker.steps_per_epoch
        personal = torch.zeros_like(rows, dtype=torch.bool)
        self.personal_columns.write(personal, self.personal_columns.of(~personal))
        return {**state, "personal": personal, "head_steps_left": head_steps.to(rows.dtype)}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        moving = state["personal"] == (state["head_steps_left"] > 0)
        state["head_steps_left"] -= 1
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)
        gradients.mul_(moving)
        if "momentum" in state:
            state["momentum"].mul_(moving)  # so that it is 0 when parameters begin to move
        self._copy(weight_decay=0.0).step(rows, gradients, state)


@client_algorithm("fedbn")
@dataclass(frozen=True)
class FedBN(PersonalSGD):
    """FedBN: SGD on all parameters, where normalisation layers are personal and stay with the worker (Li et al. 2021).

    Normalisation layers are PyTorch's batch, group, layer, instance and RMS normalisation. Their running statistics are
    personal too. In the paper only batch normalisation is personal.

    Args:
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`. Each worker that has taken part keeps the p parameters of the normalisation layers, [p].

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> fedsim.clients.FedBN(lr=0.1).for_model(model).personal_columns
    ColumnSpans(spans=((8, 12),))
    """

    def personal_names(self, module: nn.Module) -> Collection[str]:
        layers = [part for part in module.modules() if isinstance(part, NORMALISATION_LAYERS)]
        if not layers:
            raise ExperimentError(
                'local.algorithm = "fedbn": the model has no normalisation layers; use local.algorithm=sgd'
            )
        of_layers = {id(tensor) for layer in layers for tensor in chain(layer.parameters(), layer.buffers())}
        named = chain(module.named_parameters(), module.named_buffers())
        return {name for name, tensor in named if id(tensor) in of_layers}


@client_algorithm("local_only")
@dataclass(frozen=True)
class LocalOnly(PersonalSGD):
    """SGD of each worker on its own model, without any communication.

    This is the baseline of personalised learning, as in Dinh et al. 2020. The global model keeps its initial
    parameters. Each worker also keeps all buffers of its model, such as BatchNorm statistics.

    Args:
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`. Each worker that has taken part keeps its model, [d].

    >>> fedsim.clients.LocalOnly(lr=0.1).for_model(torch.nn.Linear(3, 2)).personal_columns
    ColumnSpans(spans=((0, 8),))
    """

    def personal_names(self, module: nn.Module) -> Collection[str]:
        layout = Layout.of(module)
        return {entry.name for entry in (*layout.parameters, *layout.buffers)}


def _layer(name: str) -> str:
    """Return the name of the module that contains a parameter or buffer."""
    return name.rpartition(".")[0]
