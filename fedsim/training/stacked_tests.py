"""Tests of the models of many workers at a time with batched kernels, for a GPU."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.learning_task import Correct, counts_of, joint_of
from fedsim.core.model_inputs import Inputs, on_each, outputs_of
from fedsim.core.randomness import global_states, preserve_random_state
from fedsim.core.training import MetricSums, Objective
from fedsim.errors import FedsimWarning
from fedsim.processes.process_context import ProcessContext
from fedsim.system.devices import wide_dtype
from fedsim.system.precision import FULL, full_precision
from fedsim.training.batches import BatchSource, WorkItem
from fedsim.training.operations import DataDependenceCheck, not_stackable, reason_of
from fedsim.training.probe import DIFFERS, StackingProbe, Trials
from fedsim.training.row_module import differ
from fedsim.training.shared_state import SharedState, test_batch_size
from fedsim.training.stack import alter_in_place, block_of
from fedsim.training.stack_step import gather
from fedsim.training.stacked_module import StackedModule
from fedsim.training.task import RunTask


class ModelTests(NamedTuple):
    """Models to be tested, each on the samples of one worker.

    Attributes:
        members: the workers.
        model_of: function that returns the parameters [d] and the buffers [b] of the model for a worker's samples.
        shared: whether this is the same model for all workers.
    """

    members: Sequence[WorkItem]
    model_of: Callable[[WorkItem], tuple[Tensor, Tensor]]
    shared: bool = False


class Pass(NamedTuple):
    """Batches that are tested together, one array element per batch.

    Attributes:
        position: position of the batch's worker among all tested workers.
        number: number of the batch among those of its worker.
        sizes: number of samples.
    """

    position: np.ndarray
    number: np.ndarray
    sizes: np.ndarray


def passes_of(samples: np.ndarray, size: int, most_batches: int, most_samples: int) -> Iterator[Pass]:
    """Divide the samples of n workers into batches, and yield batches of similar sizes together, largest first.

    Args:
        samples: number of samples of each worker, int64 [n].
        size: maximum number of samples per batch.
        most_batches: maximum number of batches per pass.
        most_samples: maximum number of samples per pass, including padding. One batch may have more.
    """
    counts = -(-samples // size)
    position = np.repeat(np.arange(len(samples)), counts)
    number = np.arange(len(position)) - (counts.cumsum() - counts)[position]
    sizes = np.minimum(size, samples[position] - number * size)
    order, begin = np.argsort(-sizes, kind="stable"), 0
    while begin < len(order):
        count = min(most_batches, max(1, most_samples // int(sizes[order[begin]])))
        chosen = order[begin : begin + count]
        yield Pass(position[chosen], number[chosen], sizes[chosen])
        begin += count


class StackedTests:
    """Tests of several models at once, in evaluation mode.

    A pass tests the models of at most `width` workers, or one model on the samples of any number of workers, with as
    many samples as a test or a training step has.

    Args:
        process: context of this process.
        task, shared: run and its tensors.
        batch_source: source of each worker's samples.
        width: maximum number of models per pass.
        probe: result of a trial run of the model.
    """

    def __init__(
        self,
        process: ProcessContext,
        task: RunTask,
        shared: SharedState,
        batch_source: BatchSource,
        *,
        width: int,
        probe: StackingProbe,
    ) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self._width, self._merged, self._size = width, probe.merged, test_batch_size(task.device)
        self._samples = max(self._size, width * task.schedule.largest_batch)

    @cached_property
    def are_possible(self) -> bool:
        """Whether the model can be tested in stacks. The first use makes a trial run, and warns if it fails."""
        task, trials = self._task, Trials(self._task, self._shared.data.train)
        try:
            with preserve_random_state(task.device), full_precision(task.device):
                require_equal_outputs(task, trials, self._module, merged=self._merged)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model may fail in any way
            if self._process.index == 0:
                line = f"workers are tested one after another, with the same results: {reason_of(error)}"
                warnings.warn(line, FedsimWarning, stacklevel=2)
            return False
        return True

    @cached_property
    def _module(self) -> StackedModule:
        return StackedModule(self._task.new_module, self._objective, merged=self._merged)

    @cached_property
    def _objective(self) -> Objective:
        return replace(self._task.objective, precision=FULL)

    def __call__(
        self, several: Sequence[ModelTests], purpose: str, correct: Correct | None = None
    ) -> list[list[MetricSums]]:
        """Test models. Return, for each element of `several`, the metric sums of each worker, on the host.

        Args:
            several: models.
            purpose: see `BatchSource.samples_of`.
            correct: function that decides which predictions are correct; None to count none, and to weight the loss by
                class as in training.
        """
        totals = [np.zeros((len(tests.members), 3)) for tests in several]
        passes, results = list[tuple[np.ndarray, np.ndarray]](), list[Tensor]()
        for tests, total in zip(several, totals, strict=True):
            if len(tests.members):
                with self._process.working_on_several(tests.members[0].round):
                    for part, sums in self._passes(tests, purpose, correct):
                        passes.append((total, part.position))
                        results.append(sums)
        if results:
            on_host = torch.cat(results).cpu().double().split([len(position) for _, position in passes])
            for (total, position), sums in zip(passes, on_host, strict=True):
                np.add.at(total, position, sums.numpy())
        return [[MetricSums(*sums) for sums in torch.from_numpy(total)] for total in totals]

    def _passes(self, tests: ModelTests, purpose: str, correct: Correct | None) -> Iterator[tuple[Pass, Tensor]]:
        """Test models, and yield the results of one pass after another.

        The results are the sum of losses, the number of correct predictions and the number of predictions of each
        batch, [batches, 3].
        """
        members = list(tests.members)
        workers = np.array([member.worker for member in members])
        data, positions, begins, samples = self._batch_source.samples_of(workers, purpose)
        alterations = self._batch_source.alterations(members, purpose)
        most = self._samples if tests.shared else self._width
        for part in passes_of(samples, self._size, most, self._samples):
            self._process.heartbeat()
            begin = begins[part.position] + part.number * self._size
            block = block_of(self._task, int(part.sizes[0]), 0, positions, begin[None], part.sizes[None])
            inputs, targets = gather(data, block.positions[0])
            for row, (position, number, size) in enumerate(zip(*map(np.ndarray.tolist, part), strict=True)):
                if alterations and (alter := alterations[position]):
                    alter_in_place(alter, inputs, targets, (row, slice(size)), number)
            tested = part.position[:1] if tests.shared else part.position
            rows, buffers = map(
                torch.stack, zip(*(tests.model_of(members[position]) for position in tested), strict=True)
            )
            yield part, self._test(rows, buffers, inputs, targets, block.weights[0] > 0, correct)

    def _test(
        self, rows: Tensor, buffers: Tensor, inputs: Inputs, targets: Tensor, inside: Tensor, correct: Correct | None
    ) -> Tensor:
        """Test k models on m batches each. Return the three sums of each batch, [k * m, 3].

        Args:
            rows, buffers: parameters [k, d] and buffers [k, b] of the models.
            inputs, targets: samples of the batches, [k * m, batch, ...] each.
            inside: bool [k * m, batch], false for padding.
            correct: see `__call__`.
        """
        learning, shape = self._task.learning_task, inside.shape
        of_models = on_each(lambda tensor: tensor.flatten(0, 1).unflatten(0, (len(rows), -1)), inputs)
        targets = targets.flatten(0, 1)
        parameters, of_buffers = self._module.views(rows), self._module.unpack_buffers(buffers)
        outputs = self._module.outputs(parameters, of_buffers, of_models).flatten(0, 1)
        counts, wide = counts_of(learning), wide_dtype(rows.device)
        answers = inside.to(wide) if counts is None else counts(targets).view(shape) * inside.to(wide)
        loss_of = self._objective.loss if correct is None else learning.loss
        losses = loss_of(outputs, targets, "none").view(shape) * answers
        hits = torch.zeros_like(answers)
        if correct is not None:
            hits = correct(outputs, targets).reshape(*shape, -1).sum(2, dtype=wide)
        sums = torch.stack([losses, hits, answers], 2)
        return torch.where(inside.unsqueeze(2), sums, 0).sum(1)


def _copy_at(tensor: Tensor, index: int) -> Tensor:
    return tensor[index].clone()


def require_equal_outputs(task: RunTask, trials: Trials, stacked: StackedModule, *, merged: bool) -> None:
    """Raise ExperimentError if models in evaluation mode have other outputs in a stack than alone.

    Two models are tried on a batch each, and one model on both batches at once.

    Args:
        task: run to compute.
        trials: source of the models and batches.
        stacked: module that computes several models.
        merged: argument of `stacked`.
    """
    two, generators = trials.two_models(task.dtype), global_states(task.device)
    module, layout = two.module.eval(), two.layout
    start, expected = copy.deepcopy(module), list[Tensor]()
    with torch.no_grad():
        for model, batch in (0, 0), (1, 1), (0, 1):
            layout.write(two.rows[model], module)
            layout.write_buffers(two.buffers[model], module)
            expected.append(outputs_of(module, on_each(_copy_at, two.inputs, batch)))
    is_joint = joint_of(task.learning_task)
    if is_joint is not None and is_joint(expected[0], two.targets[0]):
        raise not_stackable("the loss of a batch is one number")
    of_one = on_each(lambda tensor: tensor.flatten(0, 1).unsqueeze(0), two.inputs)
    with DataDependenceCheck() if merged else contextlib.nullcontext():
        own, shared = (
            stacked.outputs(
                stacked.views(two.rows[:k]), stacked.unpack_buffers(two.buffers[:k]), on_each(Tensor.clone, inputs)
            )
            for k, inputs in ((2, two.inputs), (1, of_one))
        )
    if differ(start, module) or global_states(task.device) != generators:
        raise not_stackable("a forward pass in evaluation mode changes attributes, or draws random numbers")
    pairs = zip([*own, *shared.unflatten(1, (2, -1))[0]], [*expected[:2], *expected[::2]], strict=True)
    if not all(trials.agree(actual, reference) for actual, reference in pairs):
        raise not_stackable(f"the output of a model in evaluation mode {DIFFERS}")
