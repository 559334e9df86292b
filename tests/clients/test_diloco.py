"""DiLoCo, Muon and Streaming DiLoCo, compared with plain loops in float64, with PyTorch, and with counts of bytes."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice

import pytest
import torch

import fedsim
from fedsim.clients import Muon
from fedsim.clients.muon import orthogonalized
from fedsim.core.rows import Layout
from tests import components, models
from tests.textbook import Federation

WORKERS, ROUNDS, STEPS, LR = 4, 7, 4, 0.01
SHAPES = [(6, 784), (6,), (10, 6), (10,)]
SIZES = [math.prod(shape) for shape in SHAPES]
FRAGMENTS = {1: [sum(SIZES)], 2: [SIZES[0], sum(SIZES[1:])], 3: [SIZES[0], SIZES[1], sum(SIZES[2:])]}
TABLES = {
    **{"workers": WORKERS, "rounds": ROUNDS, "model": {"name": "tests.models:sized", "hidden": [6]}},
    **{"data": "tests.components:tiny", "partition": "tests.components:uneven", "precision": "float64"},
    **{"server": "diloco", "records": {"figures": []}, "engine": "serial"},
}


def experiment(algorithm="adamw", fragments=None, **changes):
    local = {"algorithm": algorithm, "batch_size": 16, "steps": STEPS, "lr": LR, "keep_optimizer_state": True}
    return {**TABLES, "local": {**local, **({"fragments": fragments} if fragments else {})}, **changes}


class PlainAdamW:
    """AdamW for one worker, written from Loshchilov and Hutter 2019."""

    def __init__(self, decay=0.01):
        self.m = self.v = self.t = 0
        self.decay = decay

    def __call__(self, x, g):
        self.t, self.m, self.v = self.t + 1, 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return x - LR * self.decay * x - LR * m / (v.sqrt() + 1e-8)


class PlainMuon:
    """Muon for the matrices of one worker, where the polynomial acts on singular values, and AdamW for biases."""

    def __init__(self):
        self.b, self.adamw = 0, PlainAdamW()

    def __call__(self, x, g):
        self.b, moved = 0.95 * self.b + 0.05 * g, self.adamw(x, g)
        along = (0.05 * g + 0.95 * self.b).split(SIZES)
        parts = list(moved.split(SIZES))
        for number, (shape, update) in enumerate(zip(SHAPES, along, strict=True)):
            if len(shape) == 2:
                old = x.split(SIZES)[number].view(shape)
                step = LR * max(1, shape[0] / shape[1]) ** 0.5 * with_polynomial(update.view(shape))
                parts[number] = (old - LR * 0.1 * old - step).flatten()
        return torch.cat(parts)


def with_polynomial(matrix, steps=5):
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def streaming(make, count=1, delay=0, mixing=0.0, sent=1.0):
    """Streaming DiLoCo with one parameter vector per worker. With one fragment and without delay, this is DiLoCo.

    A worker sends the share `sent` of its changes, and adds the rest to the next change of the same fragment.
    """
    fed = Federation(partial(models.sized, hidden=(6,)), components.tiny, WORKERS, 16, "tests.components:uneven")
    ends = torch.tensor([0, *FRAGMENTS[count]]).cumsum(0).tolist()
    optimizers, own = [make() for _ in range(WORKERS)], [fed.row.clone() for _ in range(WORKERS)]
    left = [torch.zeros_like(fed.row) for _ in range(WORKERS)]
    velocity, arriving = torch.zeros_like(fed.row), None
    for round in range(1, ROUNDS + 1):
        for k in range(WORKERS):
            x = own[k]
            for step, batch in enumerate([*islice(fed.batches(round, k), STEPS), None]):
                if arriving and step == delay:
                    x = x.clone()
                    x[arriving] = mixing * x[arriving] + (1 - mixing) * fed.row[arriving]
                if batch:
                    x = optimizers[k](x, fed.gradient(x, batch))
            own[k] = x
        p = (round - 1) % count
        arriving = slice(ends[p], ends[p + 1])
        changes = {k: own[k][arriving] - fed.row[arriving] + left[k][arriving] for k in range(WORKERS)}
        for k, change in changes.items():
            left[k][arriving] = (1 - sent) * change
        change = sent * fed.average(changes)
        velocity[arriving] = 0.9 * velocity[arriving] + change
        fed.row = fed.row.clone()
        fed.row[arriving] += 0.7 * (change + 0.9 * velocity[arriving])
    return fed.row


VARIANTS = [
    *({"count": 1}, {"count": 3}, {"count": 3, "delay": 2, "mixing": 0.5}),
    *({"count": 2, "delay": STEPS, "mixing": 0.25}, {"count": 1, "delay": 1}),
]


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("fragments", VARIANTS, ids=str)
def test_a_run_equals_plain_loops(algorithm, fragments):
    make = {"adamw": PlainAdamW, "muon": PlainMuon}[algorithm]
    result = fedsim.run(experiment(algorithm, fragments))
    torch.testing.assert_close(result.global_row, streaming(make, **fragments), rtol=0, atol=1e-10)


QSGD = {"name": "qsgd", "levels": 7}  # 4 bits: 15 levels of a sign and a magnitude


@pytest.mark.parametrize("processors", [[], [QSGD]], ids=["whole numbers", "4 bits"])
@pytest.mark.parametrize("count", FRAGMENTS)
@pytest.mark.parametrize("delay", [0, 2])
def test_workers_send_and_receive_one_fragment_in_each_round(count, delay, processors):
    """All workers receive the initial model of d numbers, and then the fragment of the round before."""
    history = fedsim.run(experiment(fragments={"count": count, "delay": delay}, processors=processors)).history
    widths = [FRAGMENTS[count][round % count] for round in range(ROUNDS)]
    up = [8 + math.ceil(4 * width / 8) if processors else 8 * width for width in widths]
    assert [record["bytes_up"] for record in history] == [WORKERS * nbytes for nbytes in up]
    received = [sum(SIZES), *widths[:-1]]
    assert [record["bytes_down"] for record in history] == [WORKERS * 8 * width for width in received]


def test_communication_hides_behind_the_delay_on_the_virtual_clock():
    """While a fragment is sent and received, a worker trains for `delay` seconds."""
    clock = {"mode": "clock", "clock": {"latency": 1.0, "bandwidth": 8.0 * SIZES[0]}}
    times = {}
    for delay in (0, 1, 4):
        history = fedsim.run(experiment(fragments={"count": 2, "delay": delay}, **clock)).history
        times[delay] = [record["virtual_seconds"] for record in history]
    rest = sum(SIZES[1:]) / SIZES[0]
    travel = [1 + (1 + rest) + 1, *[1 + 1 + rest] * (ROUNDS - 1)]  # in each round, two different fragments
    for delay, seconds in times.items():
        lengths = [STEPS + max(0, time - delay) for time in travel]
        assert seconds == pytest.approx([sum(lengths[: round + 1]) for round in range(ROUNDS)])


@pytest.mark.parametrize("fragments", VARIANTS[1:3], ids=str)
def test_a_resumed_run_is_bit_identical(fragments, tmp_path):
    """The checkpoint is taken when a fragment has been sent, but has not arrived."""
    chain = [{"name": "top_k", "ratio": 0.2, "error_feedback": True}, "qsgd"]
    tables = experiment("muon", fragments, processors=chain)
    whole = fedsim.run(tables).global_row
    for rounds in (3, ROUNDS):
        resumed = fedsim.run({**tables, "rounds": rounds, "checkpoint": {"every": 1}}, tmp_path / "run", resume=True)
    assert torch.equal(resumed.global_row, whole)


def test_error_feedback_keeps_one_residual_for_each_fragment():
    """The residual of a fragment is added when this fragment is sent again, as in plain loops."""
    half = {"name": "tests.processing.test_processing:half", "error_feedback": True}
    fragments = {"count": 3, "delay": 2, "mixing": 0.5}
    result = fedsim.run(experiment(fragments=fragments, processors=[half]))
    expected = streaming(PlainAdamW, **fragments, sent=0.5)
    torch.testing.assert_close(result.global_row, expected, rtol=0, atol=1e-10)


def test_fragments_have_about_equal_sizes():
    """All numbers of fragments of a transformer's tensors are possible, and no fragment is empty."""
    layout = Layout.of(fedsim.models.GPT(layers=2, width=16, heads=2))
    for count in range(1, len(layout.parameters) + 1):
        streamed = fedsim.clients.Streamed(fedsim.clients.SGD(), count)
        parts = streamed.fragments(layout)
        assert [entry for part in parts for entry in part] == list(layout.parameters)
        assert all(parts)
        assert len(parts) == count


