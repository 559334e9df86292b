"""Local steps of a stack of workers, captured as CUDA graphs and replayed (the setting `cuda_graphs`).

For a small model, launching kernels takes longer than running them. Replaying a graph launches all kernels of several
steps at once, without running Python. A graph always uses the same memory, so everything that a step reads or writes is
in permanent tensors (`CapturedSteps`). These tensors contain the batches of many steps. A step counter on the device
selects the batches of the next steps.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.schedule import Varying
from fedsim.core.rows import new_rows
from fedsim.errors import ExperimentError, FedsimWarning, one_line
from fedsim.system.devices import to_device
from fedsim.training.capture import GraphPool, Run, can_capture, require_capturable
from fedsim.training.client_rounds import ClientRounds
from fedsim.training.forward_functions import Dropout, FactorsAhead
from fedsim.training.probe import StackingProbe
from fedsim.training.shared_state import SharedState
from fedsim.training.stack import Stack, StepBatch
from fedsim.training.stack_step import Batch, StackState, StackStep, gather
from fedsim.training.stacked_module import StackedModule
from fedsim.training.task import RunTask

LONGEST = 16  # maximum number of steps in a graph
MOST_NODES = 4_000  # maximum number of kernels in a graph of several steps, whose capture takes time and memory
MOST_LENGTHS = 4  # maximum number of lengths of graphs that train the same number of workers
MOST_STEPS = 256  # maximum number of steps whose batches are on the device at a time
MOST_SAMPLES = 2**22  # maximum number of samples in these batches: 48 MB of positions and weights


def unsafe(task: RunTask, probe: StackingProbe) -> str | None:
    """Return why a task's training steps cannot be captured as CUDA graphs; None if they can."""
    if not can_capture(task.device):
        return f"CUDA graphs need a CUDA device, not {task.device.type}"
    if "parameters" not in task.syncs:
        return "gradients are aggregated after every step"
    if task.experiment.sends_gradients:
        return "each worker sends the gradient of a single step"
    if not task.algorithm.element_wise:
        return "the client algorithm is not element-wise: each step needs all parameters of a model"
    if task.algorithm.sample_noise is not None:
        return "the noise of each step depends on the worker"
    if task.schedule.accumulation_steps > 1:
        return "gradients are accumulated (local.accumulation_steps)"
    if task.experiment.local_schedule is not None:
        return "the learning rate changes (local.schedule), but a captured step has a fixed rate"
    if isinstance(task.schedule.batch_size, Varying):
        return "batch sizes differ between workers (local.batch_size)"
    if probe.coupled:
        return "outputs or losses depend on the whole batch (as with BatchNorm), so short batches cannot be padded"
    poisoned = bool(task.byzantine) and task.experiment.attack.component.poison is not None
    if task.experiment.data.transforms or task.transforms is not None or poisoned:
        return "batches are altered per worker (by data.augment, the partition or the attack)"
    return None


class Graph(NamedTuple):
    """Size of a CUDA graph that trains several workers for one or more steps.

    Attributes:
        rows: maximum number of workers.
        steps: number of steps that one replay runs.
        masked: whether some workers may have no batch left. A mask then keeps their parameters unchanged.
    """

    rows: int
    steps: int
    masked: bool


