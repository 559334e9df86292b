"""SGD with personal parameters, which stay with the workers: fedper, fedrep, lg_fedavg, fedbn, local_only.

A worker keeps the columns of its personal parameters between its rounds. They replace those of the row that it was
sent, and before the update is computed the values of the server return, so that the update is 0 there. The buffers of
layers with personal parameters, such as BatchNorm statistics, are personal too, for every value of `buffers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import State, client_algorithm
from fedsim.clients.sgd import LocalSGD
from fedsim.core.rows import ColumnSpans, Layout
from fedsim.core.suggestions import closest, nearest
from fedsim.errors import ExperimentError, show

Amount = Annotated[int, Field(gt=0)]

NORMALISATION_LAYERS: tuple[Any, ...] = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class PersonalSGD(LocalSGD):
    """SGD of rows with personal columns, which stay with the worker. Subclasses define `personal_names`."""

    def personal_names(self, module: nn.Module) -> Collection[str]:
        """The names of the personal parameters of a model, and of personal buffers in layers without parameters."""
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

    def with_lr(self, lr: float) -> ClientAlgorithm:
        return self._copy(lr=lr)

    def worker_state(self, row: Tensor) -> State:
        return {"personal": self.personal_columns.of(row)}

    def server_state(self, row: Tensor) -> State:
        """Return the personal columns of the global row, which never move."""
        return {"personal": self.personal_columns.of(row)}

    def numbers_sent(self, d: int) -> tuple[int, int]:
        return 0, 0  # each worker has the server's state from the start

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
    """SGD of all parameters, of which the personal ones stay with the worker. Arivazhagan et al. 2019.

    The server averages the other parameters only. The personal parameters of the global model remain as at the start,
    so `personal_rows` are the models to test. Buffers of layers with personal parameters, such as BatchNorm statistics,
    are personal too.

    Args:
        personal: patterns of parameter names, such as `["fc2.*"]`, as in a shell.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as sgd; each worker that has taken part keeps its p personal parameters, [p].

    >>> algorithm = fedsim.clients.FedPer(personal=["fc2.*"]).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns, algorithm.worker_state(torch.zeros(21840))["personal"].shape
    (ColumnSpans(spans=((21330, 21840),)), torch.Size([510]))
    """

    personal: Annotated[list[str], Field(examples=[["fc2.*"]])] = field(kw_only=True)

    def personal_names(self, module: nn.Module) -> Collection[str]:
        names = [entry.name for entry in Layout.of(module).parameters]
        for pattern in self.personal:
            if not any(fnmatchcase(name, pattern) for name in names):
                place = f"local.personal = {show(self.personal)}"
                raise ExperimentError(f"{place}: no parameter matches {show(pattern)}; {_nearest(pattern, names)}")
        matching = set(self._matching(names))
        if len(matching) in (0, len(names)):
            all_or_none, instead = ("all", "local_only") if matching else ("none", "sgd")
            place = f"local.personal = {show(self.personal)}"
            raise ExperimentError(
                f"{place}: {all_or_none} of the parameters are personal; use local.algorithm={instead}"
            )
        return matching.union(self._matching(entry.name for entry in Layout.of(module).buffers))

    def _matching(self, names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if any(fnmatchcase(name, pattern) for pattern in self.personal))


@client_algorithm("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """SGD of all parameters, of which those of the representation stay with the worker. Liang et al. 2020.

    As `fedper`, but `personal` names the first layers, and the server averages the last ones.

    Args:
        personal: patterns of the names of the representation's parameters, such as `["conv*"]`, as in a shell.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as `fedper`, with p parameters of the representation, [p].

    >>> algorithm = fedsim.clients.LGFedAvg(personal=["conv*", "fc1.*"]).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns
    ColumnSpans(spans=((0, 21330),))
    """


@client_algorithm("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    """SGD of the personal parameters with the others fixed, then of the others with those fixed. Collins et al. 2021.

    A round begins with `head_epochs` or `head_steps` of the personal parameters; the rest of `local.epochs` or
    `local.steps` is for the others, which the server averages. Fine-tuning for an evaluation has the same order. In the
    paper, `personal` names the last layer (the head), and the others are trained for one epoch: `local.epochs = 11`
    with `head_epochs = 10`. Momentum and weight decay do not move fixed parameters.

    Args:
        personal: patterns of parameter names, such as `["fc2.*"]`, as in a shell.
        head_epochs: how many epochs of a round train the personal parameters; fewer than `local.epochs`. By default,
            half of the steps of a round do, rounded down.
        head_steps: how many steps, if a round is given by `local.steps`; fewer than these.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as `fedper`, with a mask [d] and one or two more passes over the row.

    >>> algorithm = fedsim.clients.FedRep(personal=["fc2.*"], head_steps=2).for_model(fedsim.models.Net())
    >>> algorithm.personal_columns.width
    510
    """

    element_wise: ClassVar[bool] = False

    head_epochs: Amount | None = None
    head_steps: Amount | None = None

    def check_work(self, epochs: int | None, steps: int | None) -> None:
        key, least = ("epochs", epochs) if steps is None else ("steps", steps)
        unused_key = "head_steps" if steps is None else "head_epochs"
        if getattr(self, unused_key) is not None:
            raise ExperimentError(f"local.{unused_key}: does not go with local.{key}; use local.head_{key}")
        head = getattr(self, f"head_{key}")
        if head is not None and least is not None and head >= least:
            raise ExperimentError(
                f"local.head_{key} = {head}: leaves nothing of local.{key} = {least} for the other parameters; use "
                f"local.{key} = {head + 1} or more"
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
        if self.momentum:
            state["momentum"].mul_(moving)  # which is 0 where parameters begin to move
        LocalSGD(self.lr, self.momentum, nesterov=self.nesterov, dampening=self.dampening).step(rows, gradients, state)


@client_algorithm("fedbn")
@dataclass(frozen=True)
class FedBN(PersonalSGD):
    """SGD of all parameters, of which those of normalisation layers stay with the worker. Li et al. 2021.

    These are PyTorch's batch, group, layer, instance and RMS normalisation. Their running statistics stay there too.
    The paper keeps batch normalisation only.

    Args:
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as sgd; each worker that has taken part keeps the p parameters of normalisation layers, [p].

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
    """SGD of each worker on its own model. The server averages nothing, and the workers send nothing.

    The baseline of personalised learning, as in Dinh et al. 2020. The parameters of the global model remain as at the
    start. All buffers, such as BatchNorm statistics, are each worker's own.

    Args:
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as sgd; each worker that has taken part keeps its model, [d].

    >>> fedsim.clients.LocalOnly(lr=0.1).for_model(torch.nn.Linear(3, 2)).personal_columns
    ColumnSpans(spans=((0, 8),))
    """

    def personal_names(self, module: nn.Module) -> Collection[str]:
        layout = Layout.of(module)
        return {entry.name for entry in (*layout.parameters, *layout.buffers)}


def _layer(name: str) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def _nearest(pattern: str, names: list[str]) -> str:
    """Return the hint for a pattern that matches no parameter."""
    if closest(pattern, names):
        return nearest(pattern, names)
    modules = dict.fromkeys(f"{_layer(name)}.*" if "." in name else name for name in names)
    return nearest(pattern, modules)
