from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fedsim.core.randomness import (
    draw_key,
    numpy_generator,
    preserve_random_state,
    sample_cohort,
    seed_everything,
    torch_generator,
)


def test_a_key_is_a_pure_function_of_all_its_arguments():
    assert draw_key(1, "batches", 2, 3) == draw_key(1, "batches", 2, 3)
    variants = {draw_key(1, "batches", 2, 3), draw_key(2, "batches", 2, 3), draw_key(1, "cohort", 2, 3)}
    variants |= {draw_key(1, "batches", 3, 2), draw_key(1, "batches", 23), draw_key(1, "batches", 2)}
    assert len(variants) == 6
    assert draw_key(0, "model") == 5784575990485341678  # on every machine


def test_generators_repeat_and_do_not_touch_global_state():
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert np.array_equal(numpy_generator(1, "x", 2).permutation(50), numpy_generator(1, "x", 2).permutation(50))
    a, b = (torch.rand(5, generator=torch_generator(1, "x", 2)) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(before_torch, torch.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state()[1])


def test_seeding_repeats_whatever_a_model_may_draw_from():
    draws = []
    with preserve_random_state(torch.device("cpu")):
        for worker in (3, 3, 4):
            seed_everything(torch.device("cpu"), 0, "forward", 1, worker)
            mask = torch.nn.functional.dropout(torch.ones(100))
            draws.append([*mask.tolist(), np.random.rand(), random.random()])
    assert draws[0] == draws[1]
    assert not {*draws[0][-2:]} & {*draws[2][-2:]}
    assert draws[0][:100] != draws[2][:100]


def test_the_global_random_state_is_put_back_even_after_an_error():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    def draw_and_fail():
        with preserve_random_state(torch.device("cpu")):
            seed_everything(torch.device("cpu"), 5, "x")
            raise ZeroDivisionError

    before = states()
    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert states() == before


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 10), (1, 1), (1_000_000, 5)])
def test_a_cohort_is_distinct_workers_in_ascending_order(n, size):
    cohort = sample_cohort(0, 1, n, size)
    assert len(set(cohort.tolist())) == size
    assert np.array_equal(cohort, np.sort(cohort))
    assert cohort.min() >= 0
    assert cohort.max() < n


def test_cohorts_differ_by_round_and_reach_every_worker():
    cohorts = [tuple(sample_cohort(0, round, 10, 3)) for round in range(1, 101)]
    assert len(set(cohorts)) > 50
    counts = np.bincount(np.concatenate(cohorts), minlength=10)
    assert counts.min() > 10  # of 30 expected
