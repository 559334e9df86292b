"""A rank that trains a model with Lightning and a rule, and saves the parameters."""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
import warnings

import torch

from fedsim.system.packages import import_torchvision
from tests.integrations.ddp_program import STEPS, loss, new_model

import_torchvision()  # Lightning imports torchvision, even if it does not fit this PyTorch build

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from fedsim.integrations.lightning import RobustGradients


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = new_model()

    def training_step(self, batch, step):
        return loss(self.model, self.global_rank, step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(STEPS * int(os.environ["WORLD_SIZE"])), batch_size=1)


def main(folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": os.environ["RANK"], "NODE_RANK": "0"}
    warnings.simplefilter("ignore")
    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[RobustGradients("krum", f=0)],
        max_epochs=1,
        **quiet,
    ).fit(module)
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    torch.save(parameters, f"{folder}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
