"""Communication hooks, and when gradient buckets are sent; test_distributed.py checks what ranks compute with them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.rows import Layout
from fedsim.processes.hooks import hook
from fedsim.runs.setup import task_of
from fedsim.training.parallel_trainer import BucketSender
from tests.models import Branching


def bound(name, **params):
    registration = hook.get(name)
    return hook.bind(registration, registration.check(params))


def test_hooks_can_be_pickled_and_only_powersgd_has_a_state():
    assert [name for name in hook.names() if pickle.loads(pickle.dumps(bound(name))).keeps] == ["powersgd"]


def test_powersgd_gets_its_parameters_and_the_seed():
    powersgd = bound("powersgd", matrix_approximation_rank=3, min_compression_rate=1.5, warm_start=False)
    [state] = powersgd.start(None, 17).args
    assert (state.matrix_approximation_rank, state.min_compression_rate, state.warm_start) == (3, 1.5, False)
    assert (state.start_powerSGD_iter, state.use_error_feedback) == (1000, True)
    assert state.rng.randint(10**9) == np.random.RandomState(17).randint(10**9)


def test_powersgd_needs_two_plain_steps_before_error_feedback_or_warm_start():
    bound("powersgd", start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    bound("powersgd", start_powerSGD_iter=2)
    for options in ({}, {"use_error_feedback": False}, {"warm_start": False}):
        with pytest.raises(fedsim.ExperimentError, match="start_powerSGD_iter = 1: must be at least 2"):
            bound("powersgd", start_powerSGD_iter=1, **options)


@pytest.fixture
def sender():
    """Return a module (a batch uses one of its two layers), its gradient row, a sender, and the sent bucket numbers."""
    module, sent = Branching(), []
    layout = Layout.of(module)
    row, gradient = torch.zeros(2, layout.d)
    layout.bind(module, row, gradient)
    sender = BucketSender(gradient, layout, lambda bucket: sent.append(bucket.index()), most=layout.d // 4)
    sender.watch(module)
    return module, gradient, sender, sent


def test_buckets_have_the_columns_and_shapes_of_their_parameters(sender):
    module, gradient, sender, _ = sender
    buckets = sender._buckets
    assert torch.equal(torch.cat([bucket.buffer() for bucket in buckets[::-1]]), gradient)
    shapes = [part.shape for bucket in buckets[::-1] for part in bucket.gradients()]
    assert shapes == [parameter.shape for parameter in module.parameters()]
    assert [bucket.is_last() for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert buckets[0].gradients()[0].data_ptr() == buckets[0].buffer().data_ptr()


def test_buckets_are_sent_in_order_once_complete_and_the_rest_at_the_end(sender):
    module, _, sender, sent = sender
    dark, bright = torch.zeros(1, 1, 28, 28), torch.ones(1, 1, 28, 28)
    module(dark).sum().backward()
    assert sent == []  # nothing is sent before `begin`
    sender.begin()
    module(bright).sum().backward()
    assert sent == []  # the first bucket, that of the second layer, has no gradient
    assert len(sender.finish()) == len(sent)
    sent.clear()
    sender.begin()
    module(dark).sum().backward()
    count = len(sent)
    assert 0 < count < len(sender.finish())
    assert sent == sorted(set(sent))
    sender.begin()
    (module(dark) + module(dark)).sum().backward()
    with pytest.raises(RuntimeError, match="changed after it had been sent"):
        module(dark).sum().backward()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, None),
        ({"aggregate": "mean"}, None),
        ({"aggregate": {"weights": "uniform"}}, None),
        ({"aggregate": {"nonfinite": "keep"}}, None),
        ({"precision": "bf16"}, None),
        ({"aggregate": {"rule": ["nnm", "mean"], "f": 1}}, 'aggregate.rule = "nnm + mean"'),
        ({"aggregate": {"rule": "qfedavg"}}, 'aggregate.rule = "qfedavg"'),
        ({"distributed": {"trainer": "batched"}}, 'distributed.trainer = "batched"'),
    ],
)
def test_it_is_for_means_that_nobody_needs_single_rows_for(changes, needed):
    def task(**tables):
        return task_of(fedsim.Experiment(model="logistic", engine="distributed", **tables), torch.device("cpu"))

    averaged = task(sync="gradients", **changes)
    assert averaged.experiment.needs_rows == needed
    assert (averaged.experiment.gradient_hook is None) == averaged.has_rows == (needed is not None)
    assert task(**changes).has_rows
