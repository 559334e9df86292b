"""Rules that weigh workers by how far they are to be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.aggregation.columns import norms, products_with
from fedsim.aggregation.gram import TIED, Gram
from fedsim.aggregation.magnitude import in_range, power_of_two
from fedsim.aggregation.rule import Mix, require, rule
from fedsim.system.devices import to_device


@rule("fltrust")
def fltrust(updates: Tensor, root: Tensor) -> Mix:
    """Rows count by how far they agree with the server's own update (Cao et al. 2021).

    With g0 = `root` [d], the update on the server's root data: row x_k gets trust t_k = relu(cos(x_k, g0)) and is
    scaled to |g0|; the result is sum t_k x_k |g0| / |x_k| / sum t_k, and zero where nobody is trusted. Cost: three
    passes over the [n, d] updates.
    """
    lengths, length = norms(updates), norms(root.unsqueeze(0))
    trust = _cosines(updates, lengths, root, length).clamp(min=0)
    if not bool(trust.any()):
        return Mix(torch.zeros_like(trust))
    return Mix(torch.where(lengths > 0, length / lengths, 0.0) * trust / trust.sum())


def _cosines(updates: Tensor, lengths: Tensor, root: Tensor, length: Tensor) -> Tensor:
    """cos(x_k, root), [n], given the norms; 0 where one of these is zero."""
    both = lengths * length
    cosines = torch.where(both > 0, products_with(updates, root).cpu().double() / both, 0.0)
    unlike = (lengths > 0) & (length > 0) & ~in_range(both)
    for row in unlike.nonzero().flatten().tolist():  # products out of range
        sizes = power_of_two(float(lengths[row])), power_of_two(float(length))
        product = float(products_with(updates[row : row + 1] * sizes[0], root * sizes[1]))
        cosines[row] = product / float(lengths[row] * sizes[0] * length * sizes[1])
    return cosines


@rule("foolsgold")
def foolsgold(updates: Tensor, workers: list[int], state: dict[str, Tensor] | None) -> tuple[Mix, dict[str, Tensor]]:
    """Workers whose updates have been alike over the rounds count for little (Fung et al. 2020).

    H_k is the sum of worker k's updates so far, cs_ij = cos(H_i, H_j) with cs_ii = 0, v_i = max_j cs_ij. Pardoning:
    where v_j > v_i, cs_ij is scaled by v_i / v_j. Then a_i = 1 - max_j cs_ij, clipped to [0, 1], is divided by the
    largest (what is below 1e-12 counts as 0), goes through logit(a) + 1/2, is clipped to [0, 1], and the rows are
    averaged with these weights; the result is zero where all of them are. Needs n >= 2. Cost: an [n, d] history, and
    one n x n x d matrix product.
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
    a = torch.where(a > TIED, a, 0)  # a cosine of 1, but for rounding
    if not bool(a.any()):
        return Mix(torch.zeros_like(a)), state
    a = ((a / a.max()).logit() + 0.5).clamp(0, 1)
    return Mix(a / a.sum()), state


def _with_history(
    updates: Tensor, workers: list[int], state: dict[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of each row's worker's updates so far [n, d], and the state that remembers it.

    Without a state nothing is remembered, nor copied.
    """
    if state is None:
        return updates, {}
    numbers = torch.tensor(workers)
    if not state:
        return updates, {"workers": numbers, "histories": updates.clone()}
    known = {worker: place for place, worker in enumerate(state["workers"].tolist())}
    new = [worker for worker in workers if worker not in known]
    places = {**known, **{worker: len(known) + i for i, worker in enumerate(new)}}
    histories = torch.cat([state["histories"], updates.new_zeros(len(new), updates.shape[1])])
    rows = to_device(torch.tensor([places[worker] for worker in workers]), updates.device)
    histories[rows] += updates
    return histories[rows], {"workers": torch.tensor(list(places)), "histories": histories}
