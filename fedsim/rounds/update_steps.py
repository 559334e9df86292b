"""Steps between local training and aggregation, which change the updates that the workers send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import Gram, screened
from fedsim.aggregation.numerics.columns import NonfiniteError, reading
from fedsim.processes.team import Team
from fedsim.processing.processors import apply_chain, draws_of_all
from fedsim.records.round_stats import SentUpdates
from fedsim.rounds.aggregator import Aggregator
from fedsim.system.devices import to_device
from fedsim.training.batches import WorkItems
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext, spoil

# Function that changes updates in place, and returns whether they must be checked again for NaN and infinity. Its
# arguments are the workers whose updates are aggregated, the workers that this process trains, and an object that
# receives the sizes of the updates.
UpdateStep = Callable[[AggregationContext, WorkItems, SentUpdates], bool]


class AttackedRows:
    """Updates of all workers, for an attack that tries several values of the Byzantine updates.

    Args:
        rows: updates of all workers of the round, [n, d].
        honest: positions of the h honest workers in `rows`.
        attackers: for each worker, whether it is Byzantine, in the order of `rows`.

    Attributes:
        honest: updates of the honest workers, [h, d].
    """

    def __init__(self, rows: Tensor, honest: Tensor, attackers: Sequence[bool]) -> None:
        self._attackers, h = torch.tensor(attackers), len(honest)
        self._distinct = rows.new_empty(len(attackers), rows.shape[1])  # the honest rows, then the Byzantine rows
        self.honest = torch.index_select(rows, 0, honest, out=self._distinct[:h])
        self._of_honest: Gram | None = None

    def gram(self, byzantine: Tensor) -> Gram:
        """Return the inner products of all workers' updates, if the Byzantine workers send `byzantine`.

        Args:
            byzantine: one update for each of b Byzantine workers, [b, d], or a single update [d] that all of them send.
        """
        n, h = len(self._attackers), len(self.honest)
        added = 1 if byzantine.ndim == 1 else n - h
        distinct = self._distinct[: h + added]
        distinct[h:] = byzantine
        self._of_honest = self._of_honest or Gram(self.honest)
        index = torch.where(self._attackers, h, self._attackers.logical_not().cumsum(0) - 1)
        if added > 1:
            index += torch.where(self._attackers, self._attackers.cumsum(0) - 1, 0)
        return self._of_honest.extended(distinct).mixed(torch.eye(len(distinct), dtype=torch.double)[index])


class AttackStep:
    """Step that replaces the Byzantine workers' updates by those that the attack computes.

    If the attack needs honest updates and there are none, nothing changes.

    Args:
        team: processes that compute together. All processes must call the step at the same time.
        task: run to compute.
        shared: tensors of the run.
        aggregator: aggregator of the updates, with which some attacks try out several Byzantine updates.

    Attributes:
        state: state that the attack returned in the previous aggregation.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState, aggregator: Aggregator) -> None:
        self._team, self._task, self._shared, self._aggregator = team, task, shared, aggregator
        self.state: dict[str, Tensor] = {}

    def __call__(self, context: AggregationContext, mine: WorkItems | None, sent: SentUpdates) -> bool:
        task, shared, team, updates = self._task, self._shared, self._team, self._aggregator.updates
        if not (workers := task.byzantine.in_round(context.moment[0])):
            return False
        attackers = [worker in workers for worker in context.workers]
        byzantine = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if attacks]
        if not byzantine or (all(attackers) and task.experiment.attack.component.needs_honest):
            return False  # without honest rows, the Byzantine workers send their trained rows
        updates.read_losses(context)
        rows = updates.gathered(context.slots)
        with team.at_first():
            if team.index == 0:
                self._write_byzantine(context, attackers, rows)
        own_rows, values = team.return_rows(rows, byzantine)
        index = to_device(torch.tensor(own_rows, dtype=torch.int64), task.device)
        for message in shared.cohort.messages.values():  # an attack does not replace messages
            spoil(task, values, message[index])
        shared.cohort.rows[index] = values
        updates.replaced(own_rows, values)
        team.barrier()
        return False

    def _write_byzantine(self, context: AggregationContext, attackers: list[bool], rows: Tensor) -> None:
        """Compute the updates that the Byzantine workers send, and write them to `rows`.

        Args:
            context: workers of this aggregation.
            attackers: for each worker of `context`, whether it is Byzantine.
            rows: updates of all workers, changed in place.
        """
        task, aggregator, rule = self._task, self._aggregator, self._aggregator.rule
        slots, of_attackers = torch.tensor(context.slots), torch.tensor(attackers)
        index = to_device(slots[of_attackers], task.device)
        attacked = AttackedRows(rows, to_device(slots[~of_attackers], task.device), attackers)

        def aggregate(byzantine: Tensor) -> Tensor:
            rows[index] = byzantine
            if aggregator.updates.rule_checks and rule.accepts("gram"):
                with contextlib.suppress(NonfiniteError), reading():
                    inputs = aggregator.inputs(context, rows)
                    inputs.gram = attacked.gram(byzantine)
                    return rule(inputs).update
            inputs, bad = screened(aggregator.inputs(context, rows), "exclude")
            if not bad and rule.accepts("gram"):
                inputs.gram = attacked.gram(byzantine)
            return rule(inputs).update

        byzantine, self.state = task.experiment.attack.component(
            attacked.honest,
            rows[index],
            seed=task.experiment.seed,
            moment=context.moment,
            last=aggregator.server.last,
            aggregate=aggregate,
            workers=[worker for worker, attacks in zip(context.workers, attackers, strict=True) if not attacks],
            state=self.state,
        )
        unsent = task.unsent_columns(context.moment[0], rows.shape[1])
        if unsent.width:  # attackers send the same parameters as honest workers
            byzantine = byzantine.clone()
            unsent.write(byzantine, byzantine.new_zeros(unsent.width))
        rows[index] = byzantine


