"""Synchronous SGD by PyTorch's DistributedDataParallel: the mean over ranks, computed during the backward pass.

Every worker has a module of its own, with its buffers and other state, but the parameters of a rank's modules are the
same tensors: views of the global row. So the gradients of the rank's workers add up in one row, each worker's loss
multiplied by its share in the mean. The last worker's backward pass starts the exchange, bucket by bucket; a rank
without a worker in a step sends zeros. There are no rows of single workers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from fedsim.core.randomness import draw_key, preserve_random_state, seed_everything
from fedsim.data import TensorData
from fedsim.engines.distributed.hooks import Mean
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.batches import BatchSource, WorkItem
from fedsim.engines.trainers.row_module import RowModule
from fedsim.engines.trainers.sequential import RowTrainer, SyncParticipant
from fedsim.errors import ExperimentError, one_line, show
from fedsim.system.devices import synchronize

SAMPLES = 8  # of the trial that copies of a model can share its parameters
ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to the largest number, by the type of rows


class SharedModel:
    """Modules that share their trainable parameters, and nothing else.

    Args:
        make: returns the module at its start, always the same.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make, self._pattern = make, make()
        self.parameters = [parameter for parameter in self._pattern.parameters() if parameter.requires_grad]

    def new_module(self) -> nn.Module:
        """Another module: the model at its start, except that it has the current values of the shared parameters."""
        return copy.deepcopy(self._pattern, {id(parameter): parameter for parameter in self.parameters})

    def refusal(self, task: TaskSpec, inputs: Tensor, targets: Tensor) -> str | None:
        """Why a step of such modules on a few samples differs from that of separate ones; None if it does not."""

        def step(module: nn.Module) -> list[Tensor]:
            seed_everything(task.device, task.seed, "forward")
            loss = task.objective(module.train(), inputs, targets)
            trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradients, *module.buffers()]

        with preserve_random_state(task.device), task.precision.training(task.device):
            try:
                expected = step(self._make())
            except Exception:  # training will fail too, and name the worker
                return None
            try:
                found = step(self.new_module())
            except Exception as error:
                return f"the model's parameters cannot be shared by copies of it: {one_line(error)}"
        if any(not _alike(one, other, task.dtype) for one, other in zip(found, expected, strict=True)):
            return "copies of the model that share its parameters train otherwise"
        return None


def model_to_share(task: TaskSpec, train: TensorData, ranks: RankGroup) -> tuple[SharedModel | None, str | None]:
    """The model for DistributedDataParallel and None; or None and the reason to average rows of single workers.

    Raises ExperimentError if rows would not give the numbers of the hook.
    """
    assert task.hook is not None
    model, refusal = None, None
    if not ranks.sums_where_rows_lie:
        refusal = f"{ranks.backend} sums no tensors of {ranks.device.type}"
    else:
        model = SharedModel(task.new_module)
        samples = train.to(task.device, task.dtype).gather(torch.arange(min(SAMPLES, len(train))))
        refusal = model.refusal(task, *samples)
    if refusal and not task.hook.exact:
        raise ExperimentError(f"distributed.hook = {show(task.hook.name)}: {refusal}")
    return (None, refusal) if refusal else (model, None)


