"""One stored round taken through many rules: what would each have done?"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.engines import Engine
from fedsim.preparation import Setting
from fedsim.records import RoundRecord


def kept_updates(setting: Setting, engine: Engine, record: RoundRecord) -> dict[str, Tensor]:
    """What the rule was given in the round that has just ended, on the CPU; see `RunFolder.updates`.

    With sync = "gradients" that is the last step's gradients of the whole cohort.
    """
    memory, cohort, rule = engine.memory, record["cohort"], setting.task.rule
    n = len(cohort)
    kept = {
        "updates": memory.rows[:n],
        "workers": torch.tensor(cohort),
        "samples": torch.tensor([setting.shard_sizes[worker] for worker in cohort]),
        "byzantine": torch.tensor([worker in setting.task.byzantine for worker in cohort]),
    }
    if rule.takes("root"):
        kept["root"] = memory.rows[n]
    if rule.takes("losses"):
        kept["losses"] = memory.losses[:n]
    return {name: tensor.cpu().clone() for name, tensor in kept.items()}
