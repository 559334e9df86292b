"""What an engine is: a number of processes that share one Memory and run the same Station code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.engines.averaging import Account
from fedsim.engines.feed import Member
from fedsim.engines.job import Memory, Task
from fedsim.errors import WorkerError
from fedsim.snapshot import Snapshot
from fedsim.system.devices import default_processes, resolve_device

# Top-level keys of an experiment that only some engines use; see `Engine.settings`.
SETTINGS = frozenset(
    ("processes", "timeout", "on_worker_failure", "worker_retries", "batched", "cuda_graphs", "distributed")
)


class Engine(ABC):
    """Trains cohorts of rows. Made once, then given one task after another; a context manager that cleans up.

    Args:
        processes: how many processes work.
        threads: threads that PyTorch uses in each.
        timeout: seconds without a sign of life after which a process counts as hanging.
    """

    one_process: ClassVar[bool] = False  # whether it is always one
    racing: ClassVar[str | None] = None  # the engine whose processes race, where this one is named; None: it cannot
    stacks: ClassVar[bool] = False  # whether it may stack rows, and so asks for the width of stacks
    ranks: ClassVar[bool] = False  # whether it is one of several programs that a launcher has started
    chooses: ClassVar[bool] = False  # whether it does a task in the way of another, which it picks
    memory: Memory

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

    @abstractmethod
    def __init__(self, processes: int, threads: int, timeout: float) -> None: ...

    def allocate(self, task: Task, cohort: int, *data: Any) -> Memory:
        """The memory of a task; `data` as in `Memory.allocate`."""
        return Memory.allocate(task, cohort, *data)

    @abstractmethod
    def begin(self, task: Task, memory: Memory) -> None:
        """Take on a task; the one before is left. Raises ExperimentError where the engine cannot do it."""

    @property
    def at_work(self) -> bool:
        """Whether it can take on a task: not after it was closed, or has lost its processes to a failure."""
        return True

    @property
    def can_lose_processes(self) -> bool:
        """Whether processes train for it that may end while this one goes on (see ProcessLostError)."""
        return False

    def replace_processes(self) -> None:
        """Start all its processes anew, after one was lost, on the task and the memory in hand, as that is.

        Raises WorkerError where that fails.
        """
        raise WorkerError(f"{type(self).__name__} has no processes that could be replaced")

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """For the run record: how the task in hand is computed, `processes` among it."""

    def compiled(self) -> bool | str:
        """Whether the task in hand is trained by compiled code; if not, though it should be, the reason."""
        refusals = [refusal for refusal in self._each("compilation") if refusal is not None]
        return refusals[0] if refusals else True

    def replayed(self) -> bool | str:
        """Whether the steps of the task in hand are captured and replayed; if not, the reason."""
        refusals = [refusal for refusal in self._each("replay_refusal") if refusal is not None]
        return refusals[0] if refusals else True

    @abstractmethod
    def leave(self) -> None:
        """Let go of the task and its memory, in every process; without a task there is nothing to do."""

    @abstractmethod
    def _each(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every process's Station; the results in their order. Raises WorkerError if one fails."""

    @abstractmethod
    def close(self) -> None:
        """End the processes, if there are any."""

    def pull_down(self, cohort: Sequence[int], round: int) -> None:
        """Every member of the cohort gets the global model."""
        self._each("pull_down", cohort, round)

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Every member of the cohort trains its row on its shard."""
        self._each("train", cohort, round)

    def train_apart(self, members: Sequence[Member]) -> None:
        """Train rows from what they hold, each for a round or a step of its worker's own."""
        self._each("train_apart", members)

    def aggregate(self, cohort: Sequence[int], round: int) -> Account:
        """The global row moves along the aggregate of the cohort's updates."""
        return self._each("aggregate", cohort, round)[0]

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> Account:
        """One round of synchronous SGD: the cohort's gradients are aggregated at every step."""
        return self._each("train_on_averaged_gradients", cohort, round)[0]

    def test(self, round: int) -> tuple[float, float, float | None]:
        """Loss and accuracy of the global model on the test data, and the success rate of an attack that has a goal.

        What a model draws in evaluation mode depends on the seed, the round and the test batch.
        """
        self._each("test", round)
        loss_sum, correct, successes, tries = self.memory.test_sums.sum(0).tolist()
        samples = len(self.memory.test)
        return loss_sum / samples, correct / samples, successes / tries if tries else None

    def train_loss(self, samples: Sequence[int]) -> float:
        """Mean training loss per sample of the last round; `samples` are what each member of the cohort saw.

        A member with 0 samples does not count, whatever its loss is; NaN if nobody counts.
        """
        return mean_loss(self.memory.train_loss, samples)

    def state(self) -> Snapshot:
        """What the next round depends on; nothing of that is in the rows, which it begins by pulling down."""
        rule, has_last = self._each("remembered")[0]
        state = Snapshot(facts={"has_last": has_last, "syncs": list(self.memory.states)})
        state.keep(self._lasting())
        state.keep({name: torch.from_numpy(array) for name, array in rule.items()}, "rule.")
        return state

    def resume(self, state: Snapshot) -> None:
        """Go back, or on, to where an engine was with the same task. Raises RecordError where it was another."""
        lasting, begun, has_last = self._lasting(), state.facts["syncs"], state.facts["has_last"]
        if type(has_last) is not bool or begun not in (list(self.memory.states), ["gradients"]):
            raise ValueError("is of another run")
        yet_to_come = tuple(f"{sync}." for sync in self.memory.states if sync not in begun)
        state.put_back({name: tensor for name, tensor in lasting.items() if not name.startswith(yet_to_come)})
        self._remember(lasting, state.under("rule."), has_last)
        if yet_to_come:  # it ended with the last round of gradients, and now there are more rounds
            self._each("begin_with_parameters")

    def _remember(self, lasting: dict[str, Tensor], rule: dict[str, Tensor], has_last: bool) -> None:
        self._each("remember", {name: tensor.numpy() for name, tensor in rule.items()}, has_last)

    def _lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, by name and whole."""
        return self.memory.lasting

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
        return self.memory.rows, self.memory.losses

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mean_loss(losses: Tensor, samples: Sequence[int]) -> float:
    """The mean of losses [n] per sample, where the first of them are of so many samples each."""
    weights = torch.tensor(samples, dtype=torch.double)
    counted = weights > 0
    return float(weights[counted] @ losses[: len(weights)][counted] / weights.sum())
