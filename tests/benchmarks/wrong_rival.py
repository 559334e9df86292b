"""A program that does other work than it is given: `python -m tests.benchmarks.wrong_rival HOW WORK RESULT`."""

from __future__ import annotations

import sys

from benchmarks.peers.bare import train
from benchmarks.peers.work import Result, load, main


def program(path: str) -> Result:
    work = load(path)
    if how == "fails":
        raise RuntimeError("no such cohort")
    if how == "takes smaller steps":
        work = work._replace(sgd={**work.sgd, "lr": 0.9 * work.sgd["lr"]})
    return train(work)


if __name__ == "__main__":
    how = sys.argv.pop(1)
    main(program)