class PrecomputedLoss(nn.Module):
    """The module of DistributedDataParallel: the parameters, and a loss that has been computed already.

    PyTorch warns if it looks for parameters without a gradient and finds none, so there is one more, in no loss.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.none = nn.Parameter(parameters[0].new_zeros(1))
        self.parameters_of_workers = nn.ParameterList(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class BucketSender:
    """Begins to send each bucket of gradients, in order, as soon as it is complete.

    PyTorch keeps it until the program ends, so it refers to no tensors of a run.

    Args:
        send: the hook of the run.
        one_by_one: whether a bucket waits for the exchange of the one before.

    Attributes:
        waits: set while this rank only waits for the others.
    """

    def __init__(self, send: Callable[[GradBucket], Mean], *, one_by_one: bool) -> None:
        self._send, self._one_by_one = send, one_by_one
        self._before: Mean | None = None
        self.waits = threading.Event()

    def begin(self, bucket: GradBucket) -> Mean:
        last = True  # also after an error
        try:
            if self._before is not None:
                self.waits.set()
                self._before.wait()
                self.waits.clear()
            mean = self._send(bucket)
            last = bucket.is_last()
            self._before = mean if self._one_by_one and not last else None
            return mean
        finally:
            if last:
                self.waits.set()


class ParallelTrainer(RowTrainer):
    """Trains rows one after another, and averages gradients by `mean_gradient`."""

    def __init__(
        self,
        process: ProcessContext,
        task: TaskSpec,
        shared: SharedState,
        batch_source: BatchSource,
        *,
        ranks: RankGroup,
        model: SharedModel,
    ) -> None:
        super().__init__(process, task, shared, batch_source)
        assert task.hook is not None
        self._ranks, self._model = ranks, model
        self._sharing: list[RowModule] = []  # one for each member
        self._module_of(0).load(shared.global_row, self._gradient, shared.global_buffers)  # binds the parameters
        self._exchanged = PrecomputedLoss(model.parameters)
        self._active: list[SyncParticipant] = []  # in the current step
        self.hook = task.hook.start(ranks.group_of_hooks, draw_key(task.seed, "hook") % 2**32)
        self._sending = sending = BucketSender(self.hook, one_by_one=not (task.hook.at_once or ranks.in_order))
        self._parallel = DistributedDataParallel(
            self._exchanged,
            process_group=ranks.group,
            init_sync=False,  # the ranks have the same global row already, and come here at different times
            find_unused_parameters=True,  # which may be others in every rank and step
        )
        self._parallel.register_comm_hook(None, lambda state, bucket: sending.begin(bucket))

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        shared = self._shared
        self._batch_source.announce(members)
        self._participants = []
        for place, member in enumerate(members):
            module = self._module_of(place)
            module.load(shared.global_row, self._gradient, shared.buffers[member.slot])
            self._participants.append(self._participant(member, module))

    def mean_gradient(self, step: int, shares: Mapping[int, float]) -> Tensor:
        """The mean of all ranks' gradients of the next batches [d], the same in all ranks; the next call overwrites it.

        Args:
            shares: share in the mean of each member of this rank that still has data, by slot; may be empty.
        """
        self._gradient.zero_()
        self._active = [participant for participant in self._participants if participant.member.slot in shares]
        last = max(
            (participant.member.slot for participant in self._active if shares[participant.member.slot]), default=None
        )
        for participant in self._active:
            slot = participant.member.slot
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.batch = next(participant.batches)
                with torch.set_grad_enabled(shares[slot] != 0):  # a share of 0 still updates the buffers
                    loss = self._loss_of(participant, step)
                participant.count(loss.detach())
                if slot == last:
                    self._exchange(loss * (shares[slot] * self._ranks.count))
                elif shares[slot]:
                    with self._parallel.no_sync():
                        (loss * (shares[slot] * self._ranks.count)).backward()
        if last is None:
            self._exchange(self._exchanged.none.sum() * 0)
        return self._gradient

    def not_finite(self, step: int) -> list[int]:
        """The slots of members whose gradients of this step, computed again, are not finite."""
        slots = []
        for participant in self._active:
            self._gradient.zero_()
            with self._parallel.no_sync():
                self._loss_of(participant, step).backward()
            if not self._gradient.isfinite().all():
                slots.append(participant.member.slot)
        return slots

    def _module_of(self, place: int) -> RowModule:
        while len(self._sharing) <= place:
            self._sharing.append(RowModule(partial(self._dropout.new_module, self._model.new_module)))
        return self._sharing[place]

    def _exchange(self, loss: Tensor) -> None:
        """A backward pass that adds the gradients of the other ranks."""
        self._sending.waits.clear()

        def backward() -> None:
            self._parallel(loss).backward()
            synchronize(self._task.device)

        self._ranks.supervised(backward, self._sending.waits)


def _alike(one: Tensor, other: Tensor, rows: torch.dtype) -> bool:
    return not one.numel() or bool((one - other).abs().max() <= ALIKE[rows] * max(1.0, float(other.abs().max())))
