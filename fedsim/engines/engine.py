"""An engine: a backend (where rows are trained) and trainers (how they are trained).

Each line of a round is a method of `Engine`, which calls the method of `Executor` of the same name in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.algorithm import state_at_first
from fedsim.core.snapshot import Snapshot
from fedsim.engines.backend import Backend
from fedsim.engines.evaluation import EvaluationResult
from fedsim.engines.executor import Executor, MakeTrainer
from fedsim.engines.footprint import buffer_bytes, personal_bytes
from fedsim.engines.round_stats import AggregationStats, SentUpdates
from fedsim.engines.task import SharedState, TaskSpec, message_bytes
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.traits import EngineTraits
from fedsim.engines.worker_evaluation import Tested
from fedsim.engines.worker_states import WorkerStates
from fedsim.system.devices import resolve_device

Trainers = Callable[[TaskSpec, SharedState, int, int], tuple[MakeTrainer, dict[str, Any]]]


class Engine:
    """Trains cohorts of rows, one task after another. Use it in a `with` block, or call `close`.

    Args:
        backend: where rows are trained.
        trainers: how they are trained: from (task, shared state, processes, threads) it returns the function that makes
            the trainer of a process, and facts for the run record.
        threads: threads that PyTorch uses in each process.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()

    @classmethod
    def is_main(cls) -> bool:
        """Whether this process prints and writes records."""
        return True

    @classmethod
    def joined(cls, description: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Join the other programs of a run for its duration, if there are any.

        Args:
            description: the resolved experiment.
        """
        return nullcontext()

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        """The device of this process if the experiment names this one. Raises ExperimentError if there is none."""
        return resolve_device(name)

    def __init__(self, backend: Backend, trainers: Trainers, threads: int) -> None:
        self._backend, self._trainers, self._threads = backend, trainers, threads
        self._trainer_facts: dict[str, Any] = {}
        self._worker_states: WorkerStates | None = None

    @property
    def shared(self) -> SharedState:
        """The tensors of the current task, which all processes work on."""
        return self._backend.shared

    def allocate(self, task: TaskSpec, cohort: int, *data: Any) -> SharedState:
        """The state of a task; `data` as in `SharedState.allocate`."""
        return SharedState.allocate(task, cohort, *data)

    def begin(self, task: TaskSpec, shared: SharedState) -> None:
        """Begin a task and release the one before. Raises ExperimentError if the engine cannot do it."""
        make_trainer, self._trainer_facts = self._trainers(task, shared, self._backend.processes, self._threads)
        self._backend.begin(task, shared, make_trainer)
        self._task, self._worker_states = task, self._backend.new_worker_states(task)

    @property
    def worker_states(self) -> WorkerStates:
        """The state that workers keep between their rounds of the current task."""
        assert self._worker_states is not None
        return self._worker_states

    @property
    def at_work(self) -> bool:
        """Whether it takes tasks: it was not closed, and has not lost its processes."""
        return self._backend.at_work

    @property
    def can_lose_processes(self) -> bool:
        """Whether its processes may end while this one goes on; see ProcessLostError."""
        return self._backend.can_lose_processes

    def replace_processes(self) -> None:
        """Restart all processes on the current task and state. Raises WorkerError if that fails."""
        self._backend.replace_processes()

    def facts(self) -> dict[str, Any]:
        """How the current task is computed, for the run record: `processes` and others."""
        return {"processes": self._backend.processes, **self._trainer_facts}

    def replayed(self) -> bool | str:
        """Whether the steps of the current task are captured and replayed; if not, the reason."""
        refusals = [refusal for refusal in self._backend.run(Executor.replay_refusal) if refusal is not None]
        return refusals[0] if refusals else True

    def leave(self) -> None:
        """Release the task and its memory in every process; do nothing without a task."""
        self._worker_states = None
        self._backend.leave()

    def close(self) -> None:
        """End the processes, if there are any."""
        self._backend.close()

    # The lines of a round, see `fedsim.runs.loops.synchronous`.

    def pull_down(self, cohort: Sequence[int], round: int) -> int:
        """Copy the global model, and the state that workers keep, to the rows of the cohort; the bytes sent."""
        self._load_worker_states(cohort)
        self._backend.run(Executor.pull_down, cohort, round)
        return len(cohort) * self.received_bytes(round)

    def _load_worker_states(self, workers: Sequence[int]) -> None:
        if self._task.solver.starts_from_current:
            shared, initial = self.shared, self.worker_states.initial
            initial |= state_at_first(self._task.solver, shared.global_row, shared.global_buffers)
        self.worker_states.load_cohort(workers, self.shared.worker_rows)

    def full_gradients(self, cohort: Sequence[int], round: int) -> None:
        """Compute the gradients of the cohort over all samples, for client algorithms that ask for them."""
        algorithm = self._task.solver_at(round)
        if not algorithm.full_gradient:
            return
        self._backend.run(Executor.full_gradients, cohort, round)
        if algorithm.has("receive_gradients"):
            sums = self.worker_states.sums({"gradient": self.shared.full_gradients}, range(len(cohort)))
            algorithm.receive_gradients(self.shared.server_state, sums["gradient"] / len(cohort))

    def global_losses(self, workers: Sequence[int], round: int) -> np.ndarray:
        """The mean loss of the global model on the samples of each worker, float64 [k]."""
        results = self._backend.run(Executor.global_losses, list(workers), round)
        return np.array([results[place % len(results)][place] for place in range(len(workers))])

    def received_bytes(self, round: int) -> int:
        """The bytes that one worker receives before it trains."""
        task, shared = self._task, self.shared
        row = shared.global_row.nbytes - personal_bytes(task) if task.sync_in(round) == "parameters" else 0
        return row + buffer_bytes(task, shared) + message_bytes(task, shared)[0]

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train every member of the cohort on its shard. The rows hold the members' updates afterwards."""
        self._backend.run(Executor.train, cohort, round)

    def attack(self, cohort: Sequence[int], round: int) -> None:
        """Replace the updates of the Byzantine members of the cohort."""
        self._backend.run(Executor.attack, cohort, round)

    def process_updates(self, cohort: Sequence[int], round: int) -> SentUpdates:
        """Apply the processors to the updates of the cohort."""
        if not self._task.processors:
            nbytes = self.shared.global_row.nbytes - personal_bytes(self._task)
            return SentUpdates(len(cohort), len(cohort) * nbytes)
        return SentUpdates.total(self._backend.run(Executor.process_updates, cohort, round))

    def aggregate(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Apply the rule to the updates of the cohort. The processes keep the result for `server_step`."""
        return self._backend.run(Executor.aggregate, cohort, round)[0]

    def server_step(self) -> None:
        """Move the global row along the aggregated update, by the server optimizer."""
        self._backend.run(Executor.server_step)

    def combine_buffers(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> int:
        """Update the global buffers from those of the cohort, without the excluded workers; the bytes that are sent."""
        if not self.shared.global_buffers.numel():
            return 0
        self._backend.run(Executor.combine_buffers, cohort, round, excluded)
        return len(cohort) * buffer_bytes(self._task, self.shared)

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Run a round of synchronous SGD: the cohort's gradients are aggregated at every step."""
        stats = self._backend.run(Executor.train_on_averaged_gradients, cohort, round)
        return replace(stats[0], sent=SentUpdates.total(each.sent for each in stats))

    def receive(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> int:
        """Give the server the messages of the workers that were not excluded; the bytes of all messages."""
        if self.shared.messages:
            slots = _slots_of_others(cohort, excluded)
            sums = self.worker_states.sums(self.shared.messages, slots)
            self._task.solver_at(round).receive(self.shared.server_state, sums, len(slots), len(self.shared.shards))
        return len(cohort) * message_bytes(self._task, self.shared)[1]

    def keep_worker_state(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> None:
        """Store the state that workers keep; excluded workers keep that of before."""
        slots = _slots_of_others(cohort, excluded)
        self.worker_states.save([cohort[slot] for slot in slots], self.shared.worker_rows, slots)

    def skip_round(self, round: int) -> None:
        """Run a round in which no worker takes part: the model and all states stay."""
        self._backend.run(Executor.end_round, round)

    def train_apart(self, members: Sequence[WorkItem]) -> None:
        """Train rows from their current values, each for a round or for one step."""
        self._backend.run(Executor.train_apart, members)

    def test(self, round: int) -> EvaluationResult:
        """Test the global model on the test samples, and on those held out for validation.

        Random draws in evaluation mode depend on the seed, the round and the batch.
        """
        self._backend.run(Executor.test, round)
        return EvaluationResult.of(self._task, self.shared)

    def evaluate_workers(
        self, workers: Sequence[int], round: int, *, fine_tune: int, at_once: int
    ) -> dict[int, Tested]:
        """Test the models of workers on their own test samples: loss and accuracy by worker and model.

        Overwrites the rows of the cohort.

        Args:
            fine_tune: epochs of local training, after which the models are tested again; 0: none.
            at_once: how many workers there are rows for.
        """
        tested: dict[int, Tested] = {}
        for start in range(0, len(workers), at_once):
            some = list(workers[start : start + at_once])
            self._backend.run(Executor.place, some, round)
            self._load_worker_states(some)
            for part in self._backend.run(Executor.evaluate_workers, some, round, fine_tune):
                tested |= part
        return tested

    def train_loss(self, samples: Sequence[int]) -> float:
        """Mean training loss per sample of the last round.

        Args:
            samples: the number that each member of the cohort saw. Members without samples do not count.
        """
        losses, weights = self._backend.train_losses(), torch.tensor(samples, dtype=torch.double)
        counted = weights > 0
        return float(weights[counted] @ losses[: len(weights)][counted] / weights.sum())

    def state(self) -> Snapshot:
        """All that the next round depends on; it begins by pulling down, so this does not include rows."""
        rule, has_last = self._backend.run(Executor.rule_state)[0]
        state = Snapshot(facts={"has_last": has_last, "syncs": list(self.shared.states)})
        state.keep(self._backend.state_dict())
        state.keep({name: torch.from_numpy(array) for name, array in rule.items()}, "rule.")
        state.keep(self.worker_states.tensors(), "worker_state.")
        return state

    def resume(self, state: Snapshot) -> None:
        """Continue from a state of the same task. Raises RecordError or ValueError if it is of another task."""
        syncs, has_last = state.facts["syncs"], state.facts["has_last"]
        if type(has_last) is not bool or syncs not in (list(self.shared.states), ["gradients"]):
            raise ValueError("is of another run")
        later = tuple(f"{sync}." for sync in self.shared.states if sync not in syncs)
        self._backend.restore(state, later)
        self.worker_states.resume(state.under("worker_state."))
        arrays = {name: tensor.numpy() for name, tensor in state.under("rule.").items()}
        self._backend.run(Executor.restore_rule, arrays, has_last)
        if later:  # the run ended with the last round of gradients, and now has more rounds
            self._backend.run(Executor.begin_with_parameters)

    def broadcast(self, value: Any) -> Any:
        """A picklable object of the process that writes the records, in all programs of the run."""
        return value

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """The rows after the last aggregation and the losses before training, by slot; None unless `is_main`."""
        return self._backend.round_rows(cohort, round)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _slots_of_others(cohort: Sequence[int], excluded: Sequence[int]) -> list[int]:
    """The slots of the cohort without the excluded workers."""
    dropped = set(excluded)
    return [slot for slot, worker in enumerate(cohort) if worker not in dropped]
