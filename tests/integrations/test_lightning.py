"""The callback for Lightning, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.system.packages import import_torchvision
from tests.commands import ended, start_ranks
from tests.integrations.test_ddp import in_one_process

import_torchvision()  # Lightning imports torchvision, even if it does not fit this PyTorch build
pytest.importorskip("lightning", reason="needs the package lightning")
PROGRAM = Path(__file__).parent / "lightning_program.py"


def test_lightning_trains_as_a_loop_that_aggregates_the_gradients_of_the_ranks(tmp_path):
    codes, _, errors = ended(start_ranks(3, PROGRAM, tmp_path, cwd=tmp_path), 120)
    assert codes == [0] * 3, errors
    expected = in_one_process("krum", {"f": 0}, ranks=3)[-1]
    for rank in range(3):
        assert torch.allclose(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-6)


def test_a_strategy_without_ranks_is_an_error():
    from lightning.pytorch import Trainer

    from fedsim.integrations.lightning import RobustGradients

    with pytest.raises(fedsim.ExperimentError, match=r"^g = 1: unknown key \(the aggregation rule is krum\)"):
        RobustGradients("krum", g=1)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(fedsim.ExperimentError, match="^RobustGradients: .* but the strategy is Single"):
        RobustGradients("krum", f=1).on_train_start(trainer, None)
