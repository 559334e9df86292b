"""Parameters that let every rule and pre-aggregator run."""

from __future__ import annotations

import torch


def parameters_of(plug, updates, f=1):
    """The arguments of `fedsim.aggregate` that a rule needs: f, c, root, losses."""
    values = {"f": f, "c": 1.0 if plug.name == "dnc" else 2.0}
    params = {name: value for name, value in values.items() if name in plug.parameters.model_fields}
    if "root" in plug.takes:
        params["root"] = updates[:3].double().mean(0).to(updates.dtype)
    if "losses" in plug.takes:
        params["losses"] = torch.arange(1.0, len(updates) + 1)
    return params
