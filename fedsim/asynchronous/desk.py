"""Where pieces of work begin and come in: the same for the virtual clock, a race, and a race that is replayed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedsim.asynchronous.policy import Arrival
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.standing import WorkStanding, require_below
from fedsim.engines.feed import Member
from fedsim.errors import ExperimentError


@dataclass
class Journal:
    """What has happened since it was begun.

    Attributes:
        samples: gone through, by worker, in work that has arrived.
        staleness: of what was applied, how often each.
        loss_sum: of training, over the `loss_samples` samples of the work that was not left out.
        up, down: models or gradients sent.
        wasted: pieces of work that came in after others had made them void, or were given up.
        excluded: workers whose work was left out because it held NaN or infinity, once for each piece.
    """

    samples: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    loss_sum: float = 0.0
    loss_samples: int = 0
    up: int = 0
    down: int = 0
    wasted: int = 0
    excluded: list[int] = field(default_factory=list)

    @property
    def train_loss(self) -> float:
        """Mean training loss per sample of the work that was not left out; NaN if all of it was."""
        return self.loss_sum / self.loss_samples if self.loss_samples else math.nan

    def add(self, other: Journal) -> None:
        """Add what has happened elsewhere in the same time."""
        self.samples.update(other.samples)
        self.staleness.update(other.staleness)
        self.loss_sum += other.loss_sum
        self.loss_samples += other.loss_samples
        self.up += other.up
        self.down += other.down
        self.wasted += other.wasted
        self.excluded += other.excluded


class Desk:
    """Hands out pieces of work and takes them in, as the policy has it, and keeps a journal of that."""

    def __init__(self, server: Server, roster: Roster) -> None:
        self.server, self.policy, self.roster = server, server.policy, roster
        self.begin_round(1)
        self.unfit: set[int] = set()  # slots whose work has been computed, and is not finite
        self._losses = server.memory.train_loss.numpy()  # gives its numbers faster than a tensor does

    def begin_round(self, round: int) -> None:
        """Begin a new journal."""
        self.round, self.journal = round, Journal()

    def look_at(self, members: Sequence[Member]) -> None:
        """See which of these pieces of work, just computed, hold NaN or infinity, all at once."""
        if self.server.nonfinite == "keep" or not members:
            return
        slots, rows = [member.slot for member in members], self.server.memory.rows
        sums = (rows if slots == list(range(len(rows))) else rows[slots]).sum(1)
        if not math.isfinite(sums.sum()):  # a sum may overflow, so this is a suspicion only
            self.unfit.update(slot for slot in slots if not bool(rows[slot].isfinite().all()))

    def begin(self, slot: int, steps: int | None = None) -> Member:
        """The next piece of work of a slot, whose row holds by then what it begins with.

        steps: of a round, where neither the schedule nor the policy is asked for that.
        """
        server, policy = self.server, self.policy
        member = self.roster.next(slot, steps)
        if member.step is None and steps is None:
            member = member._replace(steps=policy.steps(server, slot, self.roster.steps(member)))
        policy.pull(server, slot)
        server.begin(slot, member.worker)
        self.journal.down += policy.traffic(int(server.units[slot]))[1]
        server.units[slot] += 1
        return member

    def is_void(self, slot: int) -> bool:
        """Whether an update has ended the piece of work that a slot brings only now."""
        return self.policy.cancels and self.server.staleness(slot) > 0

    def take(self, member: Member, staleness: int | None = None) -> None:
        """A piece of work comes in, and is not void; of another staleness than the server's version says, if given."""
        server, policy, journal, slot = self.server, self.policy, self.journal, member.slot
        unit = int(server.units[slot]) - 1
        staleness = server.staleness(slot) if staleness is None else staleness
        self.roster.done(member)
        up, _ = policy.traffic(unit)
        journal.up += up
        samples = self.roster.samples(member)
        journal.samples[member.worker] += samples
        if slot in self.unfit:
            self._leave_out(member)
            return
        journal.loss_sum += float(self._losses[slot]) * samples
        journal.loss_samples += samples
        if up:
            journal.staleness[staleness] += 1
        server.end(slot, member.worker)
        policy.take(server, Arrival(slot, member.worker, unit, staleness))

    def resume(self, standing: WorkStanding) -> None:
        """Go on from a state, which the roster and the server must be able to have, else ValueError is raised."""
        require_below(self.server.n, "slots", [member.slot for member in standing.members])
        self.roster.resume(standing.roster, standing.members)
        self.server.check()
        self.unfit = set(standing.unfit)

    def _leave_out(self, member: Member) -> None:
        """Work that is not finite comes in: nobody gets to see it, and its worker goes on with its next."""
        self.unfit.discard(member.slot)
        if self.server.nonfinite == "error":
            raise ExperimentError(
                f"round {self.round}: the work of worker {member.worker} from its round {member.round} holds NaN or "
                "infinity; reduce local.lr, or exclude such work with aggregate.nonfinite=exclude"
            )
        self.journal.excluded.append(member.worker)

    def give_up(self, member: Member) -> None:
        """A piece of work is for nothing; its worker begins it anew when its turn comes."""
        self.unfit.discard(member.slot)
        self.roster.given_up(member)
        self.journal.wasted += 1