def test_only_the_fragment_of_a_round_moves_and_noise_and_attacks_stay_in_it():
    """The server's noise, and an attacker's random numbers, are in the sent parameters only."""
    start = fedsim.run(experiment(rounds=1, server={"name": "sgd", "lr": 0.0})).global_row
    privacy = {"privacy": {"mechanism": "central", "clip": 0.3, "noise": 0.1}}
    local_privacy = {"privacy": {"mechanism": "local", "clip": 0.3, "noise": 0.1}}
    attack = {"attack": {"name": "gaussian", "workers": [1]}, "aggregate": "median"}
    for changes in (privacy, local_privacy, attack):
        row = fedsim.run(experiment(fragments={"count": 3}, rounds=1, **changes)).global_row
        assert torch.equal(row[SIZES[0] :], start[SIZES[0] :])
        assert not torch.isclose(row[: SIZES[0]], start[: SIZES[0]], rtol=0, atol=1e-9).any()


MODEL = [(5, 7), (7, 5), (3,), (1, 4)]


def muon_paths(dtype, **params):
    """Return the parameters after 5 steps with the same gradients, of `Muon`, and of PyTorch's Muon and AdamW."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in MODEL]
    ours, theirs = (torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in values]) for _ in range(2))
    algorithm, layout = Muon(lr=0.1, **params).for_model(ours), Layout.of(ours)
    row = layout.read(ours)
    state, matrices = algorithm.start(row), [parameter for parameter in theirs if parameter.ndim == 2]
    others = [parameter for parameter in theirs if parameter.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.1, **params), torch.optim.AdamW(others, lr=0.1)]
    for _ in range(5):
        gradient = torch.randn(layout.d, generator=generator, dtype=dtype)
        for entry, parameter in zip(layout.parameters, theirs, strict=True):
            parameter.grad = gradient[entry.span].view(entry.shape).clone()
        for optimizer in optimizers:
            optimizer.step()
        algorithm.step_rows(row, gradient, state, None)
    return row, layout.read(theirs)


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is new in PyTorch 2.9")
PARAMS = [
    *({}, {"nesterov": False, "momentum": 0.8}),
    *({"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}, {"ns_steps": 2, "eps": 1e-3}),
]


@needs_muon
@pytest.mark.parametrize("params", PARAMS)
def test_muon_is_torch_optim_muon_up_to_its_bfloat16(params, monkeypatch):
    ours, theirs = muon_paths(torch.float64, **params)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.testing.assert_close(*muon_paths(torch.float64, **params), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 9), (4, 4), (20, 50), (2, 50, 20)])
def test_the_iteration_sets_singular_values_to_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = orthogonalized(matrices, 5, 1e-7)
    expected = torch.stack([with_polynomial(matrix) for matrix in matrices.view(-1, *shape[-2:])]).view(shape)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)
    values = torch.linalg.svdvals(result)
    assert bool(((values > 0.65) & (values < 1.25)).all())


def test_muon_leaves_embeddings_tied_heads_and_named_matrices_to_adamw():
    gpt = fedsim.models.GPT(layers=1, width=16, heads=2)  # whose output layer shares the weights of its embedding
    blocks = [f"blocks.0.{name}.weight" for name in ("attention", "attention_out", "expand", "contract")]
    assert [entry.name for entry in Muon().for_model(gpt).matrices] == blocks
    assert [entry.name for entry in Muon(adamw=["*.expand", "*.contract"]).for_model(gpt).matrices] == blocks[:2]
