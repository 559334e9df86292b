from __future__ import annotations

import pickle

import pytest
import torch

import fedsim
from fedsim.engines.distributed.hooks import BoundHook, bind_hook, hook
from fedsim.errors import RecordError


def bound(name, **params):
    plug = hook.get(name)
    return bind_hook(plug, plug.check(params))


def test_only_the_plain_mean_is_exact_and_only_powersgd_sends_in_several_parts():
    assert [name for name in hook.names() if bound(name).exact] == ["allreduce"]
    assert [name for name in hook.names() if not bound(name).at_once] == ["powersgd"]


def test_nothing_is_taken_for_granted_of_a_hook_of_ones_own():
    own = bound("torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook")
    assert (own.takes, own.exact, own.at_once) == (("process_group", "bucket"), False, False)


@pytest.mark.parametrize("name", ["allreduce", "powersgd", "tests.plugs:Shrunk"])
def test_it_travels_to_other_processes(name):
    assert pickle.loads(pickle.dumps(bound(name))).name == name


def test_powersgd_is_given_its_parameters_and_the_seed():
    state = bound("powersgd", matrix_approximation_rank=3, min_compression_rate=1.5, warm_start=False).function.start(
        None, 17
    )
    assert (state.matrix_approximation_rank, state.min_compression_rate, state.warm_start) == (3, 1.5, False)
    assert (state.start_powerSGD_iter, state.use_error_feedback) == (1000, True)
    again = bound("powersgd").function.start(None, 17)
    assert state.rng.randint(10**9) == again.rng.randint(10**9)


def test_powersgd_may_begin_at_once_if_it_keeps_nothing():
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


class Bucket:
    """As much of a GradBucket as it takes to know its size."""

    def __init__(self, place, *shapes):
        self.place, self.shapes = place, shapes

    def index(self):
        return self.place

    def gradients(self):
        return [torch.zeros(shape) for shape in self.shapes]

    def buffer(self):
        return torch.cat([gradient.flatten() for gradient in self.gradients()])


BUCKETS = [Bucket(0, (8, 3, 4, 1), (5,)), Bucket(1, (3, 3), (20, 40))]  # 8 x 12, 20 x 40; the small ones are left
SIZES = {"q.0": 24, "error.0": 101, "q.1": 80, "error.1": 809}  # of rank 2: 2 i for each matrix [o, i]


def started(**params):
    power = bound("powersgd", matrix_approximation_rank=2, min_compression_rate=1.5, start_powerSGD_iter=5, **params)
    return power.start(None, 17)


def as_kept(steps, *without, **params):
    common, _ = started(**params).lasting()
    tensors = {name: torch.arange(float(size)) for name, size in SIZES.items() if name not in without}
    common |= {"steps": torch.tensor([steps]), **{name: tensors[name] for name in tensors if name[0] == "q"}}
    return common, {name: tensors[name] for name in tensors if name[0] == "e"}


def test_powersgd_goes_on_from_where_it_was():
    kept = as_kept(9)
    fresh = started()
    fresh.resume(*kept, BUCKETS)
    for found, expected in zip(fresh.lasting(), kept, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert [len(p) for p in fresh._state.p_memory_dict.values()] == [2 * 8, 2 * 20]


def test_its_generator_goes_on_too():
    one, other = started(), started()
    one._state.rng.randint(10**9, size=700)
    other.resume(*one.lasting(), BUCKETS)
    assert one._state.rng.randint(10**9, size=700).tolist() == other._state.rng.randint(10**9, size=700).tolist()


def test_it_goes_back_to_its_start():
    begun = started()
    start = begun.lasting()
    begun.resume(*as_kept(9), BUCKETS)
    begun.resume(*start, BUCKETS)
    common, own = begun.lasting()
    assert common.keys() == {"steps", "generator"}
    assert all(torch.equal(common[name], start[0][name]) for name in common)
    assert own == {}


def test_without_its_own_part_a_rank_has_nothing_left_over():
    common, _ = as_kept(9)
    fresh = started()
    fresh.resume(common, {}, BUCKETS)
    assert fresh.lasting()[1] == {}
    assert fresh.lasting()[0].keys() == common.keys()


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (as_kept(9, "q.1"), "lacks the tensor q.1"),
        (as_kept(9, "error.0"), "lacks the tensor error.0"),
        (({**as_kept(9)[0], "q.0": torch.zeros(23)}, {}), r"q.0 is float32 \[23\], and should be float32 \[24\]"),
        (({**as_kept(9)[0], "q.0": torch.zeros(24).double()}, {}), "q.0 is float64"),
        (({**as_kept(9)[0], "steps": torch.tensor([-1])}, {}), "out of range"),
        (({**as_kept(3)[0], "generator": torch.full((625,), 2**32)}, {}), "out of range"),
        (({**as_kept(3)[0], "generator": torch.full((625,), 625)}, {}), "out of range"),
        (({**as_kept(3)[0], "generator": torch.zeros(624, dtype=torch.int64)}, {}), r"and should be int64 \[625\]"),
        (({}, {}), "lacks the tensor steps"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(kept, why):
    with pytest.raises(RecordError, match=why):
        started().resume(*kept, BUCKETS)


def test_hooks_that_cannot_say_what_they_keep_are_known():
    assert bound("allreduce").start(None, 0).lasting() is None
    assert not bound("allreduce").keeps
    assert bound("tests.plugs:Shrunk").keeps
