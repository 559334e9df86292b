"""Every element-wise client algorithm, with parameters that switch on all of its terms."""

from __future__ import annotations

import pytest

from fedsim.clients import client_algorithm

VARIANTS = {
    "sgd": ("sgd", {}),
    "sgd with momentum": ("sgd", {"momentum": 0.9}),
    "sgd with weight decay": ("sgd", {"weight_decay": 0.1}),
    "sgd with all": ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd with dampening": ("sgd", {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1}),
    "dp_sgd": ("dp_sgd", {"momentum": 0.5, "weight_decay": 0.01}),
    "fedprox": ("fedprox", {"mu": 0.5}),
    "fedprox with dampening": ("fedprox", {"mu": 0.5, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "fedprox with all": ("fedprox", {"mu": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "fedprox that pulls nowhere": ("fedprox", {"mu": 0.0, "momentum": 0.9, "weight_decay": 0.01}),
    "mimelite": ("mimelite", {"beta": 0.5}),
    "scaffold": ("scaffold", {}),
    "scaffold with weight decay": ("scaffold", {"weight_decay": 0.1, "option": 1}),
    "fednova": ("fednova", {}),
    "fednova with all": ("fednova", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "feddyn": ("feddyn", {"alpha": 0.5}),
    "feddyn with all": ("feddyn", {"alpha": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("adam", {}),
    "adam with all": ("adam", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    "adam without memory": ("adam", {"beta1": 0.0, "beta2": 0.0}),
    "adamw": ("adamw", {"weight_decay": 0.1}),
    "adamw with all": ("adamw", {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2, "amsgrad": True}),
    "adagrad": ("adagrad", {}),
    "adagrad with all": (
        "adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ),
    "fedper": ("fedper", {"personal": ["*"], "momentum": 0.5}),
    "lg_fedavg": ("lg_fedavg", {"personal": ["*"], "weight_decay": 0.1}),
    "fedbn": ("fedbn", {"momentum": 0.9, "nesterov": True}),
    "moon": ("moon", {"momentum": 0.5}),
    "ifca": ("ifca", {"k": 2, "momentum": 0.5, "weight_decay": 0.1}),
    "local_only": ("local_only", {"momentum": 0.5}),
}

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def made(variant, lr=0.1):
    """Return the client algorithm of a variant."""
    name, params = VARIANTS[variant]
    registration = client_algorithm.get(name)
    return registration.bind(registration.check({"lr": lr, **params}))
