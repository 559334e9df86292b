"""Worker state in ranks: rank k % P owns the state of worker k, and lends it to the rank that trains the worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedsim.clients import State
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.distributed.rank_aggregator import RowPlacement
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.worker_states import WorkerStates


class RankWorkerStates(WorkerStates):
    """The worker states that one rank owns. All ranks call each method at the same time.

    Args:
        placement: gives the placement of the current cohort.
        limit, folder: as for `WorkerStates`, of this rank alone.
    """

    def __init__(
        self,
        initial: State,
        ranks: RankGroup,
        placement: Callable[[], RowPlacement],
        limit: int | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__(initial, limit, folder)
        self._ranks, self._placement = ranks, placement

    def load_cohort(self, cohort: Sequence[int], mine: Sequence[WorkItem], rows: State) -> None:
        places, sent, received = self._places_of(cohort, range(len(cohort)))
        parts = [
            {name: row.new_empty(len(of_rank), len(row)) for name, row in self.initial.items()} for of_rank in sent
        ]
        for part, of_rank in zip(parts, sent, strict=True):
            self.load([cohort[slot] for slot in of_rank], part, range(len(of_rank)))
        for name, initial in self.initial.items():
            got = self._ranks.exchange(
                [part[name] for part in parts], [len(slots) * len(initial) for slots in received]
            )
            rows[name][:] = initial
            for slots, their in zip(received, got, strict=True):
                rows[name][[places[slot] for slot in slots]] = their.view(-1, len(initial))

    def save_cohort(
        self, cohort: Sequence[int], mine: Sequence[WorkItem], excluded: Collection[int], rows: State
    ) -> None:
        slots = [slot for slot, worker in enumerate(cohort) if worker not in excluded]
        places, received, sent = self._places_of(cohort, slots)
        self.add([cohort[slot] for of_rank in received for slot in of_rank])
        for name, initial in self.initial.items():
            parts = [rows[name][[places[slot] for slot in of_rank]] for of_rank in sent]
            got = self._ranks.exchange(parts, [len(slots) * len(initial) for slots in received])
            for of_rank, part in zip(received, got, strict=True):
                kept = self.rows[name]
                kept[self._indices(cohort, of_rank)] = part.view(-1, len(initial)).to(kept.device)

    def sums(self, messages: State, slots: Sequence[int]) -> State:
        placed = self._placement().rows
        mine = [row for rank, row in (placed[slot] for slot in slots) if rank == self._ranks.index]
        return {name: self._ranks.all_reduce(rows[mine].sum(0)) for name, rows in messages.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The state of all ranks in the first one; in the others, what they own."""
        own = super().tensors()
        if not own:
            return own
        counts = self._ranks.gather_objects(len(self))
        whole = {}
        for name, tensor in own.items():
            if name != "workers":
                tensor = tensor.to(self.initial[name.removeprefix("rows.")].device)
            sizes = [count * tensor[:1].numel() if self._ranks.first else 0 for count in counts]
            parts = [tensor] + [tensor[:0]] * (self._ranks.count - 1)
            whole[name] = torch.cat(self._ranks.exchange(parts, sizes)).view(-1, *tensor.shape[1:])
        if not self._ranks.first:
            return own
        ascending = whole["workers"].argsort()
        return {name: tensor[ascending.to(tensor.device)] for name, tensor in whole.items()}

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        workers = saved.get("workers")
        if workers is not None and workers.ndim == 1 and all(len(kept) == len(workers) for kept in saved.values()):
            own = workers % self._ranks.count == self._ranks.index
            saved = {name: kept[own] for name, kept in saved.items()}
        super().resume(saved)

    def _places_of(
        self, workers: Sequence[int], slots: Sequence[int]
    ) -> tuple[dict[int, int], list[list[int]], list[list[int]]]:
        """This rank's row by slot; by rank, the slots trained there and owned here; by rank, the reverse."""
        here, count, placed = self._ranks.index, self._ranks.count, self._placement().rows
        owned: list[list[int]] = [[] for _ in range(count)]
        trained: list[list[int]] = [[] for _ in range(count)]
        for slot in slots:
            owner, (trainer, _) = workers[slot] % count, placed[slot]
            if owner == here:
                owned[trainer].append(slot)
            if trainer == here:
                trained[owner].append(slot)
        return {slot: row for slot, (rank, row) in placed.items() if rank == here}, owned, trained

    def _indices(self, workers: Sequence[int], slots: Sequence[int]) -> list[int]:
        return [self._places[workers[slot]] for slot in slots]
