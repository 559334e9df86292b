"""An aggregation rule that is applied once per round and keeps its state between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fedsim.aggregation import AggregationInputs, make_pipeline, resolve
from fedsim.aggregation.functional import aggregate_inputs, checked_nonfinite
from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage


class RuleOverRounds:
    """An aggregation rule, possibly after pre-aggregators, with the state that they keep from round to round.

    Args:
        rule, params, seed, nonfinite: see `fedsim.aggregate`.
        sync: what is aggregated: model updates ("parameters") or gradients ("gradients").

    >>> rule = RuleOverRounds("centered_clipping", {"tau": 1.0})
    >>> rule(torch.tensor([[3.0], [3.0]]), round=1), rule(torch.tensor([[3.0], [3.0]]), round=2)
    (tensor([1.]), tensor([2.]))
    """

    def __init__(
        self,
        rule: Stage | Sequence[Stage],
        params: dict[str, Any],
        *,
        seed: int = 0,
        nonfinite: Nonfinite = "error",
        sync: Literal["parameters", "gradients"] = "parameters",
    ) -> None:
        self.pipeline = make_pipeline(resolve(rule, params))
        self.nonfinite = checked_nonfinite(nonfinite)
        self._seed, self._sync = seed, sync
        self._state: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def __call__(self, updates: Tensor, *, round: int, weights: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the aggregate [d] of the workers' updates or gradients.

        Args:
            updates: one row per worker, [n, d].
            round: number of the round, which seeds the random draws together with `seed`.
            weights: weight of each worker for rules that need weights, float64 [n] on the CPU; None: all weights are 1.
            inputs: further inputs of AggregationInputs, such as `workers`.
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