class ProcessingStep:
    """Step that applies compressors and other update processors to the updates, and counts the bytes that are sent.

    Args:
        team: processes that compute together. Each process handles the updates of its own workers.
        task: run to compute.
        shared: tensors of the run.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState) -> None:
        self._team, self._task, self._shared = team, task, shared

    def __call__(self, context: AggregationContext, mine: WorkItems, sent: SentUpdates) -> bool:
        task, rows, round = self._task, self._shared.cohort.rows, context.moment[0]
        fragment = task.fragment_sent(round)
        if not task.experiment.chain:
            sent.add(context.workers, fragment.columns.width * rows.itemsize)
            return False
        exempt = task.byzantine.in_round(round) if task.attackers_skip_chain else ()
        is_whole = fragment.columns.width == rows.shape[1]
        members, chain, seed = mine[np.isin(mine.workers, context.workers)], task.experiment.chain, task.experiment.seed
        coordinates = [(*context.moment, worker) for worker in members.workers.tolist()]
        draws = draws_of_all(chain, seed, coordinates, task.device)
        for member, coordinate, of_member in zip(members, coordinates, draws, strict=True):
            metrics: dict[str, Any] = {}
            if member.worker in exempt:
                sent.add([member.worker], fragment.columns.width * rows.itemsize)
                continue
            with self._team.process.working_on(member.worker, round):
                row = rows[member.slot] if is_whole else fragment.columns.of(rows[member.slot])
                kept = fragment.states_of(self._shared.cohort.chain_states)
                states = {name: values[member.slot] for name, values in kept.items()}
                nbytes = apply_chain(
                    chain, row, coordinate, metrics, states, fragment.shapes, seed=seed, draws=of_member
                )
                if task.experiment.nonfinite != "keep":
                    for state in states.values():  # NaN that stays in a residual would enter later updates
                        row += (state * 0).sum()
                if not is_whole:
                    fragment.columns.write(rows[member.slot], row)
            sent.add([member.worker], nbytes, metrics)
        return True
