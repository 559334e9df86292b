"""The aggregation rule and the attack of an asynchronous run.

A vector is what a worker sends: a gradient, or its trained model minus its start model. The rule combines

    the k vectors that a policy has collected, such as the buffer of `fedbuff`
    a single vector that arrives, if the policy uses each vector alone. The rule then is a filter, and may reject it
    on a graph, the differences x_j - x_i of worker i to its neighbours' models, and 0 for its own model

An attack on updates replaces a Byzantine worker's vector when it arrives. On a graph, it replaces the differences that
a worker receives from its Byzantine neighbours, so that they may send a different model to each neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Pipeline
from fedsim.aggregation.numerics.columns import bad_rows
from fedsim.aggregation.pipeline import AggregationResult
from fedsim.asynchronous.policies.policy import Policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.asynchronous.round_stats import RoundStats
from fedsim.clients import State
from fedsim.core.rows import index_of, new_rows
from fedsim.core.snapshot import Snapshot
from fedsim.errors import DivergedError, ExperimentError, plural
from fedsim.training.task import RunTask
from fedsim.training.weights import screen

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

SERVER = -1  # place of the server among those that combine vectors; on a graph, places are the workers' slots


def inputs_of_combination(
    experiment: Experiment,
    rule: Pipeline,
    moment: tuple[int, ...],
    updates: Tensor,
    workers: Sequence[int],
    weights: Tensor | None = None,
    **more: Any,
) -> AggregationInputs:
    """Return the inputs of `rule` in an asynchronous run, for the run itself and for `fedsim replay`.

    Args:
        experiment: experiment of the run.
        rule: rule of the experiment, or another one that is applied to the same vectors.
        moment: key for random numbers.
        updates: vectors, [k, d].
        workers: IDs of the workers that have sent them.
        weights: weights of the vectors, [k], for a rule that accepts weights. None: equal weights.
        more: further inputs by name.
    """
    if not rule.accepts_weights:
        weights = None
    elif weights is None and rule.needs_weights:
        weights = torch.ones(len(updates), dtype=torch.double)
    return AggregationInputs(
        updates=updates,
        weights=weights,
        workers=list(workers),
        seed=experiment.seed,
        moment=moment,
        local_lr=experiment.local_lr,
        sync="gradients" if experiment.sends_gradients else "parameters",
        **more,
    )


class Combination:
    """Applies the aggregation rule and the attack of an asynchronous run.

    Args:
        task: description of the run.
        n: number of workers that train at the same time.
        d: number of parameters of the model.

    Attributes:
        by_rule: whether the rule combines vectors; false if it is a mean whose inputs and results are not used
            elsewhere, so that the policy's own average is used, which may keep only a sum.
        filters: whether the rule is applied to each single vector that arrives.
        attacks: whether Byzantine workers send other vectors than those that they have computed.
        tensors: tensors by name that are shared by all processes of a race, and saved in checkpoints.
        recorded: copies of the inputs of the latest combination in a round of `records.updates`, for `fedsim replay`.
            On a graph, only honest workers count.
        stats: statistics of the current round.
    """

    stats: RoundStats

    def __init__(self, task: RunTask, n: int, d: int) -> None:
        experiment = task.experiment
        policy, attack, self._rule = experiment.policy.component, experiment.attack.component, experiment.rule
        self._task, self._on_graph, self._attack = task, policy.uses_topology, attack
        self._pools = type(policy).sender is not Policy.sender  # a vector is that of several workers
        self.by_rule = not self._rule.is_mean or bool(experiment.records.updates) or task.keeps_last
        self.filters = self.by_rule and not self._on_graph and policy.sizes(n) == (1,)
        self.attacks = bool(task.byzantine) and attack.alters_rows
        self._remembers = self.attacks and not self._on_graph and not attack.row_by_row
        self._most_known = n if experiment.attack.knows == "latest" else policy.sizes(n)[-1]
        places, width = n if self._on_graph else 1, d if task.keeps_last else 0
        self.tensors = {
            "last": new_rows(places, width, task.dtype, task.device),
            "has_last": torch.zeros(places, dtype=torch.int64),
            "received": new_rows(n if self._remembers else 0, d, task.dtype, task.device),  # by slot
            "received_from": torch.full((n,), -1),  # worker that sent it
            "received_at": torch.zeros(n, dtype=torch.int64),  # number of updates of the global model at its arrival
        }
        self._rules: dict[int, Pipeline] = {}  # on a graph, by f
        self._f_in_round: tuple[int, list[int]] = 0, []  # a round, and f of each worker on a graph
        self._states: dict[tuple[str, int], State] = {}  # of the rule and of the attack, by place
        self.recorded: dict[str, Tensor] = {}

    @property
    def needs_start_models(self) -> bool:
        """Whether the models from which the workers start are needed."""
        by_model = self._task.experiment.policy.component.work == "model"
        return (by_model and (self.attacks or self.filters)) or self._rule.accepts("models")

    def attackers(self, round: int) -> frozenset[int]:
        """Return the IDs of the workers that send other vectors than they have computed, in `round`."""
        return frozenset(self._task.byzantine.in_round(round)) if self.attacks else frozenset()

    def attack(self, server: AsyncServer, arrival: Arrival, vector: Tensor) -> None:
        """Replace a vector [d] that arrives at the server by what its worker sends, in place.

        The attack knows the vectors that the workers have sent last, or those of them that no update of the global
        model has used yet, as `attack.knows` says. The worker sends what it has computed if the attack needs more
        vectors than have arrived so far.
        """
        attackers, slot, experiment = self.attackers(server.round), arrival.slot, self._task.experiment
        received, senders, times = (self.tensors[name] for name in ("received", "received_from", "received_at"))
        if self._remembers:
            senders[senders == arrival.worker] = -1  # in another slot
            received[slot], senders[slot], times[slot] = vector, arrival.worker, server.version
        if arrival.worker not in attackers:
            return
        slots, workers, rows = [slot], [arrival.worker], vector.unsqueeze(0)
        if self._remembers:
            known = (senders >= 0) & ((times == server.version) | (experiment.attack.knows == "latest"))
            slots = known.nonzero().flatten().tolist()
            workers, rows = senders[slots].tolist(), received[index_of(slots, vector.device)]
        try:
            sent = self._attacked(server, rows, workers, (slot, arrival.unit), (server.version,))
        except ExperimentError:
            honest = sum(worker not in attackers for worker in workers)
            if honest >= min(self._most_known - 1, experiment.workers - experiment.attack.count(experiment.workers)):
                raise  # it never knows more
            return
        vector.copy_(sent[slots.index(slot)])

    def admit(self, server: AsyncServer, arrival: Arrival, vector: Tensor) -> bool:
        """Apply the rule to a single vector [d], in place. Return False if the rule rejects it.

        A rule rejects a vector by the coefficient 0.
        """
        start = server.replicas[arrival.slot].unsqueeze(0) if self._rule.accepts("models") else None
        staleness = torch.tensor([arrival.staleness])
        of_one = vector.unsqueeze(0)
        result = self._apply(server, of_one, [arrival.worker], (server.version,), staleness=staleness, models=start)
        if result.shares is not None and not result.shares.any():
            self.stats.rejected[arrival.worker] += 1
            return False
        vector.copy_(result.update)
        return True

    def combine(self, server: AsyncServer, vectors: Tensor, workers: Sequence[int], **more: Any) -> Tensor:
        """Apply the rule to the vectors [k, d] that `workers` have sent, and return its result [d].

        `more` are further inputs of the rule, by name.
        """
        return self._apply(server, vectors, workers, (server.version,), **more).update

    def mix(
        self,
        server: AsyncServer,
        models: Tensor,
        slot: int,
        others: Sequence[int],
        weights: Tensor,
        moment: tuple[int, ...],
    ) -> Tensor:
        """Return the vector [d] by which a worker on a graph moves its model, if it receives the models of `others`.

        Args:
            server: server of the run.
            models: model of each worker, [n, d].
            slot: the worker that receives.
            others: slots of the workers whose models it receives.
            weights: weights of `others` and, last, of the worker itself, float64 [k + 1].
            moment: key for random numbers, which differ between the workers that receive.
        """
        if not others:
            return torch.zeros_like(models[slot])
        attackers, slots, moment = self.attackers(server.round), sorted([*others, slot]), (*moment, slot)
        order = torch.tensor([[*others, slot].index(other) for other in slots])
        rows = models[index_of(slots, models.device)] - models[slot]
        if slot not in attackers and not attackers.isdisjoint(others):
            rows = self._from_attackers(server, rows, models, slot, slots, moment)
        return self._apply(
            server, rows, slots, moment, place=slot, weights=weights[order], own=slots.index(slot)
        ).update

    def _from_attackers(
        self, server: AsyncServer, rows: Tensor, models: Tensor, slot: int, slots: list[int], moment: tuple[int, ...]
    ) -> Tensor:
        """Return the differences `rows` of the workers in `slots`, with those that Byzantine workers send to `slot`.

        The attack knows the models of all neighbours of `slot`, even if only one of them sends its model.
        """
        neighbours, weights = server.neighbours(slot)
        known = sorted([*neighbours.tolist(), slot])
        own = known.index(slot)
        of_known = torch.from_numpy(np.insert(weights, own, max(0.0, 1 - weights.sum())))
        differences = models[index_of(known, models.device)] - models[slot]
        sent = self._attacked(server, differences, known, moment, moment, place=slot, weights=of_known, own=own)
        rows = rows.clone()
        for position, other in enumerate(slots):
            if other != slot:
                rows[position] = sent[known.index(other)]
        return rows

    def _attacked(
        self,
        server: AsyncServer,
        rows: Tensor,
        workers: list[int],
        moment: tuple[int, ...],
        moment_of_rule: tuple[int, ...],
        *,
        place: int = SERVER,
        weights: Tensor | None = None,
        own: int | None = None,
    ) -> Tensor:
        """Return the known vectors `rows` [m, d] of `workers` with what the Byzantine workers among them send."""
        attackers, attack, personal = self.attackers(server.round), self._attack, self._task.algorithm.personal_columns
        is_attacker = torch.tensor([worker in attackers for worker in workers])
        places = is_attacker.to(rows.device)
        if bool(is_attacker.all()) and attack.needs_honest:
            return rows

        def aggregate(byzantine: Tensor) -> Tensor:
            changed, more = rows.clone(), dict[str, Any](weights=weights, own=own, remember=False)
            changed[places] = byzantine
            return self._apply(server, changed, workers, moment_of_rule, place=place, **more).update

        parts = {"weights": ~is_attacker, "byzantine_weights": is_attacker}
        of_senders = {} if weights is None else {name: weights[part] for name, part in parts.items()}
        sent, self._states["attack", place] = attack(
            rows[~places],
            rows[places],
            seed=self._task.experiment.seed,
            moment=moment,
            last=self._last(place),
            aggregate=aggregate,
            workers=[worker for worker in workers if worker not in attackers],
            state=self._states.get(("attack", place)),
            **of_senders,
        )
        if personal.width:  # workers never send personal parameters
            personal.write(sent, sent.new_zeros(personal.width))
        changed = rows.clone()
        changed[places] = sent
        return changed

    def _apply(
        self,
        server: AsyncServer,
        rows: Tensor,
        workers: Sequence[int],
        moment: tuple[int, ...],
        *,
        place: int = SERVER,
        weights: Tensor | None = None,
        remember: bool = True,
        **more: Any,
    ) -> AggregationResult:
        """Apply the rule to `rows` [k, d].

        Args:
            server: server of the run.
            rows: vectors of the workers.
            workers: IDs of the workers.
            moment: key for random numbers.
            place: `SERVER`, or the slot of the worker that combines vectors on a graph.
            weights: weights of the vectors, for a rule that accepts weights.
            remember: whether the rule keeps its state and result.
            more: further inputs of the rule, by name.
        """
        task, rule = self._task, self._rule if place == SERVER else self._rule_on_graph(server.round, place)
        more |= {"state": self._states.get(("rule", place), {}), "last": self._last(place)}
        more["root"] = server.root() if rule.accepts("root") else None
        inputs = inputs_of_combination(task.experiment, rule, moment, rows, workers, weights, **more)
        is_recorded = remember and server.round in task.experiment.records.updates
        if is_recorded and place not in self.attackers(server.round):
            self.recorded = self._copies(server, replace(inputs, weights=weights), place)
        bad = [] if task.experiment.nonfinite == "keep" else bad_rows(rows)
        finite = screen(task, server.round, inputs, bad)
        try:
            result = rule(finite)
        except DivergedError:
            raise
        except ExperimentError as error:
            left = server.n - len(server.alive)
            why = f" because {left} of {server.n} workers have left" if left else ""
            where = f"round {server.round}: aggregate.rule, which combines {plural(len(finite.updates), 'vector')} here"
            raise ExperimentError(*(f"{where}{why}: {line}" for line in error.lines)) from None
        if task.experiment.nonfinite != "keep":
            rule.require_finite_result(result.update, server.round)
        if remember:
            stats = self.stats
            stats.combinations += 1
            if result.shares is None or self._pools:
                stats.unknown += 1
            else:
                stats.add_coefficients(zip(finite.workers or (), result.shares.tolist(), strict=True))
            stats.metrics.record(finite.metrics)
            stats.excluded += [workers[position] for position in bad]
            self._states["rule", place] = result.state
            if task.keeps_last:
                self.tensors["last"][max(place, 0)] = result.update
                self.tensors["has_last"][max(place, 0)] = 1
        return result

    def _rule_on_graph(self, round: int, slot: int) -> Pipeline:
        """Return the rule of the worker in `slot` on the graph of `round`, on which its parameter f depends."""
        experiment = self._task.experiment
        round = round if experiment.policy.topology.component.changes else 1
        if self._f_in_round[0] != round:
            self._f_in_round = round, experiment.f_on_graph(self._task.byzantine.fixed, round)
        f = self._f_in_round[1][slot]
        if f not in self._rules:
            self._rules[f] = experiment.aggregate.pipeline(f)
        return self._rules[f]

    def _copies(self, server: AsyncServer, inputs: AggregationInputs, place: int) -> dict[str, Tensor]:
        """Return the inputs of a combination as copied tensors by name, as `fedsim replay` reads them."""
        byzantine = set(map(self._task.experiment.policy.component.sender, self._task.byzantine.in_round(server.round)))
        tensors = {
            name: getattr(inputs, name) for name in ("updates", "weights", "staleness", "models", "root", "last")
        }
        tensors |= {f"state.{name}": tensor for name, tensor in (inputs.state or {}).items()}
        numbers: dict[str, Any] = {"workers": inputs.workers, "moment": inputs.moment, "version": [server.version]}
        numbers |= {"byzantine": [worker in byzantine for worker in inputs.workers or ()]}
        if place != SERVER:
            numbers |= {"receiver": [place], "own": [inputs.own], "f": [self._f_in_round[1][place]]}
        tensors |= {name: torch.tensor(values) for name, values in numbers.items()}
        return {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items() if tensor is not None}

    def _last(self, place: int) -> Tensor | None:
        """Return the previous result [d] of the rule, or None if there is none, or if it is not used."""
        place = max(place, 0)
        is_known = self._task.keeps_last and bool(self.tensors["has_last"][place])
        return self.tensors["last"][place].clone() if is_known else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "stats"}

    def keep_states(self, snapshot: Snapshot) -> None:
        """Save the states of the rule and of the attack in a snapshot."""
        for (kind, place), state in self._states.items():
            snapshot.keep(state, f"{kind}_state.{place}.")

    def resume_states(self, snapshot: Snapshot) -> None:
        """Restore the states that `keep_states` has saved."""
        for kind in ("rule", "attack"):
            for name, tensor in snapshot.under(f"{kind}_state.").items():
                place, _, key = name.partition(".")
                self._states.setdefault((kind, int(place)), {})[key] = tensor.to(self._task.device)
