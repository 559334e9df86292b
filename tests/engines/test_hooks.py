from __future__ import annotations

import pickle

import pytest

import fedsim
from fedsim.engines.distributed.hooks import BoundHook, bind_hook, hook


def bound(name, **params):
    plug = hook.get(name)
    return bind_hook(plug, plug.check(params))


def test_only_the_plain_mean_is_exact_and_only_powersgd_sends_in_several_parts():
    assert [name for name in hook.names() if bound(name).exact] == ["allreduce"]
    assert [name for name in hook.names() if not bound(name).at_once] == ["powersgd"]


def test_an_imported_hook_is_neither_exact_nor_sent_at_once():
    own = bound("torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook")
    assert (own.takes, own.exact, own.at_once) == (("process_group", "bucket"), False, False)


@pytest.mark.parametrize("name", ["allreduce", "powersgd", "tests.plugs:Shrunk"])
def test_hooks_can_be_pickled(name):
    assert pickle.loads(pickle.dumps(bound(name))).name == name


def test_powersgd_gets_its_parameters_and_the_seed():
    state = bound("powersgd", matrix_approximation_rank=3, min_compression_rate=1.5, warm_start=False).function.start(
        None, 17
    )
    assert (state.matrix_approximation_rank, state.min_compression_rate, state.warm_start) == (3, 1.5, False)
    assert (state.start_powerSGD_iter, state.use_error_feedback) == (1000, True)
    again = bound("powersgd").function.start(None, 17)
    assert state.rng.randint(10**9) == again.rng.randint(10**9)


def test_powersgd_needs_two_plain_steps_before_error_feedback_or_warm_start():
    bound("powersgd", start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    with pytest.raises(fedsim.ExperimentError, match="start_powerSGD_iter = 1: must be 2 at least"):
        bound("powersgd", start_powerSGD_iter=1)


def test_each_step_has_the_same_state():
    calls = []

    class Counting:
        def start(self, process_group, seed):
            return [process_group, seed]

        def __call__(self, state, bucket):
            calls.append((state, bucket))

    send = BoundHook(Counting(), "counting", ("state", "bucket")).start("ranks", 5)
    send("first")
    send("second")
    assert calls == [(["ranks", 5], "first"), (["ranks", 5], "second")]
    assert calls[0][0] is calls[1][0]
