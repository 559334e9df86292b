"""Trial run of a model on a few samples, which decides whether and how the model is trained in stacks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from dataclasses import dataclass, replace
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsim.clients import OuterProductGrad
from fedsim.clients.adapters import TrainFunction
from fedsim.core.learning_task import joint_of
from fedsim.core.model_inputs import Inputs, leaves, on_each, outputs_of
from fedsim.core.randomness import global_states, preserve_random_state
from fedsim.core.rows import Layout, new_rows
from fedsim.core.training import Objective
from fedsim.data import TensorData
from fedsim.errors import ExperimentError, FedsimWarning, one_line, show
from fedsim.system.precision import FULL, Precision, full_precision
from fedsim.training.forward_functions import Dropout, Recording
from fedsim.training.operations import DROPOUT_CALLS_VARY, DataDependenceCheck, not_stackable, reason_of
from fedsim.training.row_module import differ
from fedsim.training.shared_state import SharedState
from fedsim.training.stack_step import StackState, move
from fedsim.training.stacked_module import StackedModule
from fedsim.training.task import RunTask

SAMPLES = 4  # number of training samples on which the model is tried
MAX_COMPARED_BATCH = 64  # maximum size of the large batch that is compared with a small one
DIFFERS = "differs from that of a single model if several models are computed together"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to the largest absolute value


@dataclass(frozen=True)
class StackingProbe:
    """Result of a model's trial run, which decides how several such models are computed together.

    Attributes:
        dropouts: dropout calls of a forward pass, in call order.
        coupled: whether a sample's output or loss depends on the other samples of the batch, as with BatchNorm or with
            a joint loss. Batches are then not padded.
        merged: whether the batches of k workers can be merged into one batch [k * batch, ...]; otherwise
            `torch.func.vmap` is used.
        sample_bytes: bytes per sample of the activations that are saved for the backward pass.
        matrix_bytes: bytes of the weights of linear layers that are called once in a forward pass. A stack stores the
            gradients of these weights as an OuterProductGrad.
        turns: whether, on this GPU, convolutions with flipped kernels give the same gradients as ordinary ones; see
            `way_for`.
    """

    dropouts: tuple[Dropout, ...]
    coupled: bool
    merged: bool
    sample_bytes: int
    matrix_bytes: int = 0
    turns: bool = False

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> StackingProbe:
        """Run the model of a task on a few samples, and return its properties.

        Raises ExperimentError, with the reason, if several such models cannot be computed together.
        """
        if isinstance(task.algorithm, TrainFunction):
            name = show(task.algorithm.name)
            raise ExperimentError(
                f'engine = "batched": the function {name} trains one worker at a time; use engine=processes'
            )
        _require_finite(shared)
        trials = Trials(task, shared.data.train)
        with preserve_random_state(task.device), full_precision(task.device):
            together = trials.run(trials.samples(trials.count))
            coupled = trials.is_coupled(together)
            joint = trials.has_joint_loss(together)
            merged = not coupled and not trials.depends_on_position(together)
            reason = trials.reason_against_merging(together.dropouts) if merged else None
            merged = merged and reason is None
            if not merged:
                try:
                    trials.compare_gradients(together.dropouts, merged=False)
                except ExperimentError as error:
                    if reason in (None, reason_of(error)):
                        raise
                    raise not_stackable(f"{reason_of(error)} (in one batch of several workers: {reason})") from error
            if "parameters" in task.syncs:
                trials.compare_steps()
            if task.precision.autocast is not None:
                together = trials.run(trials.samples(trials.count), task.precision)
                trials.compare_gradients(together.dropouts, task.precision, merged=merged)
            turns = merged and trials.can_turn(together.dropouts)
        return cls(together.dropouts, coupled or joint, merged, together.sample_bytes, trials.matrix_bytes, turns)


def _require_finite(shared: SharedState) -> None:
    """Raise ExperimentError if the samples on which the model is tried contain NaN or infinity."""
    inputs, _ = shared.data.train.gather(torch.arange(min(MAX_COMPARED_BATCH, len(shared.data.train))))
    finite = torch.stack([tensor.reshape(len(tensor), -1).isfinite().all(1) for tensor in leaves(inputs)]).all(0)
    bad = int((~finite).sum())
    if bad:
        raise ExperimentError(
            f'engine = "batched": cannot test the model, because {bad} of the first {len(finite)} training samples '
            "contain NaN or infinity; remove them, or use engine=processes"
        )


class ProbeResult(NamedTuple):
    """Result of a trial forward pass without dropout.

    Attributes:
        outputs: outputs of the model.
        buffers: buffers of the model after the forward pass, as a flat vector.
        dropouts: dropout calls of the forward pass, in call order.
        sample_bytes: bytes per sample of the activations that are saved for the backward pass.
    """

    outputs: Tensor
    buffers: Tensor
    dropouts: tuple[Dropout, ...]
    sample_bytes: int


class TwoModels(NamedTuple):
    """Two models of one architecture with different parameters, and one batch for each model.

    Attributes:
        module: module of this architecture.
        layout: positions of the module's parameters in the flat vector of all parameters.
        rows, buffers: parameters and buffers of both models.
        inputs, targets: batches of both models, [2, batch, ...].
    """

    module: nn.Module
    layout: Layout
    rows: Tensor
    buffers: Tensor
    inputs: Inputs
    targets: Tensor


class Trials:
    """Trial runs of a task's model, which find out whether several such models can be computed together.

    Attributes:
        count: number of training samples in most trial runs.
        matrix_bytes: value of `StackingProbe.matrix_bytes` for the models that were last computed together.
    """

    def __init__(self, task: RunTask, train: TensorData) -> None:
        self._task, self._train, self.count, self.matrix_bytes = task, train, min(SAMPLES, len(train)), 0

    def samples(self, count: int) -> tuple[Inputs, Tensor]:
        """Return a batch of the first `count` training samples, repeated if the data set is smaller."""
        return self._train.gather(torch.arange(count) % len(self._train))

    def run(self, batch: tuple[Inputs, Tensor], precision: Precision = FULL) -> ProbeResult:
        """Run the model on a batch in training mode without dropout, and return the result.

        Raises ExperimentError if several such models cannot be computed together.
        """
        task, (inputs, targets) = self._task, batch
        module = task.new_module().train()
        try:
            start = copy.deepcopy(module)
        except Exception as error:
            raise not_stackable(f"one of the model's modules cannot be copied: {one_line(error)}") from error
        generators = global_states(task.device)
        saved: dict[int, int] = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

        def weigh(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                saved[tensor.data_ptr()] = tensor.nbytes
            return tensor.detach()  # an output that its own node saves would otherwise keep itself alive

        with Recording() as recording, torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
            with precision.forward(task.device):
                outputs = outputs_of(module, on_each(Tensor.clone, inputs))  # the model may change its inputs
            replace(task.objective, precision=precision).loss(outputs, targets)
        if differ(start, module):
            raise not_stackable(
                "a forward pass changes attributes or non-persistent buffers, which are not stored for each worker"
            )
        if global_states(task.device) != generators:
            raise not_stackable("the model draws random numbers outside of torch.nn.functional.dropout")
        if any(samples != len(targets) for samples in recording.samples):
            raise not_stackable("the model applies dropout to a tensor whose first dimension is not the batch")
        buffers = Layout.of(module).read_buffers(module)
        return ProbeResult(outputs.detach(), buffers, tuple(recording.dropouts), sum(saved.values()) // len(targets))

    def is_coupled(self, together: ProbeResult) -> bool:
        """Whether a sample's output changes with the other samples of its batch, as with BatchNorm.

        Args:
            together: result of `run` on a batch of the first `self.count` training samples. It is compared with
                the results of further runs, in which a sample has other samples beside it.
        """
        inputs, targets = self.samples(self.count)

        def first(count: int) -> tuple[Inputs, Tensor]:
            return on_each(getitem, inputs, slice(count)), targets[:count]

        try:
            alone = self.run(first(1))
        except ExperimentError:
            raise
        except Exception:  # BatchNorm needs at least two samples
            return True
        if alone.dropouts != together.dropouts:
            raise not_stackable(DROPOUT_CALLS_VARY)
        others = on_each(_with_others, inputs)
        trials = [(1, alone), (1, self.run((others, targets)))]  # with the number of samples shared with `together`
        if self.count > 2:
            trials.append((self.count - 1, self.run(first(self.count - 1))))
        whole = min(self._task.schedule.largest_batch, MAX_COMPARED_BATCH, len(self._train))
        if whole > self.count:  # a model may handle a large batch differently
            trials.append((self.count, self.run(self.samples(whole))))
        return not all(
            self.agree(trial.outputs[:n_shared], together.outputs[:n_shared])
            and self.agree(trial.buffers, together.buffers)
            for n_shared, trial in trials
        )

    def has_joint_loss(self, together: ProbeResult) -> bool:
        """Whether the loss of a batch is not the mean of the losses of its samples, as with a contrastive loss.

        `together` is the result of `run` on the first `self.count` training samples.
        """
        is_joint = joint_of(self._task.learning_task)
        return is_joint is not None and is_joint(together.outputs, self.samples(self.count)[1])

    def depends_on_position(self, together: ProbeResult) -> bool:
        """Whether a sample's output depends on its position in the batch, so that batches cannot be merged.

        `together` is the result of `run` on the first `self.count` training samples.
        """
        inputs, targets = self.samples(self.count)
        rolled = self.run((on_each(Tensor.roll, inputs, 1, 0), targets.roll(1, 0)))
        return not self.agree(rolled.outputs, together.outputs.roll(1, 0))

    def reason_against_merging(self, dropouts: tuple[Dropout, ...]) -> str | None:
        """Return why the batches of several models cannot be merged into one batch; None if they can."""
        try:
            self.compare_gradients(dropouts, merged=True)
        except Exception as error:  # the model may fail in any way on a merged batch
            return reason_of(error)
        return None

    def compare_gradients(self, dropouts: tuple[Dropout, ...], precision: Precision = FULL, *, merged: bool) -> None:
        """Raise ExperimentError if computing two models together changes their gradients or buffers.

        A difference in float32 is confirmed in float64, because rounding can change the sign of an input of ReLU, and
        thereby the gradient.

        Args:
            dropouts: dropout calls of a forward pass, in call order.
            precision: precision of the forward pass. In reduced precision, the models run, but are not compared.
            merged: whether to merge the batches of the two models instead of using `torch.func.vmap`.
        """
        try:
            self._compare_gradients(dropouts, precision, merged, self._task.dtype)
        except ExperimentError as error:
            try:
                self._compare_gradients(dropouts, precision, merged, torch.float64)
            except Exception:  # the model may not work in float64
                raise error from None

    def can_turn(self, dropouts: tuple[Dropout, ...]) -> bool:
        """Whether convolutions of the model can use flipped kernels on this GPU without changing gradients.

        See `way_for`. If the gradients differ, this function warns. The forward pass is the same with and
        without turned kernels, so rounding cannot change the sign of an input of ReLU.
        """
        task, dtype = self._task, self._task.dtype
        if task.device.type == "cpu" or all(p.ndim <= 2 for p in task.new_module().parameters()):
            return False
        trials = copy.copy(self)
        trials.count = min(task.schedule.largest_batch, MAX_COMPARED_BATCH)  # cuDNN chooses kernels by batch size
        try:
            two = trials.two_models(dtype)
            if task.precision.autocast is not None:
                trials._gradients_of(two, dropouts, task.precision, merged=True, turns=True)
            turned, ordinary = (
                trials._gradients_of(two, dropouts, FULL, merged=True, turns=turns)[0] for turns in (True, False)
            )
            pairs = [pair for pair in zip(turned, ordinary, strict=True) if pair[0].numel()]
            errors = [
                float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)) for ours, theirs in pairs
            ]
            large = [error for error in errors if not error <= TOLERANCE[dtype]]  # also NaN
            reason = f"a gradient has the relative error {large[0]:.1e}" if large else None
        except Exception as error:  # the GPU's libraries may fail in any way
            reason = reason_of(error)
        if reason is not None:
            line = f"the faster gradient of convolutions failed a check on {task.device}, and is not used: {reason}"
            warnings.warn(line, FedsimWarning, stacklevel=2)
        return reason is None

    def two_models(self, dtype: torch.dtype) -> TwoModels:
        """Return two models with different parameters and buffers, and `self.count` training samples for each."""
        task = self._task
        module = task.new_module().to(dtype)
        layout = Layout.of(module)
        rows = new_rows(2, layout.d, dtype, task.device)
        rows.copy_(layout.read(module))
        rows[1].mul_(1.125).add_(0.01)
        buffers = torch.zeros(2, layout.n_buffer_values, dtype=torch.double, device=task.device)
        buffers.copy_(layout.read_buffers(module))
        of_module = dict(module.named_buffers())
        for entry in layout.buffers:
            if of_module[entry.name].is_floating_point():
                buffers[1, entry.span].mul_(1.125).add_(0.01)

        def of_two(tensor: Tensor) -> Tensor:
            return (tensor.to(dtype) if tensor.is_floating_point() else tensor).unflatten(0, (2, self.count))

        inputs, targets = (on_each(of_two, part) for part in self.samples(2 * self.count))
        return TwoModels(module, layout, rows, buffers, inputs, targets)

    def _gradients_of(
        self, two: TwoModels, dropouts: tuple[Dropout, ...], precision: Precision, *, merged: bool, turns: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Compute two models at once. Return the gradients of each parameter, [2, ...], and the new buffers.

        See `compare_gradients` for the arguments, and `way_for` for `turns`.
        """
        task, count, dtype = self._task, self.count, two.rows.dtype
        weights = torch.full((2, count), 1 / count, dtype=dtype, device=task.device)
        objective = replace(task.objective, precision=precision)
        stacked = StackedModule(lambda: task.new_module().to(dtype), objective, merged=merged, turns=turns)
        buffers = two.buffers.clone()
        try:
            factors = [weights.new_ones(2, count, *dropout.shape) for dropout in dropouts]
            unpacked = stacked.unpack_buffers(buffers)
            arguments = (
                stacked.views(two.rows),
                unpacked,
                on_each(Tensor.clone, two.inputs),
                two.targets,
                weights,
                factors,
            )
            with DataDependenceCheck() if merged else contextlib.nullcontext():
                _, left = stacked.gradients(*arguments, leave_products=0)  # as in training
            gradients = [part.computed() if isinstance(part, OuterProductGrad) else part for part in left]
            values = [g[0].numel() for g, part in zip(gradients, left, strict=True) if part is not g]
            self.matrix_bytes = sum(values) * task.dtype.itemsize
            stacked.pack_buffers(unpacked, buffers)
        except (ExperimentError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = "the model fails on a batch of several workers" if merged else "torch.func.vmap cannot run the model"
            raise not_stackable(f"{what}: {one_line(error).split('. ')[0]}") from error
        return gradients, buffers

    def _compare_gradients(
        self, dropouts: tuple[Dropout, ...], precision: Precision, merged: bool, dtype: torch.dtype
    ) -> None:
        two = self.two_models(dtype)
        gradients, buffers_after = self._gradients_of(two, dropouts, precision, merged=merged)
        module, layout = two.module, two.layout
        for k in range(2 if precision is FULL else 0):
            layout.write(two.rows[k], module)
            layout.write_buffers(two.buffers[k], module)
            objective = replace(self._task.objective, precision=FULL)
            inputs = on_each(getitem, two.inputs, k)
            expected = _plain_gradients(objective, module.train(), inputs, two.targets[k])
            for entry, gradient, reference in zip(layout.parameters, gradients, expected, strict=True):
                if not self.agree(gradient[k], reference, dtype):
                    raise not_stackable(f"the gradient of {entry.name} {DIFFERS}")
            read = layout.read_buffers(module, out=two.buffers[k])
            for entry in layout.buffers:
                if not self.agree(buffers_after[k, entry.span], read[entry.span], dtype):
                    raise not_stackable(f"the buffer {entry.name} {DIFFERS}")

    def compare_steps(self) -> None:
        """Raise ExperimentError if the client algorithm cannot update one parameter tensor after another."""
        algorithm, module = self._task.algorithm, StackedModule(self._task.new_module)
        if not algorithm.element_wise:  # its steps are always called with whole rows
            return
        d = module.layout.d
        gradients = torch.linspace(-1, 1, 2 * d, dtype=self._task.dtype, device=self._task.device).view(2, d)
        whole, rows, together, apart = (gradients.cos() for _ in range(4))
        settings = {key: amount.largest for key, amount in self._task.varying.items()}
        try:
            whole_state, state = algorithm.start(whole), StackState(module, rows, algorithm.start(rows), [])
            for _ in range(2):
                algorithm.step(whole, gradients.clone(), whole_state)
                parts = [_as_product(gradient) for gradient in module.views(gradients.clone())]
                move(algorithm, state, list(zip(module.layout.parameters, parts, strict=True)))
            if settings:
                columns = {key: gradients.new_tensor([[number], [number / 2]]) for key, number in settings.items()}
                self._task.algorithm_at(1, settings=columns).step(
                    together, gradients.clone(), algorithm.start(together)
                )
                for row, gradient, share in zip(apart, gradients.clone(), (1, 0.5), strict=True):
                    own = {key: number * share for key, number in settings.items()}
                    self._task.algorithm_at(1, settings=own).step(row, gradient, algorithm.start(row))
        except Exception as error:
            raise not_stackable(
                f"a step of local.algorithm fails for several workers at once: {one_line(error)}"
            ) from error
        if not self.agree(together, apart):
            raise not_stackable(
                f"in a step of several workers, local.algorithm does not use each worker's {' and '.join(settings)}"
            )
        if not self.agree(rows, whole):
            raise not_stackable(
                "local.algorithm is not element-wise: a step on some of the parameters differs from a step on all "
                "parameters"
            )

    def agree(self, actual: Tensor, reference: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether two tensors are equal up to the rounding of `dtype` (None: the dtype of the task)."""
        if not reference.numel():
            return True
        tolerance = TOLERANCE[dtype or self._task.dtype] * max(1.0, float(reference.abs().max()))
        return bool((actual - reference).abs().max() <= tolerance)


def _with_others(tensor: Tensor) -> Tensor:
    """Return an input of several samples, of which all but the first are replaced, by other numbers if possible."""
    other = tensor[:1] * 2 + 1 if tensor.is_floating_point() else tensor[:1]
    return torch.cat([tensor[:1], other.expand_as(tensor)[1:]])


def _as_product(gradient: Tensor) -> Tensor | OuterProductGrad:
    """Convert the gradient of a weight matrix of two models, [2, o, i], to an OuterProductGrad.

    Optimizer steps get this type in a run, so the probe tests them with it. Other gradients are returned unchanged.
    """
    if gradient.ndim != 3:
        return gradient
    return OuterProductGrad(
        torch.eye(gradient.shape[1], dtype=gradient.dtype, device=gradient.device).expand(2, -1, -1), gradient
    )


def _plain_gradients(objective: Objective, module: nn.Module, inputs: Inputs, targets: Tensor) -> tuple[Tensor, ...]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.zero_grad()
    with Recording():
        loss = objective.loss(outputs_of(module, on_each(Tensor.clone, inputs)), targets)
    loss.backward()  # not torch.autograd.grad, which reentrant checkpoints do not support
    return tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
