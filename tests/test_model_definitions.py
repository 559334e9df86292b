"""Comparison of char_lstm, gpt and a ResNet with BatchNorm with their definitions in float64.

The forward passes are written here from the definitions, as functions of the parameters by name.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedsim.models import model as models
from tests.real_models import CHAR_LSTM, GPT, RESNET, noise, text
from tests.textbook import start_of


def lstm_logits(p, characters):
    """The recurrence of Hochreiter & Schmidhuber 1997 with forget gates (Gers et al. 2000)."""
    hidden = p["embedding.weight"][characters]
    for layer in range(2):
        w, u, b = (p[f"lstm.{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias"))
        h = c = hidden.new_zeros(len(hidden), u.shape[1])
        steps = []
        for t in range(hidden.shape[1]):
            i, f, g, o = (hidden[:, t] @ w.T + h @ u.T + b).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            steps.append(h)
        hidden = torch.stack(steps, 1)
    return hidden @ p["head.weight"].T + p["head.bias"]


def gpt_logits(p, tokens):
    """Pre-norm blocks (Radford et al. 2019), with attention as a softmax over the positions up to the present one."""

    def normalised(name, x):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    def layer(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    length, heads = tokens.shape[1], 2
    x = p["tokens.weight"][tokens] + p["positions.weight"][:length]
    for block in ("blocks.0", "blocks.1"):
        q, k, v = layer(f"{block}.attention", normalised(f"{block}.norm1", x)).chunk(3, 2)
        mixed = []
        for q_head, k_head, v_head in zip(*(part.chunk(heads, 2) for part in (q, k, v)), strict=True):
            scores = q_head @ k_head.mT / math.sqrt(q_head.shape[2])
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed.append(scores.masked_fill(future, -math.inf).softmax(2) @ v_head)
        x = x + layer(f"{block}.attention_out", torch.cat(mixed, 2))
        x = x + layer(f"{block}.contract", F.gelu(layer(f"{block}.expand", normalised(f"{block}.norm2", x))))
    return normalised("norm", x) @ p["tokens.weight"].T


def resnet_logits(p, images):
    """Section 4.2 of He et al. 2016 with n = 3 and option A; the running statistics in `p` change."""

    def normalised(name, x):
        statistics = p[f"{name}.running_mean"], p[f"{name}.running_var"]
        return F.batch_norm(x, *statistics, p[f"{name}.weight"], p[f"{name}.bias"], training=True, momentum=0.1)

    x = F.relu(normalised("1", F.conv2d(images, p["0.weight"], padding=1)))
    for block in range(9):
        stride, name = 2 if block in (3, 6) else 1, str(3 + block)
        h = F.relu(normalised(f"{name}.norm1", F.conv2d(x, p[f"{name}.conv1.weight"], stride=stride, padding=1)))
        h = normalised(f"{name}.norm2", F.conv2d(h, p[f"{name}.conv2.weight"], padding=1))
        if stride == 2:
            few = x[:, :, ::2, ::2]
            x = few.new_zeros(h.shape)
            start = few.shape[1] // 2
            x[:, start : start + few.shape[1]] = few
        x = F.relu(x + h)
    return x.mean((2, 3)) @ p["14.weight"].T + p["14.bias"]


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("logits", "loss", "tables", "data"),
    [
        (lstm_logits, token_loss, CHAR_LSTM, text(None)),
        (gpt_logits, token_loss, GPT, text(None)),
        (resnet_logits, F.cross_entropy, RESNET, noise(None, shape=(3, 8, 8), classes=3)),
    ],
    ids=["char_lstm", "gpt", "resnet20"],
)
def test_outputs_gradients_and_buffers_are_those_of_the_definition(logits, loss, tables, data):
    name, params = tables["model"]["name"], {k: v for k, v in tables["model"].items() if k != "name"}
    model = start_of(lambda: models.get(name).target(**params)).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    leaves = {name: state[name].requires_grad_() for name, _ in model.named_parameters()}
    inputs, targets = data[0].to(torch.device("cpu"), torch.float64).gather(torch.arange(8))
    outputs, expected = model(inputs), logits({**state, **leaves}, inputs)
    assert torch.allclose(outputs, expected, rtol=0, atol=1e-9)
    ours = torch.autograd.grad(loss(outputs, targets), list(model.parameters()))
    theirs = torch.autograd.grad(loss(expected, targets), list(leaves.values()))
    assert all(torch.allclose(*pair, rtol=0, atol=1e-9) for pair in zip(ours, theirs, strict=True))
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer.double(), state[name].double() + ("num_batches" in name), rtol=0, atol=1e-12), name
