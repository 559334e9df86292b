"""Tests of the global model, with the batches divided among the processes, and tests on single workers' samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedsim.core.learning_task import correct_of, counts_of, joint_of
from fedsim.core.randomness import seed_everything
from fedsim.core.training import MetricSums, test
from fedsim.errors import ExperimentError, FedsimWarning, one_line
from fedsim.system.devices import wide_dtype
from fedsim.training.capture import GraphPool, Run
from fedsim.training.row_module import RowModule
from fedsim.training.shared_state import SharedState, Split, TestResults, test_batch_size
from fedsim.training.task import RunTask


@dataclass(frozen=True)
class EvaluationResult:
    """Test metrics of the global model after one round. A metric that is not computed is None.

    >>> from fedsim.rounds.evaluation import EvaluationResult
    >>> EvaluationResult.mean([EvaluationResult(0.5, 0.75), EvaluationResult(1.5, 0.25)]).test_loss
    1.0
    """

    test_loss: float
    test_accuracy: float | None
    attack_success: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> EvaluationResult:
        """Return the metrics of the latest test, from the results that all processes have stored in `shared`."""
        data, (test, validation) = shared.data, (shared.tests["test"], shared.tests["validation"])
        targets = data.test.sample_targets
        loss, accuracy, success = _means(task, test, targets)
        metrics = dict(_metrics(task, test.outputs, targets))
        if not len(data.validation):
            return cls(loss, accuracy, success, metrics=metrics)
        targets = data.validation.sample_targets
        of_validation = _metrics(task, validation.outputs, targets)
        metrics |= {f"validation_{label}": value for label, value in of_validation}
        means = _means(task, validation, targets)[:2]
        return cls(loss, accuracy, success, *means, metrics)

    @classmethod
    def mean(cls, results: Sequence[EvaluationResult]) -> EvaluationResult:
        """Return the mean of each metric over several runs. A metric that is None in any run stays None."""

        def mean_of(name: str) -> Any:
            values = [getattr(result, name) for result in results]
            return None if None in values else fmean(values)

        names = [item.name for item in fields(cls) if item.name != "metrics"]
        metrics = {label: fmean(result.metrics[label] for result in results) for label in results[0].metrics}
        return cls(**{name: mean_of(name) for name in names}, metrics=metrics)

    def fields(self) -> dict[str, Any]:
        """Return all metrics by name."""
        return asdict(self)


def _means(task: RunTask, results: TestResults, targets: Tensor) -> tuple[float, float | None, float | None]:
    """Return (loss, accuracy, attack success rate). The accuracy or success rate is None if it is undefined.

    Args:
        task: run to compute.
        results: results of the test.
        targets: targets of all tested samples.
    """
    counts, is_joint = counts_of(task.learning_task), joint_of(task.learning_task)
    answers = len(targets) if counts is None else max(1, int(counts(targets).sum()))
    loss_sum, correct, successes, tries = results.sums.sum(0).tolist()
    loss, success = loss_sum / answers, successes / tries if tries else None
    if is_joint is not None and len(results.outputs):
        outputs = results.outputs.flatten(0, 1)[: len(targets)]
        loss = task.learning_task.loss(outputs, targets).item() if is_joint(outputs, targets) else loss
    return loss, None if correct_of(task.learning_task) is None else correct / answers, success


def _metrics(task: RunTask, outputs: Tensor, targets: Tensor) -> Iterator[tuple[str, float]]:
    for metric in (table.component for table in task.experiment.metrics):
        yield metric.label, metric(outputs.flatten(0, 1)[: len(targets)], targets)


class Evaluation:
    """Tests the global model batch by batch. Each process tests some of the batches.

    The result does not depend on the number of processes.

    Args:
        task, shared: run and its tensors.
        module: model that receives a copy of the global parameters.
        index, count: index of this process, and number of processes. The process tests the batches index,
            index + count, ...
        split: "test" for the test samples, "validation" for the held-out training samples.
        captured: whether to use a CUDA graph, if possible.
    """

    def __init__(
        self,
        task: RunTask,
        shared: SharedState,
        module: RowModule,
        index: int,
        count: int,
        split: Split,
        *,
        captured: bool,
    ) -> None:
        self._task, self._shared, self._module, self._split = task, shared, module, split
        self._data = shared.data.test if split == "test" else shared.data.validation
        self._all_sums, self._outputs = shared.tests[split].sums, shared.tests[split].outputs
        self._batches = batches = range(index, len(self._all_sums), count)
        self._size = size = test_batch_size(task.device)
        self._sizes = [min(size, len(self._data) - batch * size) for batch in batches]
        self._to_be_captured = captured and size in self._sizes
        self._replay: Run | None = None
        self._room: tuple[Tensor, Tensor] | None = None  # parameters and gradients at fixed addresses, for a graph

        device = task.device
        self._starts = size * torch.tensor(list(batches), dtype=torch.int64, device=device)
        self._positions = torch.arange(size, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # number of the next batch in a graph
        self._sums = torch.zeros(len(batches), 4, dtype=wide_dtype(device), device=device)

    @property
    def results(self) -> list[Tensor]:
        """Tensors [batches, ...] with the test results of each batch."""
        return [values for values in (self._all_sums, self._outputs) if len(values)]

    def __call__(self, round: int, heartbeat: Callable[[], None]) -> None:
        """Test this process's batches, and store the results.

        Args:
            round: number of the round, for the random seeds.
            heartbeat: function that is called before each batch.
        """
        if not self._batches:
            return
        if self._to_be_captured:
            self._to_be_captured = False
            self._capture()
        row, gradient = self._room or self._new_room()
        if self._replay is not None:
            self._number.zero_()
        for number, (batch, size) in enumerate(zip(self._batches, self._sizes, strict=True)):
            heartbeat()
            if self._replay is not None and size == self._size:
                self._replay()
            else:
                seed_everything(self._task.device, self._task.experiment.seed, self._split, round, batch)
                positions = self._positions[:size] + batch * self._size
                torch.stack(self._sums_of(self._module, row, gradient, positions), out=self._sums[number])
        self._all_sums[list(self._batches)] = self._sums.cpu().double()

    def _sums_of(self, module: RowModule, row: Tensor, gradient: Tensor, positions: Tensor) -> list[Tensor]:
        """Test the global model on one batch, and return four sums over its samples as scalar tensors.

        The numbers are the sum of losses, the number of correct predictions, the number of predictions that match the
        attacker's goal, and the number of samples that have such a goal.

        Args:
            module: module that receives the global parameters.
            row, gradient: tensors [d] for the parameters and their gradients, which are overwritten.
            positions: indices of the batch's samples in the dataset.
        """
        shared = self._shared
        inputs, targets = self._data.gather(positions)
        module.load(row.copy_(shared.server.row), gradient, shared.server.buffers)
        tally = self._test(module, inputs, targets, positions)
        return [tally.loss_sum, tally.correct, *self._towards_goal(module, inputs, targets)]

    def _test(self, module: RowModule, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> MetricSums:
        """Return the sum of losses and the number of correct predictions of a batch.

        If metrics need the model's outputs, these are stored at the indices `positions`.
        """
        task = self._task.experiment.task.component

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if positions is not None and len(self._outputs):
                self._outputs.flatten(0, 1).index_copy_(0, positions, outputs)
            return task.loss(outputs, targets)

        return test(module.module, [(inputs, targets)], loss, correct_of(task), counts_of(task))

    def _towards_goal(self, module: RowModule, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many predictions match the attacker's goal, and how many samples of the batch have such a goal.

        The goal is, for example, the target class of a backdoor. Without a goal, both numbers are 0.
        """
        task, none = self._task, torch.zeros((), dtype=wide_dtype(self._task.device), device=self._task.device)
        if task.experiment.attack.component.goal is None or not task.byzantine or self._split == "validation":
            return none, none
        inputs, targets = task.experiment.attack.component.goal(inputs, targets, self._shared.data.classes)
        if not len(targets):
            return none, none
        return self._test(module, inputs, targets).correct, none + len(targets)

    def _new_room(self) -> tuple[Tensor, Tensor]:
        row = self._shared.server.row.clone()
        return row, torch.empty_like(row)

    def _capture(self) -> None:
        """Capture the test of a full batch as a CUDA graph. If this is impossible, test without a graph."""
        module, room = RowModule(self._task.new_module), self._new_room()
        whole = self._sizes.count(self._size)

        def test_next() -> None:
            positions = self._positions + self._starts.index_select(0, self._number)
            sums = torch.stack(self._sums_of(module, *room, positions))
            self._sums.index_copy_(0, self._number, sums.unsqueeze(0))
            self._number.add_(1).remainder_(whole)
            if module.changed():
                raise ExperimentError(
                    "the model changes its attributes during evaluation, which a CUDA graph does not support"
                )

        try:
            self._replay = GraphPool(self._task.device).capture(test_next)
        except ExperimentError:
            return  # a graph cannot hold what the model or the attack does
        except Exception as error:
            line = f"cuda_graphs: the evaluation runs without a CUDA graph, with the same results: {one_line(error)}"
            warnings.warn(line, FedsimWarning, stacklevel=2)
            return
        self._module, self._room = module, room
