"""An aggregation rule that is applied once per round and keeps its state between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fedsim.aggregation import AggregationInputs, make_pipeline, resolve
from fedsim.aggregation.functional import aggregate_inputs, checked_nonfinite
from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage
from fedsim.system.global_settings import plain_arithmetic


class RuleOverRounds:
    """An aggregation rule with its state, which it keeps from round to round.

    Args:
        name: aggregation rule, or a list of pre-aggregators that ends with a rule, as in `fedsim.aggregate`.
        params: parameters of the rule by name.
        seed: seed for the rule's random draws.
        nonfinite: what to do with updates that contain NaN or infinity: "error", "exclude" or "keep",
            as in `fedsim.aggregate`.
        sync: what is aggregated: model updates ("parameters") or gradients ("gradients").

    >>> rule = RuleOverRounds("centered_clipping", {"tau": 1.0})
    >>> rule(torch.tensor([[3.0], [3.0]]), round=1), rule(torch.tensor([[3.0], [3.0]]), round=2)
    (tensor([1.]), tensor([2.]))
    """

    def __init__(
        self,
        name: Stage | Sequence[Stage],
        params: dict[str, Any],
        *,
        seed: int = 0,
        nonfinite: Nonfinite = "error",
        sync: Literal["parameters", "gradients"] = "parameters",
    ) -> None:
        self.pipeline = make_pipeline(resolve(name, params))
        self.nonfinite = checked_nonfinite(nonfinite)
        self._seed, self._sync = seed, sync
        self._state: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    @plain_arithmetic
    def __call__(self, updates: Tensor, *, round: int, weights: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the aggregate [d] of the workers' updates or gradients.

        Args:
            updates: one row per worker, [n, d], for n workers and d parameters.
            round: number of the round, on which the random draws depend.
            weights: weight of each worker, float64 [n] on the CPU; None: all weights are 1.
            inputs: further inputs of the rule (see AggregationInputs), such as `workers`.
        """
        if self.pipeline.needs_weights:
            inputs["weights"] = updates.new_ones(len(updates), device="cpu").double() if weights is None else weights
        inputs |= {"seed": self._seed, "moment": (round,), "sync": self._sync}
        aggregation_inputs = AggregationInputs(updates, state=self._state, last=self._last, **inputs)
        result = aggregate_inputs(aggregation_inputs, self.pipeline, self.nonfinite)
        self._state = result.state
        if self.pipeline.accepts("last"):
            self._last = result.update
        return result.update
