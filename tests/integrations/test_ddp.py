"""The communication hook equals a loop in one process that aggregates the gradients of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.integrations.ddp import set_gradients
from tests.commands import ended, start_ranks
from tests.integrations.ddp_program import STEPS, loss, new_model

PROGRAM = Path(__file__).parent / "ddp_program.py"
RANKS = 4
CASES = {
    "mean": ("mean", {}),
    "weighted_mean": ("weighted_mean", {}),
    "trimmed_mean": ("trimmed_mean", {"f": 1}),
    "krum": ("krum", {"f": 0}),
    "nnm": (["nnm", "median"], {"f": 1}),
    "centered_clipping": ("centered_clipping", {"tau": 0.1}),
    "foolsgold": ("foolsgold", {}),
    "dnc": ("dnc", {"f": 1}),
}

REFUSED = {"krum": ("krum", {"f": 2}), "trimmed_mean": ("trimmed_mean", {"f": 2})}


def in_one_process(rule, params, ranks=RANKS):
    model = new_model()
    parameters, steps, last = list(model.parameters()), [], None
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss(model, rank, step), parameters) for rank in range(ranks)]
        set_gradients(parameters, gradients, rule, last=last, **params)
        last = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        torch.optim.SGD(parameters, lr=0.1).step()
        steps.append(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    return torch.stack(steps)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return each rank's parameters after each step, by case, and each rank's output."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = json.dumps(REFUSED | {f"{name}.": case for name, case in CASES.items()})
    codes, printed, errors = ended(start_ranks(RANKS, PROGRAM, cases, folder, cwd=folder), 120)
    assert codes == [0] * RANKS, errors
    return {name: [torch.load(folder / f"{name}.-{rank}.pt") for rank in range(RANKS)] for name in CASES}, printed


@pytest.fixture
def steps(trained):
    return trained[0]


@pytest.mark.parametrize("name", CASES)
def test_the_hook_aggregates_whole_gradients_though_there_are_several_buckets(name, steps):
    """All ranks are bit-identical after each step. A single process has neither foolsgold's memory nor dnc's draws."""
    assert all(torch.equal(steps[name][0], other) for other in steps[name])
    if name not in ("foolsgold", "dnc"):
        assert torch.allclose(steps[name][0], in_one_process(*CASES[name]), atol=1e-6)


def test_a_stateful_rule_keeps_its_state_from_step_to_step(steps):
    without_state = in_one_process("foolsgold", {})
    assert torch.allclose(steps["foolsgold"][0][0], without_state[0], atol=1e-6)
    assert not torch.allclose(steps["foolsgold"][0][-1], without_state[-1], atol=1e-6)


def test_a_rule_that_refuses_the_gradients_ends_the_step_on_all_ranks(trained):
    for text in trained[1]:
        assert [line.partition(": needs")[0] for line in text.splitlines()] == [f"{name}: {name}" for name in REFUSED]


def test_gradients_that_do_not_fit_the_parameters_are_an_error():
    weight = torch.nn.Parameter(torch.zeros(2))
    set_gradients([weight], [[None], [torch.ones(2)]])
    assert weight.grad.tolist() == [0.5, 0.5]
    with pytest.raises(fedsim.ExperimentError, match=r"^gradients\[1\]: contains 0 gradients for 1 parameters; "):
        set_gradients([weight], [[torch.ones(2)], []])
    with pytest.raises(
        fedsim.ExperimentError, match=r"^gradients\[0\]\[0\]: must have shape \(2,\) as in parameters\[0\]\[0\]"
    ):
        set_gradients([weight], [[torch.ones(3)]])