def lengths_of(steps: int, captured: Collection[int], longest: int = LONGEST) -> list[int]:
    """Return the lengths (numbers of steps) of the CUDA graphs that are replayed to run `steps` training steps.

    As few graphs as possible are used: all have `longest` steps, except the last. If all graphs can have one length
    with at most twice as many graphs, they have this length instead.

    Args:
        steps: number of training steps, at least 1.
        captured: lengths of the graphs captured so far. If new lengths would make more than `MOST_LENGTHS` lengths, the
            result contains only captured lengths and 1.
        longest: maximum length.
    """
    fewest = -(-steps // longest)
    equal_lengths = [steps // count for count in range(fewest, 2 * fewest + 1) if steps % count == 0]
    usable = set(equal_lengths[:1] or [longest, steps % longest])
    if len(usable.union(captured, [1])) > MOST_LENGTHS:
        usable = {*captured, 1}
    lengths = list[int]()
    for length in sorted(usable, reverse=True):
        lengths += [length] * (steps // length)
        steps %= length
    return lengths


def sizes_of_stacks(width: int, usual: Iterable[int]) -> list[int]:
    """Return the numbers of workers for which graphs may be captured, ascending.

    Args:
        width: maximum number of workers that are trained at once.
        usual: most frequent numbers of workers. `width` and all powers of two below `width` are added to these.
    """
    return sorted({*usual, *(2**power for power in range((width - 1).bit_length())), width})


def _warm_up_of(graph: Graph) -> Graph:
    """Return the size of a warm-up, which runs the same operations as `graph` in at most two steps."""
    return graph._replace(steps=min(2, graph.steps))


class CapturedSteps:
    """CUDA graphs that train several workers at once, and the tensors that the graphs use.

    Args:
        task, shared: run and its tensors.
        module: module that computes the models of all workers at once.
        dropouts: dropout calls in a forward pass of the model.
        sizes: numbers of workers for which graphs may be captured, ascending.
        usual: frequent numbers of workers, for which a graph is captured now. Other graphs are captured when needed.
        client_rounds: object whose methods start and end the workers' local training.

    Raises the same errors as `GraphPool.capture`.
    """

    def __init__(
        self,
        task: RunTask,
        shared: SharedState,
        module: StackedModule,
        dropouts: Sequence[Dropout],
        sizes: Sequence[int],
        usual: Sequence[int],
        client_rounds: ClientRounds,
    ) -> None:
        self._client_rounds = client_rounds
        self._task, self._shared, self._module = task, shared, module
        self._dropouts, self._sizes = dropouts, sizes
        device, batch, wide, width = task.device, task.schedule.largest_batch, shared.cohort.buffers.dtype, sizes[-1]
        self._pool = GraphPool(device)
        self._graphs: dict[Graph, Run] = {}
        self._longest: dict[tuple[int, bool], int] = {}  # maximum number of steps by number of rows and `masked`

        rows = new_rows(width, module.layout.d, task.dtype, device)
        rows.copy_(shared.server.row)
        buffers = module.unpack_buffers(shared.server.buffers.expand(width, -1))
        settings = task.step_settings(np.zeros(width, dtype=np.int64), np.ones(width, dtype=np.int64))
        self._state = StackState(module, rows, task.algorithm.start(rows), buffers, settings=settings)
        self._names = set(self._state.algorithm_state)
        self._loss_sums = torch.zeros(width, dtype=wide, device=device)
        self._step_of_stack = StackStep(task, module)

        self._step_number = torch.zeros(1, dtype=torch.int64, device=device)  # number of the next step in the round
        self._ahead = torch.arange(LONGEST, device=device)
        self._layer_keys = torch.zeros(width, dtype=torch.int64, device=device)
        self._steps = steps = max(1, min(MOST_STEPS, MOST_SAMPLES // (width * batch)))
        self._positions = torch.zeros(steps, width, batch, dtype=torch.int64, device=device)
        self._weights = torch.zeros(steps, width, batch, dtype=task.dtype, device=device)
        self._samples = torch.zeros(steps, width, dtype=wide, device=device)
        for size in usual:
            self._capture(Graph(self._size_for(size), 1, masked=False))

    def prepare_for(self, stack: Stack) -> list[list[Graph]]:
        """Capture the graphs that a stack of workers needs. Call this before the round begins.

        Returns the graphs to replay in the round: a list for each block of steps.
        """
        rows = self._size_for(len(stack))
        unmasked = stack.steps[-1] if rows == len(stack) else 0
        plan = []
        for start in range(0, stack.steps[0], self._steps):
            steps = min(self._steps, stack.steps[0] - start)
            first = min(steps, max(0, unmasked - start))
            plan.append(
                [*self._graphs_for(rows, first, masked=False), *self._graphs_for(rows, steps - first, masked=True)]
            )
        return plan

    def train(self, stack: Stack, plan: Sequence[Sequence[Graph]], heartbeat: Callable[[], None]) -> None:
        """Train a stack of workers for a round by replaying graphs.

        Args:
            stack: stack of workers.
            plan: graphs to replay, as returned by `prepare_for`.
            heartbeat: function that is called before each replay.
        """
        self._start(stack)
        for graphs, block in zip(plan, stack.blocks(self._steps), strict=True):
            stack.count_samples(block)
            self._load(block)
            for graph in graphs:
                heartbeat()
                self._graphs[graph]()
        stack.add_losses(self._loss_sums[: len(stack)])
        state, shared = self._state.of(slice(0, len(stack))), self._shared
        buffers = torch.empty_like(shared.cohort.buffers[: len(stack)])
        shared.cohort.buffers[stack.index] = self._module.pack_buffers(state.buffers, buffers)
        self._client_rounds.finish(state.rows, state.algorithm_state, stack.index, stack.members)
        shared.cohort.rows[stack.index] = state.rows

    def _graphs_for(self, rows: int, steps: int, *, masked: bool) -> list[Graph]:
        """Return the graphs that train `rows` workers for `steps` steps. Capture those that do not exist yet.

        See `Graph` for `masked`.
        """
        if not steps:
            return []
        longest = self._longest_of(Graph(rows, steps, masked))
        captured = [graph.steps for graph in self._graphs if graph.rows == rows and graph.masked == masked]
        graphs = [Graph(rows, length, masked) for length in lengths_of(steps, captured, longest)]
        for graph in dict.fromkeys(graphs):
            self._capture(graph)
        return graphs

    def _size_for(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _longest_of(self, graph: Graph) -> int:
        """Return the maximum length of graphs like `graph`, after a check that steps like its own can be captured."""
        key, trial = (graph.rows, graph.masked), _warm_up_of(graph)
        if key not in self._longest:
            nodes = require_capturable(partial(self._take_steps, trial), self._task.device)
            self._longest[key] = max(1, min(LONGEST, MOST_NODES * trial.steps // nodes))
        return self._longest[key]

    def _capture(self, graph: Graph) -> None:
        if graph not in self._graphs:
            self._longest_of(graph)
            warm_up = partial(self._take_steps, _warm_up_of(graph))
            self._graphs[graph] = self._pool.record(partial(self._take_steps, graph), warm_up)

    def _start(self, stack: Stack) -> None:
        """Begin a round: copy the workers' parameters, states and buffers to the graphs' tensors."""
        shared, state = self._shared, self._state.of(slice(0, len(stack)))
        state.rows.copy_(shared.cohort.rows[stack.index])
        for name, fresh in self._client_rounds.start(state.rows, stack.index, stack.members).items():
            state.algorithm_state[name].copy_(fresh)
        for name, column in stack.settings.items():
            state.settings[name].copy_(column)
        buffers = self._module.unpack_buffers(shared.cohort.buffers[stack.index])
        for buffer, fresh in zip(state.buffers, buffers, strict=True):
            buffer.copy_(fresh)
        if self._dropouts:
            keys = torch.from_numpy(stack.layer_keys)
            self._layer_keys[: len(stack)] = to_device(keys, self._layer_keys.device)
        self._loss_sums.zero_()
        self._step_number.zero_()

    def _load(self, block: StepBatch) -> None:
        """Copy the batches of several steps to the tensors that the graphs read."""
        steps, workers = block.sizes.shape
        for room, values in (
            (self._positions, block.positions),
            (self._weights, block.weights),
            (self._samples, block.counts),
        ):
            room[:steps, :workers] = values
        if workers < self._samples.shape[1]:
            self._weights[:steps, workers:] = 0
            self._samples[:steps, workers:] = 0

    def _take_steps(self, graph: Graph) -> None:
        """Run the training steps of `graph`. This is called once, during the capture of the CUDA graph."""
        rows, batch = graph.rows, self._positions.shape[2]
        index = (self._step_number + self._ahead[: graph.steps]).remainder_(
            self._steps
        )  # positions in the block of steps
        positions, weights, samples = (
            of_steps[:, :rows].index_select(0, index) for of_steps in (self._positions, self._weights, self._samples)
        )
        drawn = self._layer_keys[:rows], graph.steps, batch, self._dropouts, self._task.dtype
        factors = FactorsAhead(*drawn, first_step=self._step_number.expand(rows))
        for step in range(graph.steps):
            data = gather(self._shared.data.train, positions[step])
            self._step(Batch(*data, weights[step], factors.of(step, rows)), samples[step], masked=graph.masked)
        self._step_number.add_(graph.steps)

    def _step(self, batch: Batch, samples: Tensor, *, masked: bool) -> None:
        state, active = self._state.of(slice(0, len(samples))), samples > 0 if masked else None
        losses = self._step_of_stack(state, batch, active)
        if set(state.algorithm_state) != self._names:
            raise ExperimentError(
                "local.algorithm: a step adds or removes entries of the state; `start` must return all entries"
            )
        if active is not None:
            losses = torch.where(active, losses, 0)
        self._loss_sums[: len(samples)].addcmul_(losses, samples)


class CUDAGraphCache:
    """CUDA graphs of a trainer, or the reason (`refusal`) why the trainer uses none.

    Args:
        make: function that captures the first graphs and returns them.
        refusal: reason why CUDA graphs must not be used; None to use them.
        warns: whether to warn if a capture fails.
    """

    def __init__(self, make: Callable[[], CapturedSteps], *, refusal: str | None, warns: bool) -> None:
        self._warns, self.refusal = warns, refusal
        self._steps: CapturedSteps | None = None
        if refusal is None:
            with self._refusing_after_failures():
                self._steps = make()

    def train(self, stack: Stack, heartbeat: Callable[[], None]) -> bool:
        """Train a stack by CUDA graphs, and return True. If no graphs are used, do nothing and return False."""
        if self._steps is not None:
            with self._refusing_after_failures():
                plan = self._steps.prepare_for(stack)
        if self._steps is None:
            return False
        self._steps.train(stack, plan, heartbeat)
        return True

    @contextlib.contextmanager
    def _refusing_after_failures(self) -> Iterator[None]:
        """Return a context manager that catches any error, disables CUDA graphs, and warns if `warns` is true."""
        try:
            yield
        except Exception as error:
            self._steps = None
            self.refusal = str(error) if isinstance(error, ExperimentError) else one_line(error)
            if self._warns:
                line = f"cuda_graphs: steps run without CUDA graphs, with the same results: {self.refusal}"
                warnings.warn(line, FedsimWarning, stacklevel=4)
