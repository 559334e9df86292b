"""What asynchronous workers share: the global row and its version, and whatever a policy remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import ServerStep, column_blocks
from fedsim.aggregation.averaging import mean
from fedsim.asynchronous.policy import Policy
from fedsim.asynchronous.sparse import Tables, step_where_touched
from fedsim.engines.job import BufferPolicy, Memory, NonFinite, Task
from fedsim.local import Solver, State
from fedsim.rows import new_rows
from fedsim.system.sharing import share


class AsGradient:
    """The local solver of workers that bring a gradient: the row becomes the gradient at where it was."""

    single_steps: ClassVar = True  # workers take one step at a time

    def start(self, rows: Tensor) -> State:
        return {}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        rows.copy_(gradients)


@dataclass
class Server:
    """The state of an asynchronous run, with the few operations on it of which policies are made.

    All of it are tensors, in shared memory where processes race; rows and buffers are those of the engine's Memory.

    Attributes:
        policy, solver, optimizer: who decides; what steps along gradients; what steps along updates.
        memory: `global_row` [d], `rows` [n, d] and the buffers are used of it.
        replicas: [n, d], the model of each worker beside its row, where the policy asks for that; else [0, d].
        shared, private: the solver's state for the global row, [d], and for each worker, [n, d].
        remembered: what the policy keeps.
        seed: of the experiment, for what a policy draws.
        buffers, nonfinite: what becomes of workers' buffers, and of work that holds NaN or infinity.
        step_seconds: float64 [n], on the host: how long each worker takes for a step, as far as that is known.
        counts: int64 [1 + 3 n], on the host: the version; and of each slot the version that its model is of, how many
            pieces of work it has begun, and whether it is alive.
        tables: the parameters of which a step is to touch no more than the rows that a gradient has.
    """

    policy: Policy
    solver: Solver
    optimizer: ServerStep
    memory: Memory
    seed: int
    buffers: BufferPolicy
    nonfinite: NonFinite
    replicas: Tensor
    shared: State
    private: State
    counts: Tensor
    step_seconds: Tensor
    remembered: State = field(default_factory=dict)
    tables: Tables = ()

    @classmethod
    def of(cls, policy: Policy, solver: Solver, task: Task, memory: Memory) -> Server:
        """A server at the start of a run, over an engine's memory."""
        n, d = len(memory.rows), len(memory.global_row)
        counts = torch.zeros(1 + 3 * n, dtype=torch.int64)
        counts[1 : 1 + n] = -1
        counts[1 + 2 * n :] = 1
        replicas = new_rows(n if policy.replicas else 0, d, task.dtype, task.device)
        replicas.copy_(memory.global_row.expand(len(replicas), -1))
        memory.buffers[:] = memory.global_buffers
        server = cls(
            policy=policy,
            solver=solver,
            optimizer=task.server,
            memory=memory,
            seed=task.seed,
            buffers=task.buffers,
            nonfinite=task.nonfinite,
            replicas=replicas,
            shared=solver.start(memory.global_row) if "shared" in policy.moments else {},
            private=solver.start(memory.rows) if "private" in policy.moments else {},
            counts=counts,
            step_seconds=torch.ones(n, dtype=torch.double),
        )
        server.remembered = policy.start(server)
        return server

    def __post_init__(self) -> None:
        n, counts = len(self.memory.rows), self.counts.numpy()
        self.n = n
        self.rows, self.global_row = list(self.memory.rows), self.memory.global_row
        self.models = list(self.replicas) or self.rows  # with which work begins
        self._version, self.read = counts[:1], counts[1 : 1 + n]
        self.units, self.living = counts[1 + n : 1 + 2 * n], counts[1 + 2 * n :]
        self.has_buffers = self.memory.global_buffers.numel() > 0

    def share(self) -> None:
        """Move what lies on the host to memory that other processes can map, in place.

        Raises ExperimentError where there is not enough of it.
        """
        share(self.own_tensors.values())
        self.__post_init__()  # what looks at the counts has to look at them where they are now

    def __getstate__(self) -> dict[str, Any]:
        """What travels to other processes: all but the engine's memory, which they have, and views."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "memory"}

    def settle(self, memory: Memory) -> None:
        """In another process: go to work on the same memory as there."""
        self.memory = memory
        self.__post_init__()

    @property
    def version(self) -> int:
        """How many updates the global row has had."""
        return int(self._version[0])

    @version.setter
    def version(self, version: int) -> None:
        self._version[0] = version

    def check(self) -> None:
        """Raise ValueError where the counts are none that a server can have."""
        version, read = self.version, self.read
        if version < 0 or read.min() < -1 or read.max() > version or self.units.min() < 0:
            raise ValueError("its counts are none of a server")
        if not np.isin(self.living, (0, 1)).all() or not (self.step_seconds > 0).all():
            raise ValueError("its counts are none of a server")

    @property
    def alive(self) -> np.ndarray:
        """The slots of workers that have not left."""
        return np.flatnonzero(self.living)

    def come_back(self) -> None:
        """All workers are alive again who had left."""
        if not self.living.all():
            self.living[:] = 1
            self.policy.left(self)

    def pull(self, slot: int) -> None:
        """A worker gets the global model, or what the server optimizer sends for it, to begin its next work with."""
        self.models[slot].copy_(self.optimizer.broadcast(self.global_row, self.memory.states["parameters"]))
        if self.has_buffers and self.buffers == "average":
            self.memory.buffers[slot] = self.memory.global_buffers
        self.read[slot] = self._version[0]

    def stay(self, slot: int) -> None:
        """A worker goes on with the model that it has, which at first is the global one."""
        if self.read[slot] < 0:
            self.read[slot] = self._version[0]

    def begin(self, slot: int, worker: int) -> None:
        """A worker in this slot sets out from its model: its row is a copy, whatever becomes of the model meanwhile."""
        if self.models is not self.rows:
            self.rows[slot].copy_(self.models[slot])
        if self.has_buffers and self.buffers == "local":
            self.memory.buffers[slot] = self.memory.own_buffers[worker]
        elif self.has_buffers and self.buffers == "server":
            self.memory.buffers[slot] = self.memory.global_buffers

    def end(self, slot: int, worker: int) -> None:
        """A worker has ended its work in this slot."""
        if self.has_buffers and self.buffers == "local":
            self.memory.own_buffers[worker] = self.memory.buffers[slot]

    def staleness(self, slot: int) -> int:
        """How many updates the global row has had since a worker last read it."""
        return int(self._version[0] - self.read[slot])

    def step(self, gradient: Tensor, slot: int | None = None) -> None:
        """One step of the solver along a gradient [d], which it may change; with a worker's own state, if one is named.

        That is a new version.
        """
        state = self.shared if slot is None else {name: tensor[slot] for name, tensor in self.private.items()}
        if self.tables:
            step_where_touched(self.solver, self.global_row, gradient, self.tables)
        else:
            self.solver.step(self.global_row, gradient, state)
        self.moved()

    def step_replica(self, slot: int, gradient: Tensor) -> None:
        """One step of a worker's own model along a gradient [d], which it may change, with the worker's own state."""
        state = {name: tensor[slot] for name, tensor in self.private.items()}
        self.solver.step(self.replicas[slot], gradient, state)

    def update(self, update: Tensor) -> None:
        """One step of the server optimizer along an update [d]. That is a new version."""
        self.optimizer.step(self.global_row, update, self.memory.states["parameters"])
        self.moved()

    def moved(self) -> None:
        """The global row has moved: that is a new version of it."""
        self._version[0] += 1

    def mean(self, slots: Sequence[int]) -> Tensor:
        """The mean [d] of these workers' rows, in ascending order: to the bit what the rule `mean` makes of them."""
        slots = sorted(slots)
        rows = self.memory.rows if slots == list(range(self.n)) else self.memory.rows[slots]
        blocks = column_blocks(rows.shape[1], n=len(rows), device=rows.device)  # as engines cut them
        return torch.cat([mean(rows[:, block]) for block in blocks])

    def delta(self, slot: int) -> Tensor:
        """How far local training has moved a worker's row [d], in float64.

        So a row of float32 can be put together again, to the bit, from where it began and this.
        """
        return self.rows[slot].to(self.memory.buffers.dtype) - self.replicas[slot]

    def mix_buffers(self, slots: Sequence[int], share: float | None = None) -> None:
        """Move the server's buffers towards the mean of these workers', by a share; by default their part of all."""
        if not self.has_buffers:
            return
        share = min(1.0, len(slots) / len(self.alive)) if share is None else share
        self.move_buffers(self.memory.buffers[list(slots)].mean(0), share)

    def move_buffers(self, target: Tensor, share: float) -> None:
        """Move the server's buffers towards `target` by a share, unless the policy `buffers` is "server"."""
        if self.has_buffers and self.buffers != "server":
            self.memory.global_buffers.lerp_(target, share)

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What lies beside the engine's Memory, and in shared memory where processes race; by name."""
        own = {"replicas": self.replicas, "counts": self.counts, "step_seconds": self.step_seconds}
        states = {"shared": self.shared, "private": self.private, "remembered": self.remembered}
        return own | {f"{of}.{name}": tensor for of, state in states.items() for name, tensor in state.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that a server goes by between two pieces of work, beyond what engines keep from round to round anyway.

        The rows of work that is under way, and what it came to where that has been computed, among it.
        """
        memory = self.memory
        under_way = {"rows": memory.rows, "buffers": memory.buffers, "train_loss": memory.train_loss}
        return {**under_way, **{f"server.{name}": tensor for name, tensor in self.own_tensors.items()}}
