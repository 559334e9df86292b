"""The bare loop: plain PyTorch in one process with one thread, which trains one client after another."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.peers.work import Log, Result, Work, load, main


def train(work: Work, clock: Callable[[], float] = time.perf_counter) -> Result:
    model, state = work.model(), work.state
    log = Log(clock)
    for round, cohort in enumerate(work.cohorts):
        total = sum(work.weights[client] for client in cohort)
        average = {name: torch.zeros_like(value) for name, value in state.items()}
        for slot, client in enumerate(cohort):
            batches = work.batches(round, slot)
            model.load_state_dict(state)
            work.train(model, torch.optim.SGD(model.parameters(), **work.sgd), batches)
            log.trained(batches)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    average[name].add_(value, alpha=work.weights[client] / total)
                else:  # the number of batches that BatchNorm has seen
                    average[name].copy_(value)
        state = average
        model.load_state_dict(state)
        log.end_round(work.accuracy(model), state)
    return log.result(state)


if __name__ == "__main__":
    main(lambda path: train(load(path)))
