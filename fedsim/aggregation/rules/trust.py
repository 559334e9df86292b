"""Rules that give more weight to workers that are trusted more."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_on_device, on_host, products_with
from fedsim.aggregation.numerics.gram import TIED, Gram
from fedsim.aggregation.rule import LinearCombination, require, rule
from fedsim.system.devices import to_device


@rule("fltrust")
def fltrust(updates: Tensor, root: Tensor) -> LinearCombination:
    """Average the updates, weighted by their agreement with the server's own update (FLTrust, Cao et al. 2021).

    With g0 = `root`, update x_k has the trust score t_k = relu(cos(x_k, g0)) and is scaled to the norm |g0|. The result
    is sum_k t_k x_k |g0| / |x_k| / sum_k t_k, or zero if all trust scores are zero.

    Args:
        updates: updates of the n workers, [n, d].
        root: update computed on the server's own data, [d].

    Returns the weighted mean [d]. Cost: three passes over the updates.

    >>> updates = torch.tensor([[2.0, 0.0], [-9.0, 0.0]])
    >>> fedsim.aggregate(updates, "fltrust", root=torch.tensor([1.0, 0.0]))
    tensor([1., 0.])
    """
    of_root = distances_on_device(root.unsqueeze(0), None)
    lengths, length, products = on_host(distances_on_device(updates, None), of_root, products_with(updates, root))
    both = lengths * length
    trust = torch.where(both > 0, products / both, 0.0).clamp(min=0)  # cosines
    if not bool(trust.any()):
        return LinearCombination(torch.zeros_like(trust))
    return LinearCombination(torch.where(lengths > 0, length / lengths, 0.0) * trust / trust.sum())


@rule("foolsgold")
def foolsgold(
    updates: Tensor, workers: list[int], state: dict[str, Tensor] | None
) -> tuple[LinearCombination, dict[str, Tensor]]:
    """Average with low weights for workers whose past updates were similar to each other (FoolsGold, Fung et al. 2020).

    H_k is the sum of all updates of worker k so far. The similarity of two workers is cs_ij = cos(H_i, H_j), with
    cs_ii = 0. Let v_i = max_j cs_ij. In the pardoning step, cs_ij is multiplied by v_i / v_j if v_j > v_i. The weight
    of worker i is computed from a_i = 1 - max_j cs_ij in four steps: clip a_i to [0, 1], divide it by the largest a
    (values below 1e-12 count as 0), replace it by logit(a_i) + 1/2, and clip it to [0, 1] again. The result is the
    weighted mean of the updates, or zero if all weights are zero.

    Args:
        updates: updates of the n workers, [n, d], n >= 2.
        workers: IDs of the n workers.
        state: sum of past updates of each worker. None: only the current updates are compared.

    Returns the weighted mean [d] and the next state. Cost: an [n, d] history, and one n x n x d matrix product.

    >>> updates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    >>> fedsim.aggregate(updates, "foolsgold")
    tensor([0.5000, 0.5000])
    """
    require(len(updates) >= 2, "foolsgold", "n >= 2", n=len(updates))
    history, state = _with_history(updates, workers, state)
    gram = Gram(history)
    lengths = gram.norms.unsqueeze(0) * gram.norms.unsqueeze(1)
    alike = torch.where(lengths > 0, gram.products / lengths, 0.0).clamp(-1, 1).fill_diagonal_(0)
    most = alike.amax(1)
    ratio = most.unsqueeze(1) / most.unsqueeze(0)
    alike = torch.where(most.unsqueeze(0) > most.unsqueeze(1), alike * ratio, alike)
    a = (1 - alike.amax(1)).clamp(0, 1)
    a = torch.where(a > TIED, a, 0)  # the cosine is 1 up to rounding
    if not bool(a.any()):
        return LinearCombination(torch.zeros_like(a)), state
    a = ((a / a.max()).logit() + 0.5).clamp(0, 1)
    return LinearCombination(a / a.sum()), state


def _with_history(
    updates: Tensor, workers: list[int], state: dict[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sums [n, d] of all updates that each worker has sent so far, and the next state.

    `state` is None if the rule is used without memory. The result is then the current updates and an empty state.
    """
    if state is None:
        return updates, {}
    if not state:
        return updates, {"workers": torch.tensor(workers), "histories": updates.clone()}
    known = state["workers"].tolist()
    position_of = {worker: position for position, worker in enumerate(dict.fromkeys([*known, *workers]))}
    histories = torch.cat([state["histories"], updates.new_zeros(len(position_of) - len(known), updates.shape[1])])
    rows = to_device(torch.tensor([position_of[worker] for worker in workers]), updates.device)
    histories[rows] += updates
    return histories[rows], {"workers": torch.tensor(list(position_of)), "histories": histories}
