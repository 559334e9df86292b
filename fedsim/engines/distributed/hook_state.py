"""What a communication hook keeps, from the ranks of one run to those that go on with it.

    hook.all.NAME      what all ranks have alike
    hook.rank3.NAME    what that rank has for itself

The first rank, which writes checkpoints, gets the others' tensors, and gives each rank back its own. Where there are
more or fewer ranks than before, nobody is who it was: what belonged to single ranks is left behind then, and a warning
says so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from torch.distributed import GradBucket

from fedsim.core.snapshot import Snapshot
from fedsim.engines.distributed.hooks import Named, StartedHook
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.errors import FedsimWarning, RecordError, one_line, plural

ALL, RANK = "hook.all.", "hook.rank{}."
OF_A_RANK = re.compile(r"hook\.rank(\d{1,9})\.")
COUNT = "hook_ranks"  # the fact that says of how many


def keep(state: Snapshot, hook: StartedHook, ranks: RankGroup, *, whole: bool) -> None:
    """Add what a hook keeps to a state: of all ranks in the first, of itself in each of the others.

    whole: whether anything is still to come for which the ranks' own parts, of the size of rows, are needed.
    """
    lasting = hook.lasting()
    if lasting is None:
        return
    common, own = lasting
    state.facts[COUNT] = ranks.count
    state.keep(common, ALL)
    for name in sorted(own) if whole else ():
        parts = ranks.gather(own[name], "checkpoint") or [own[name]]
        first = 0 if ranks.first else ranks.index
        for rank, part in enumerate(parts, start=first):
            state.keep({name: part}, RANK.format(rank))


def resume(state: Snapshot, hook: StartedHook, ranks: RankGroup, buckets: Sequence[GradBucket]) -> None:
    """Put what a hook keeps to where it was. Raises RecordError, in all ranks, where it does not fit in one of them."""
    if not hook.keeps:
        return
    if hook.lasting() is None or COUNT not in state.facts:
        _warn("starts again: its state is in no checkpoint")
        return
    before, own = state.facts[COUNT], state.under(RANK.format(ranks.index))
    if type(before) is not int:
        raise RecordError(f"{COUNT} is no number")
    any_own = any(owner_of(name) is not None for name in state.tensors)
    if before != ranks.count:
        own = {}
        if any_own:
            were = plural(before, "rank")
            _warn(
                f"ran on {were} before, and now on {ranks.count}: the state that each rank kept for itself starts again"
            )
    if before == ranks.count and any_own and not own:
        refusal: str | None = f"rank {ranks.index} has no part in it"
    else:
        refusal = _tried(hook, state.under(ALL), own, buckets)
    refusals = [said for said in ranks.tell_all(refusal) if said is not None]
    if refusals:  # even if it is another rank's, or some would go on without the others
        raise RecordError(f"communication hook: {refusals[0]}")


def owner_of(name: str) -> int | None:
    """The rank to which a tensor of a state belongs; None where it is everybody's."""
    found = OF_A_RANK.match(name)
    return int(found[1]) if found else None


def _tried(hook: StartedHook, common: Named, own: Named, buckets: Sequence[GradBucket]) -> str | None:
    """Why a hook refuses to go on from there; None where it has done so."""
    try:
        hook.resume(common, own, buckets)
    except (RecordError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return one_line(error)
    return None


def _warn(what: str) -> None:
    warnings.warn(f"the communication hook {what}", FedsimWarning, stacklevel=2)
