"""A stand-in for `Crew` that carries out calls in the process of the test."""

from __future__ import annotations

from fedsim.engines.crew import Seat


class InProcessCrew:
    """One process, whatever number is asked for.

    Attributes:
        called: the functions that have been called, in their order.
    """

    count = 1

    def __init__(self, count, threads=1, timeout=300.0):
        self.called, self.at_work = [], True

    def call(self, function, *arguments):
        if not self.called:
            self.seat = Seat.alone()
        self.called.append(function)
        return [function(self.seat, *arguments)]

    def close(self):
        self.at_work = False
