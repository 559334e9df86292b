"""Every server optimizer with its main parameters, and its definition for single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.server import ServerOptimizer, server_optimizer

ALL = list(server_optimizer)
VARIANTS = [(plug.name, {}) for plug in ALL] + [
    ("momentum", {"nesterov": True}),
    ("bmuf", {"nesterov": True, "zeta": 0.7}),
    ("slowmo", {"alpha": 0.9, "lr": 0.05}),
    ("adam", {"bias_correction": True}),
    ("adam", {"v0": "tau^2"}),
    ("yogi", {"bias_correction": True}),
    ("adagrad", {"bias_correction": True, "v0": 0.5}),
]
EXACT = {"rtol": 0, "atol": 1e-12}

every = pytest.mark.parametrize("plug", ALL, ids=lambda plug: plug.name)
every_variant = pytest.mark.parametrize(("name", "params"), VARIANTS, ids=lambda value: str(value))


def path(name, row, updates, **params):
    """The global row after each update, [steps, d]."""
    server, rows = ServerOptimizer(name, **params), []
    for update in updates:
        row = server.step(row, update)
        rows.append(row)
    return torch.stack(rows)


def numbers(*values):
    return torch.tensor(values, dtype=torch.double)


def plain_sgd(w, updates, *, lr):
    for d in updates:
        w = w + lr * d
        yield w


def plain_momentum(w, updates, *, lr, beta, nesterov=False):
    v = 0.0
    for d in updates:
        v = beta * v + d
        w = w + lr * (d + beta * v if nesterov else v)
        yield w


def plain_slowmo(w, updates, *, alpha, beta, lr):
    u = 0.0
    for d in updates:
        average = w + d
        u = beta * u + (w - average) / lr
        w = w - alpha * lr * u
        yield w


def plain_bmuf(w, updates, *, bm, zeta):
    delta = 0.0
    for d in updates:
        delta = bm * delta + zeta * d
        w = w + delta
        yield w


def plain_fedopt(w, updates, *, grow, lr, beta1, tau, v0=0.0, beta2=None, bias_correction=False):
    m, v = 0.0, v0
    for t, d in enumerate(updates, 1):
        m = beta1 * m + (1 - beta1) * d
        v = grow(v, d, beta2)
        m_hat = m / (1 - beta1**t) if bias_correction else m
        v_hat = v / (1 - beta2**t) if bias_correction and beta2 is not None else v
        w = w + lr * m_hat / (v_hat**0.5 + tau)
        yield w


def adam_grows(v, d, beta2):
    return beta2 * v + (1 - beta2) * d**2


def yogi_grows(v, d, beta2):
    return v - (1 - beta2) * d**2 * np.sign(v - d**2)


def adagrad_grows(v, d, beta2):
    return v + d**2


PLAIN = {
    "sgd": plain_sgd,
    "momentum": plain_momentum,
    "diloco": lambda w, updates, **params: plain_momentum(w, updates, nesterov=True, **params),
    "slowmo": plain_slowmo,
    "bmuf": plain_bmuf,
    "adam": lambda w, updates, **params: plain_fedopt(w, updates, grow=adam_grows, **params),
    "yogi": lambda w, updates, **params: plain_fedopt(w, updates, grow=yogi_grows, **params),
    "adagrad": lambda w, updates, **params: plain_fedopt(w, updates, grow=adagrad_grows, **params),
}
