"""Where pieces of work begin and come in: the same for the virtual clock, a race, and a race that is replayed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedsim.asynchronous.policy import Arrival
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.engines.feed import Member


@dataclass
class Journal:
    """What has happened since it was begun.

    Attributes:
        samples: gone through, by worker, in work that has arrived.
        staleness: of what was applied, how often each.
        loss_sum: of training, over those samples.
        up, down: models or gradients sent.
        wasted: pieces of work that came in after others had made them void, or were given up.
    """

    samples: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    loss_sum: float = 0.0
    up: int = 0
    down: int = 0
    wasted: int = 0

    def add(self, other: Journal) -> None:
        """Add what has happened elsewhere in the same time."""
        self.samples.update(other.samples)
        self.staleness.update(other.staleness)
        self.loss_sum += other.loss_sum
        self.up += other.up
        self.down += other.down
        self.wasted += other.wasted


class Desk:
    """Hands out pieces of work and takes them in, as the policy has it, and keeps a journal of that."""

    def __init__(self, server: Server, roster: Roster) -> None:
        self.server, self.policy, self.roster = server, server.policy, roster
        self.journal = Journal()
        self._losses = server.memory.train_loss.numpy()  # gives its numbers faster than a tensor does

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
        journal.loss_sum += float(self._losses[slot]) * samples
        if up:
            journal.staleness[staleness] += 1
        server.end(slot, member.worker)
        policy.take(server, Arrival(slot, member.worker, unit, staleness))

    def give_up(self, member: Member) -> None:
        """A piece of work is for nothing; its worker begins it anew when its turn comes."""
        self.roster.given_up(member)
        self.journal.wasted += 1
