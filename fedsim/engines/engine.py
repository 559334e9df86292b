"""What an engine is: a backend (where rows are trained) and trainers (how they are trained), put together.

The methods of `Engine` are the lines of a round. Each calls the method of `Executor` with the same name in every
process of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.core.snapshot import Snapshot
from fedsim.engines.backend import Backend
from fedsim.engines.executor import Executor, MakeTrainer
from fedsim.engines.round_stats import AggregationStats, SentUpdates
from fedsim.engines.task import SharedState, TaskSpec, message_bytes
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.worker_states import WorkerStates
from fedsim.system.devices import default_processes, resolve_device

# Top-level keys of an experiment that only some engines use; see `Engine.settings`.
SETTINGS = frozenset(
    ("processes", "timeout", "on_worker_failure", "worker_retries", "batched", "cuda_graphs", "distributed")
)


Trainers = Callable[[TaskSpec, SharedState, int, int], tuple[MakeTrainer, dict[str, Any]]]


class Engine:
    """Trains cohorts of rows. Made once, then given one task after another; a context manager that cleans up.

    Args:
        backend: where rows are trained.
        trainers: how they are trained: of (task, shared state, processes, threads) it gives the function that makes the
            trainer of a process, and facts for the run record.
        threads: threads that PyTorch uses in each process.
    """

    one_process: ClassVar[bool] = False  # whether it is always one
    racing: ClassVar[str | None] = None  # the engine whose processes race, where this one is named; None: it cannot
    stacks: ClassVar[bool] = False  # whether it may stack rows, and so asks for the width of stacks
    ranks: ClassVar[bool] = False  # whether it is one of several programs that a launcher has started
    chooses: ClassVar[bool] = False  # whether it does a task in the way of another, which it picks

    @classmethod
    def leads(cls) -> bool:
        """Whether this process is the one of a run that prints and writes."""
        return True

    @classmethod
    def among_peers(cls, description: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """While a run is prepared and done: what has to be settled with other programs, if it is one of several.

        `description` is the resolved experiment.
        """
        return nullcontext()

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        """The device that this process computes on, where the experiment names this one."""
        return resolve_device(name)

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        """How many processes are good for a cohort, where the experiment leaves that open."""
        return default_processes(device, cohort, threads)

    @classmethod
    def may_lose_processes(cls, most: int) -> bool:
        """Whether `can_lose_processes` may be so, on any machine, where it has `most` processes at most."""
        return not (cls.one_process or cls.ranks)

    @classmethod
    def settings(cls, most: int) -> set[str]:
        """Which of SETTINGS this engine uses, if it has at most `most` processes."""
        settings = set() if cls.one_process or cls.ranks else {"processes"}
        settings |= {"batched"} if cls.stacks else set()
        settings |= {"timeout", "on_worker_failure", "worker_retries"} if cls.may_lose_processes(most) else set()
        return settings

    def __init__(self, backend: Backend, trainers: Trainers, threads: int) -> None:
        self._backend, self._trainers, self._threads = backend, trainers, threads
        self._trainer_facts: dict[str, Any] = {}
        self._has_processors = False
        self._worker_states: WorkerStates | None = None

    @property
    def shared(self) -> SharedState:
        """The tensors that all processes work on, while there is a task."""
        return self._backend.shared

    def allocate(self, task: TaskSpec, cohort: int, *data: Any) -> SharedState:
        """The state of a task; `data` as in `SharedState.allocate`."""
        return SharedState.allocate(task, cohort, *data)

    def begin(self, task: TaskSpec, shared: SharedState) -> None:
        """Take on a task; the one before is left. Raises ExperimentError where the engine cannot do it."""
        self._has_processors = bool(task.processors)
        make_trainer, self._trainer_facts = self._trainers(task, shared, self._backend.processes, self._threads)
        self._backend.begin(task, shared, make_trainer)
        self._task, self._worker_states = task, self._new_worker_states(task, shared)

    def _new_worker_states(self, task: TaskSpec, shared: SharedState) -> WorkerStates:
        return WorkerStates.of(task, shared)

    @property
    def worker_states(self) -> WorkerStates:
        """What workers keep between their rounds, while there is a task."""
        assert self._worker_states is not None
        return self._worker_states

    @property
    def at_work(self) -> bool:
        """Whether it can take on a task: not after it was closed, nor after it has lost its processes."""
        return self._backend.at_work

    @property
    def can_lose_processes(self) -> bool:
        """Whether its processes may end while this one goes on; see ProcessLostError."""
        return self._backend.can_lose_processes

    def replace_processes(self) -> None:
        """Restart all processes on the current task and state. Raises WorkerError where that fails."""
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
        """Give every member of the cohort the global model, and what it keeps from its rounds; the bytes sent."""
        self.worker_states.load_cohort(cohort, self.shared.worker_rows)
        received = message_bytes(self._task, self.shared)[0]
        return self._backend.run(Executor.pull_down, cohort, round)[0] + len(cohort) * received

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train every member of the cohort on its shard. The rows hold the members' updates afterwards."""
        self._backend.run(Executor.train, cohort, round)

    def attack(self, cohort: Sequence[int], round: int) -> None:
        """Replace the updates of the Byzantine members of the cohort."""
        self._backend.run(Executor.attack, cohort, round)

    def process_updates(self, cohort: Sequence[int], round: int) -> SentUpdates:
        """Apply the processors to the updates of the cohort."""
        if not self._has_processors:
            return SentUpdates(len(cohort), len(cohort) * self.shared.global_row.nbytes)
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
        return self._backend.run(Executor.combine_buffers, cohort, round, excluded)[0]

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Run a round of synchronous SGD: the cohort's gradients are aggregated at every step."""
        stats = self._backend.run(Executor.train_on_averaged_gradients, cohort, round)
        return replace(stats[0], sent=SentUpdates.total(each.sent for each in stats))

    def receive(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> int:
        """Store what the workers keep, and give the server their messages; the bytes of these.

        The state and the messages of the excluded workers are dropped.
        """
        left_out = set(excluded)
        slots = [slot for slot, worker in enumerate(cohort) if worker not in left_out]
        self.worker_states.save([cohort[slot] for slot in slots], self.shared.worker_rows, slots)
        if self.shared.messages:
            sums = self.worker_states.sums(self.shared.messages, slots)
            self._task.solver.receive(self.shared.server_state, sums, len(slots), len(self.shared.shards))
        return len(cohort) * message_bytes(self._task, self.shared)[1]

    def train_apart(self, members: Sequence[WorkItem]) -> None:
        """Train rows from their present values, each for a round or for one step."""
        self._backend.run(Executor.train_apart, members)

    def test(self, round: int) -> tuple[float, float, float | None]:
        """Loss and accuracy of the global model on the test data, and the success rate of an attack that has a goal.

        What a model draws in evaluation mode depends on the seed, the round and the test batch.
        """
        self._backend.run(Executor.test, round)
        loss_sum, correct, successes, tries = self.shared.test_sums.sum(0).tolist()
        samples = len(self.shared.test)
        return loss_sum / samples, correct / samples, successes / tries if tries else None

    def train_loss(self, samples: Sequence[int]) -> float:
        """Mean training loss per sample of the last round; `samples` are what each member of the cohort saw.

        A member with 0 samples does not count, whatever its loss is; NaN if nobody counts.
        """
        return mean_loss(self.shared.train_loss, samples)

    def state(self) -> Snapshot:
        """What the next round depends on; nothing of that is in the rows, which it begins by pulling down."""
        rule, has_last = self._backend.run(Executor.remembered)[0]
        state = Snapshot(facts={"has_last": has_last, "syncs": list(self.shared.states)})
        state.keep(self._lasting())
        state.keep({name: torch.from_numpy(array) for name, array in rule.items()}, "rule.")
        state.keep(self.worker_states.tensors(), "worker_state.")
        return state

    def resume(self, state: Snapshot) -> None:
        """Go back, or on, to where an engine was with the same task. Raises RecordError where it was another."""
        lasting, begun, has_last = self._lasting(), state.facts["syncs"], state.facts["has_last"]
        if type(has_last) is not bool or begun not in (list(self.shared.states), ["gradients"]):
            raise ValueError("is of another run")
        yet_to_come = tuple(f"{sync}." for sync in self.shared.states if sync not in begun)
        state.put_back({name: tensor for name, tensor in lasting.items() if not name.startswith(yet_to_come)})
        self.worker_states.resume(state.under("worker_state."))
        self._remember(lasting, state.under("rule."), has_last)
        if yet_to_come:  # it ended with the last round of gradients, and now there are more rounds
            self._backend.run(Executor.begin_with_parameters)

    def _remember(self, lasting: dict[str, Tensor], rule: dict[str, Tensor], has_last: bool) -> None:
        arrays = {name: tensor.numpy() for name, tensor in rule.items()}
        self._backend.run(Executor.remember, arrays, has_last)

    def _lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, by name and whole."""
        return self.shared.lasting

    def spread(self, found: tuple[int, Snapshot] | None) -> tuple[int, Snapshot] | None:
        """What the process that keeps the records has found in them, in all processes of the run."""
        return found

    def broadcast(self, value: Any) -> Any:
        """A small object that pickles, as the process that keeps the records has it, in all processes of the run."""
        return value

    def agree(self, due: bool) -> bool:
        """What the process that keeps the records has decided, in all processes of the run."""
        return due

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """The rows by slot as the last aggregation left them, and the losses; None in a process that writes nothing."""
        return self.shared.rows, self.shared.losses

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mean_loss(losses: Tensor, samples: Sequence[int]) -> float:
    """The mean of losses [n] per sample, where the first of them are of so many samples each."""
    weights = torch.tensor(samples, dtype=torch.double)
    counted = weights > 0
    return float(weights[counted] @ losses[: len(weights)][counted] / weights.sum())
