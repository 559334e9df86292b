"""Synchronous SGD by PyTorch's DistributedDataParallel: the mean over ranks, made during the backward pass.

Every worker has a module of its own, with its buffers and whatever else no row holds, but the parameters of a rank's
modules are the very same tensors: views of the global row. So the gradients of the rank's workers add up in one row,
each worker's loss multiplied by its share in the mean. The last worker's backward pass sets off the exchange, bucket by
bucket, while it goes on; a rank of which nobody takes part in a step gives zeros. Nobody has a row of a single worker.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from fedsim.engines.crew import Seat
from fedsim.engines.feed import Feed, Member
from fedsim.engines.hooks import Mean
from fedsim.engines.job import Memory, Task
from fedsim.engines.module import RowModule
from fedsim.engines.ranks import Ranks
from fedsim.engines.trainer import Partaker, RowTrainer
from fedsim.errors import one_line
from fedsim.randomness import draw_key, random_state_kept, seed_everything
from fedsim.system.devices import synchronize
from fedsim.training import Objective

ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to the largest number, by the type of rows


class SharedModel:
    """Modules that have the same trainable parameters, and nothing else in common.

    Args:
        make: gives the module at its start, always the same.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make, self._pattern = make, make()
        self.parameters = [parameter for parameter in self._pattern.parameters() if parameter.requires_grad]

    def new_module(self) -> nn.Module:
        """Another of them, as at the start but for the parameters, which are as they have become."""
        return copy.deepcopy(self._pattern, {id(parameter): parameter for parameter in self.parameters})

    def refusal(self, task: Task, inputs: Tensor, targets: Tensor) -> str | None:
        """Why such modules do not train as those do that have everything of their own; None where they do.

        Found out by a step of each on a few samples.
        """

        def step(module: nn.Module) -> list[Tensor]:
            seed_everything(task.device, task.seed, "forward")
            loss = Objective(task.precision)(module.train(), inputs, targets)
            trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradients, *module.buffers()]

        with random_state_kept(task.device), task.precision.training(task.device):
            try:
                expected = step(self._make())
            except Exception:  # training will come to that, and say which worker's it was
                return None
            try:
                found = step(self.new_module())
            except Exception as error:
                return f"the model's parameters cannot be shared by copies of it: {one_line(error)}"
        if any(not _alike(one, other, task.dtype) for one, other in zip(found, expected, strict=True)):
            return "copies of the model that share its parameters train otherwise"
        return None


class Exchanged(nn.Module):
    """What DistributedDataParallel is told to be the model: the parameters, and a loss that has been computed already.

    One more parameter that is in no loss, or the only one: so there is always one without gradient, without which
    PyTorch warns of looking for such.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.none = nn.Parameter(parameters[0].new_zeros(1))
        self.parameters_of_workers = nn.ParameterList(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class Sending:
    """Begins to send each bucket of gradients, in their order, as soon as it is complete.

    PyTorch keeps it for good, so it knows nothing of whose gradients these are.

    Args:
        send: the hook at work.
        one_by_one: whether a bucket has to wait until the one before has been exchanged.

    Attributes:
        waits: set while there is nothing to do but to wait for the other ranks.
    """

    def __init__(self, send: Callable[[GradBucket], Mean], *, one_by_one: bool) -> None:
        self._send, self._one_by_one = send, one_by_one
        self._before: Mean | None = None
        self.waits = threading.Event()

    def begin(self, bucket: GradBucket) -> Mean:
        last = True  # whatever goes wrong
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
    """Trains rows one after another; where gradients are averaged, all of a rank's together, see `mean_gradient`."""

    def __init__(self, seat: Seat, task: Task, memory: Memory, feed: Feed, *, ranks: Ranks, model: SharedModel) -> None:
        super().__init__(seat, task, memory, feed)
        assert task.hook is not None
        self._ranks, self._model = ranks, model
        self._sharing: list[RowModule] = []  # one for each member
        self._module_of(0).take(memory.global_row, self._gradient, memory.global_buffers)  # the parameters, into place
        self._exchanged = Exchanged(model.parameters)
        self._active: list[Partaker] = []  # in the step in hand
        self.hook = task.hook.start(ranks.group_of_hooks, draw_key(task.seed, "hook") % 2**32)
        self._sending = sending = Sending(self.hook, one_by_one=not (task.hook.at_once or ranks.in_order))
        self._parallel = DistributedDataParallel(
            self._exchanged,
            process_group=ranks.group,
            init_sync=False,  # the ranks have the same global row already, and come here at different times
            find_unused_parameters=True,  # which may be others in every rank and step
        )
        self._parallel.register_comm_hook(None, lambda state, bucket: sending.begin(bucket))

    def meet_at_global_row(self, members: Sequence[Member]) -> None:
        memory = self._memory
        self._feed.announce(members)
        self._partakers = []
        for place, member in enumerate(members):
            module = self._module_of(place)
            module.take(memory.global_row, self._gradient, memory.buffers[member.slot])
            self._partakers.append(self._partaker(member, module))

    def mean_gradient(self, step: int, shares: Mapping[int, float]) -> Tensor:
        """The mean of all ranks' gradients of the next batches [d], the same in all of them, in memory of the next one.

        Args:
            shares: with what share in the mean each member takes part that still has data, by slot.

        Called by all ranks, of which some may have no such member.
        """
        self._gradient.zero_()
        self._active = [partaker for partaker in self._partakers if partaker.member.slot in shares]
        last = max((partaker.member.slot for partaker in self._active if shares[partaker.member.slot]), default=None)
        for partaker in self._active:
            slot = partaker.member.slot
            with self._seat.working_on(partaker.member.worker, partaker.member.round):
                partaker.batch = next(partaker.batches)
                with torch.set_grad_enabled(shares[slot] != 0):  # who counts for nothing has buffers all the same
                    loss = self._loss_of(partaker, step)
                partaker.count(loss.detach())
                if slot == last:
                    self._exchange(loss * (shares[slot] * self._ranks.count))
                elif shares[slot]:
                    with self._parallel.no_sync():
                        (loss * (shares[slot] * self._ranks.count)).backward()
        if last is None:
            self._exchange(self._exchanged.none.sum() * 0)
        return self._gradient

    def buckets(self) -> list[GradBucket]:
        """Buckets of zeros, as many and as large as those in which gradients travel."""
        return self._parallel.reducer._get_zeros_like_grad_buckets()

    def not_finite(self, step: int) -> list[int]:
        """The slots of members whose own gradients, of the batches of this step once more, are not finite."""
        slots = []
        for partaker in self._active:
            self._gradient.zero_()
            with self._parallel.no_sync():
                self._loss_of(partaker, step).backward()
            if not self._gradient.isfinite().all():
                slots.append(partaker.member.slot)
        return slots

    def _module_of(self, place: int) -> RowModule:
        while len(self._sharing) <= place:
            self._sharing.append(RowModule(self._model.new_module))
        return self._sharing[place]

    def _exchange(self, loss: Tensor) -> None:
        """A backward pass, to whose gradients those of the other ranks are added as it goes on."""
        self._sending.waits.clear()

        def backward() -> None:
            self._parallel(loss).backward()
            synchronize(self._task.device)

        self._ranks.supervised(backward, self._sending.waits)


def _alike(one: Tensor, other: Tensor, rows: torch.dtype) -> bool:
    return not one.numel() or bool((one - other).abs().max() <= ALIKE[rows] * max(1.0, float(other.abs().max())))
