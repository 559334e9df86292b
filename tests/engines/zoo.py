"""Small models of many kinds, and data for them, for tests of what can be stacked.

`PICTURES` take images [batch, 2, 8, 8], `TEXTS` take token numbers [batch, 6], and all have three classes. The models
in `REFUSED` cannot be stacked; each has the reason next to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fedsim.data import TensorData

WORDS, WIDTH, CLASSES = 20, 8, 3


def pictures(root):
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(61, 2, 8, 8, generator=generator), torch.arange(61) % CLASSES
    inputs[:, 0] += targets.view(-1, 1, 1)
    return TensorData(inputs[:51], targets[:51]), TensorData(inputs[51:], targets[51:])


def texts(root):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (61, 6), generator=generator)
    targets = tokens.sum(1) % CLASSES
    tokens[:, -1] = 0  # padding token of some models
    return tuple(TensorData(tokens[part], targets[part], dtype=torch.long) for part in (slice(51), slice(51, 61)))


def model(*, kind: str) -> nn.Module:
    """Return the model of this kind. In an experiment: `{"name": "tests.engines.zoo:model", "kind": ...}`."""
    made = {"in pieces": in_pieces, **PICTURES, **TEXTS, **{name: make for name, (make, _) in REFUSED.items()}}
    return made[kind]()


def experiment(kind):
    """Return the tables of an experiment with this model: uneven shards, short batches, one worker with one sample."""
    data = "texts" if kind in TEXTS or kind in REFUSED_TEXTS else "pictures"
    return {
        "rounds": 2,
        "workers": 5,
        "precision": "float64",
        "model": {"name": "tests.engines.zoo:model", "kind": kind},
        "data": f"tests.engines.zoo:{data}",
        "partition": "tests.engines.zoo:sizes_1_to_20",
        "local": {"batch_size": 4, "lr": 0.05, "momentum": 0.5},
    }


def sizes_1_to_20(labels, n_workers, rng):
    return np.split(rng.permutation(len(labels)), [1, 6, 14, 31][: n_workers - 1])


class Function(nn.Module):
    """A module with the given layers whose forward pass is `forward(self, inputs)`."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._forward(self, inputs)


def after(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))


def convolved(*layers: nn.Module, **options) -> nn.Module:
    """Return a model of a convolution, these layers, pooling and a linear layer."""
    conv = nn.Conv2d(2, 4, 3, **{"padding": 1, **options})
    return after(conv, *layers, nn.AdaptiveAvgPool2d(2), features=16)


def linear(forward: Callable[..., Tensor], **layers: nn.Module | nn.Parameter | Tensor) -> nn.Module:
    """Return a model with the forward pass `forward(self, outputs of a linear layer)`."""
    return Function(lambda self, x: forward(self, self.layer(x.flatten(1))), layer=nn.Linear(128, CLASSES), **layers)


def on_pixels(forward: Callable[..., Tensor]) -> nn.Module:
    """Return a model with a linear layer after `forward(pixels [batch, 128])`."""
    return Function(lambda self, x: self.layer(forward(x.flatten(1))), layer=nn.Linear(128, CLASSES))


def embedded(forward: Callable[..., Tensor], embedding: nn.Module | None = None, **layers: nn.Module) -> nn.Module:
    """Return a model with a linear layer after `forward(self, embedded tokens [batch, 6, 8])`."""
    table = embedding or nn.Embedding(WORDS, WIDTH)
    end = nn.Linear(WIDTH, CLASSES)
    return Function(lambda self, x: self.end(forward(self, self.table(x))), table=table, end=end, **layers)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def transformer(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return embedded(lambda self, h: self.encoder(h).mean(1), encoder=encoder)


def attention() -> nn.Module:
    heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    return embedded(lambda self, h: self.heads(h, h, h)[0].mean(1), heads=heads)


def recurrent(make: type[nn.RNNBase], hidden: int = WIDTH, **options) -> nn.Module:
    layers = make(WIDTH, hidden, batch_first=True, **options)
    return embedded(lambda self, h: self.layers(h)[0][:, -1], layers=layers)


def packed(sequences: Tensor) -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(sequences, [6] * len(sequences), batch_first=True)


def tied() -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.end(self.back(self.table(x).mean(1)))

    table, back = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    back.weight = table.weight
    return Function(forward, table=table, back=back, end=nn.Linear(WORDS, CLASSES))


def counting() -> nn.Module:
    """Return a model that changes an integer buffer in place and replaces the tensor of another buffer."""

    def forward(self: nn.Module, outputs: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs + 0.01 * self.steps + self.mean

    return linear(forward, steps=torch.zeros((), dtype=torch.long), mean=torch.zeros(CLASSES))


def clamping() -> nn.Module:
    """Return a model that changes its parameters in place."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.05, 0.05)
        return self.layer(x.flatten(1))

    return Function(forward, layer=nn.Linear(128, CLASSES))


def without_dimensions() -> nn.Module:
    """Return a model with an odd number of parameters (so rows are padded), one of them without elements."""
    scale, shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))
    none = nn.Parameter(torch.zeros(3, 0))
    return linear(lambda self, outputs: outputs * self.scale + self.shift, scale=scale, shift=shift, none=none)


def twice_normalised() -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(x)))
        return self.end(F.relu(self.norm(self.conv(hidden)) + x).flatten(1))

    layers = {"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.BatchNorm2d(2), "end": nn.Linear(128, CLASSES)}
    return Function(forward, **layers)


def hooked() -> nn.Module:
    network = linear(lambda self, outputs: outputs)
    network.layer.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    return network


def hooked_weight() -> nn.Module:
    network = linear(lambda self, outputs: outputs)
    network.layer.weight.register_hook(lambda gradient: 2 * gradient)
    return network


def aliased() -> nn.Module:
    network = Function(lambda self, x: F.linear(x.flatten(1), self.kept[0]), layer=nn.Linear(128, CLASSES))
    network.kept = [network.layer.weight]
    return network


def remembering() -> nn.Module:
    def forward(self: nn.Module, outputs: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return outputs

    return linear(forward)


def functional(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """Return a model with the forward pass `forward(inputs [batch, 128], weight [3, 128], bias [3])`."""
    weight, bias = nn.Parameter(torch.randn(CLASSES, 128) / 10), nn.Parameter(torch.zeros(CLASSES))
    return Function(lambda self, x: forward(x.flatten(1), self.weight, self.bias), weight=weight, bias=bias)


def in_training(change: Callable[[Tensor], Tensor]) -> nn.Module:
    return linear(lambda self, outputs: change(outputs) if self.training else outputs)


def experts() -> nn.Module:
    """Return a model whose two layers each process the samples that a mask selects."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        mine, outputs = pixels.mean(1) > 0, pixels.new_zeros(len(pixels), CLASSES)
        outputs[mine], outputs[~mine] = self.one(pixels[mine]), self.other(pixels[~mine])
        return outputs

    return Function(forward, one=nn.Linear(128, CLASSES), other=nn.Linear(128, CLASSES))


def in_pieces() -> nn.Module:
    return functional(lambda x, *layer: torch.cat([F.linear(piece, *layer) for piece in x.split(8)]))


def spectral() -> nn.Module:
    return nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(128, CLASSES)))


PICTURES: dict[str, Callable[[], nn.Module]] = {
    "convolution": convolved,
    "groups, stride, circular": lambda: convolved(groups=2, stride=2, padding_mode="circular"),
    "dilation, no bias": lambda: convolved(dilation=2, bias=False, padding="same"),
    "frozen convolution": lambda: after(frozen(nn.Conv2d(2, 4, 3)), nn.Tanh(), features=144),
    "frozen linear layer": lambda: nn.Sequential(nn.Flatten(), frozen(nn.Linear(128, 7)), nn.Linear(7, CLASSES)),
    "transposed convolution": lambda: after(nn.ConvTranspose2d(2, 4, 3, 2, groups=2), nn.MaxPool2d(4), features=64),
    "one dimension": lambda: after(nn.Flatten(2), nn.Conv1d(2, 4, 3, 2), features=124),
    "BatchNorm": lambda: convolved(nn.BatchNorm2d(4)),
    "BatchNorm without statistics": lambda: convolved(nn.BatchNorm2d(4, track_running_stats=False)),
    "BatchNorm without parameters": lambda: convolved(nn.BatchNorm2d(4, affine=False)),
    "BatchNorm frozen": lambda: convolved(frozen(nn.BatchNorm2d(4))),
    "BatchNorm twice": twice_normalised,
    "BatchNorm and dropout": lambda: convolved(nn.BatchNorm2d(4), nn.Dropout(0.3)),
    "GroupNorm": lambda: convolved(nn.GroupNorm(2, 4)),
    "LayerNorm": lambda: convolved(nn.LayerNorm([4, 8, 8])),
    "InstanceNorm": lambda: convolved(nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm with statistics": lambda: convolved(nn.InstanceNorm2d(4, track_running_stats=True)),
    "in place": lambda: convolved(nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True)),
    "channels in place": lambda: convolved(nn.Dropout2d(0.3, inplace=True), nn.SiLU(inplace=True)),
    "dropout": lambda: after(nn.Conv2d(2, 4, 3), nn.Dropout(0.4), features=144),
    "dropout of lines": lambda: after(nn.Flatten(2), nn.Conv1d(2, 4, 3), nn.Dropout1d(0.4), features=248),
    "dropout of channels": lambda: after(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), features=144),
    "dropout of volumes": lambda: after(nn.Unflatten(1, (2, 1)), nn.Dropout3d(0.4), features=128),
    "dropout of everything": lambda: linear(lambda self, outputs: F.dropout(outputs, 1.0, self.training)),
    "dropout twice": lambda: in_training(lambda outputs: outputs + F.dropout(F.dropout(outputs, 0.3), 0.2)),
    "buffers": counting,
    "clamped": clamping,
    "without dimensions": without_dimensions,
    "log-probabilities": lambda: linear(lambda self, outputs: F.log_softmax(outputs, 1)),
    "forward hook": hooked,
    "a layer without gradient": lambda: linear(lambda self, x: self.end(x.detach()), end=nn.Linear(CLASSES, CLASSES)),
    "centred batch": lambda: on_pixels(lambda pixels: pixels - pixels.mean(0)),
    "the last of a batch": lambda: on_pixels(lambda pixels: pixels + pixels[-1]),
    "the last of a batch, but for the first": lambda: on_pixels(
        lambda pixels: torch.cat([pixels[:1], pixels[1:] + pixels[-1:]])
    ),
    "its share of the batch": lambda: on_pixels(lambda pixels: pixels + torch.linspace(0, 1, len(pixels)).view(-1, 1)),
    "counts its samples": lambda: on_pixels(lambda pixels: pixels * len(pixels)),
    "branches by its samples": lambda: on_pixels(lambda pixels: pixels * (2 if len(pixels) == 4 else 1)),
    "linear, no bias": lambda: functional(lambda x, weight, bias: F.linear(x, weight) + bias),
    "linear, more dimensions": lambda: functional(lambda x, weight, bias: F.linear(x[:, None], weight, bias)[:, 0]),
    "linear, single samples": lambda: functional(lambda x, w, bias: torch.stack([F.linear(row, w, bias) for row in x])),
    "linear, transposed": lambda: functional(lambda x, weight, bias: F.linear(x, weight.t().contiguous().t(), bias)),
    "linear, one bias": lambda: functional(lambda x, weight, bias: F.linear(x, weight, x.new_ones(CLASSES)) + bias),
    "checkpoint": lambda: linear(lambda self, outputs: checkpoint(torch.tanh, outputs, use_reentrant=False)),
    "every other sample": lambda: on_pixels(lambda pixels: pixels * (1 + torch.arange(len(pixels)) % 2).view(-1, 1)),
    "halves of a batch": lambda: functional(
        lambda x, *layer: torch.cat([F.linear(half, *layer) for half in x.chunk(2)])
    ),
    "centred, if it is many": lambda: on_pixels(lambda pixels: pixels - pixels.mean(0) * (len(pixels) > 4)),
    "in place, the input": lambda: on_pixels(lambda pixels: pixels.sub_(1)),
    "einsum": lambda: functional(lambda x, weight, bias: torch.einsum("bi,oi->bo", x, weight) + bias),
}

TEXTS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "attention": attention,
    "recurrent cell": lambda: embedded(lambda self, h: self.cell(h[:, 1], self.cell(h[:, 0])), cell=nn.RNNCell(8, 8)),
    "LSTM": lambda: recurrent(nn.LSTM, num_layers=2),
    "LSTM without biases, both ways": lambda: recurrent(nn.LSTM, bias=False, bidirectional=True, hidden=4),
    "LSTM with a projection": lambda: recurrent(nn.LSTM, proj_size=8, hidden=9),
    "GRU": lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True, hidden=4),
    "RNN": lambda: recurrent(nn.RNN),
    "RNN of ReLU": lambda: recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "padding": lambda: embedded(lambda self, h: h.mean(1), nn.Embedding(WORDS, WIDTH, padding_idx=0)),
    "padding from behind": lambda: embedded(lambda self, h: h.mean(1), nn.Embedding(WORDS, WIDTH, padding_idx=-WORDS)),
    "tied": tied,
    "dropout of a transposed tensor": lambda: embedded(
        lambda self, h: F.dropout(h.transpose(1, 2), 0.4, self.training).mean(2)
    ),
    "dropout where samples stand second": lambda: embedded(
        lambda self, h: F.dropout(h.transpose(0, 1).contiguous().transpose(0, 1), 0.4, self.training).mean(1)
    ),
    "dropout of a slice": lambda: embedded(lambda self, h: F.dropout(h[:, ::2], 0.4, self.training).mean(1)),
    "dropout of an expanded tensor": lambda: embedded(
        lambda self, h: F.dropout(h[:, :1].expand(-1, 6, -1), 0.4, self.training).mean(1)
    ),
}

REFUSED_TEXTS = ("LSTM cell", "LSTM of packed sequences", "transformer with dropout", "embedding of bounded norm")
STATE = "a forward pass changes attributes or non-persistent buffers, which are not stored for each worker"
DRAWS = "the model draws random numbers outside of torch.nn.functional.dropout"
OTHERWISE = "the gradient of {} differs from that of a single model"
VMAP = "torch.func.vmap cannot run the model: "

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counts its calls": (remembering, STATE),
    "normal noise": (lambda: in_training(lambda outputs: outputs + torch.randn_like(outputs)), DRAWS),
    "noise of NumPy": (lambda: in_training(lambda outputs: outputs + np.random.rand()), DRAWS),
    "chance": (lambda: in_training(lambda outputs: outputs * 2 if random.random() < 1e-9 else outputs), DRAWS),
    "alpha dropout": (lambda: convolved(nn.AlphaDropout(0.2)), DRAWS),
    "torch.dropout": (lambda: in_training(lambda outputs: torch.dropout(outputs, 0.3, True)), DRAWS),
    "dropout of weights": (
        lambda: functional(lambda x, weight, bias: F.linear(x, F.dropout(weight, 0.3), bias)),
        "the model applies dropout to a tensor whose first dimension is not the batch",
    ),
    "dropout for few": (
        lambda: in_training(lambda outputs: F.dropout(outputs, 0.3) if len(outputs) < 4 else outputs),
        "the model's dropout calls differ between forward passes",
    ),
    "BatchNorm without momentum": (lambda: convolved(nn.BatchNorm2d(4, momentum=None)), f"{VMAP}RuntimeError"),
    "control flow": (lambda: in_training(lambda outputs: outputs * 2 if outputs.sum() > 0 else outputs), VMAP),
    "layer in a checkpoint": (
        lambda: functional(lambda x, *layer: checkpoint(F.linear, x, *layer, use_reentrant=False)),
        VMAP,
    ),
    "layer in a reentrant checkpoint": (
        lambda: functional(
            lambda x, *layer: checkpoint(
                lambda pixels: F.linear(pixels, *layer), x.requires_grad_(), use_reentrant=True
            )
        ),
        VMAP,
    ),
    "experts": (experts, VMAP),
    "spectral norm": (spectral, VMAP),
    "hooked weight": (hooked_weight, OTHERWISE.format("layer.weight")),
    "aliased weight": (aliased, OTHERWISE.format("layer.weight")),
    "LSTM cell": (
        lambda: embedded(lambda self, h: self.cell(h[:, 0])[0], cell=nn.LSTMCell(WIDTH, WIDTH)),
        f"{VMAP}RuntimeError: Batching rule not implemented for aten::lstm_cell (in one batch of several workers: the "
        "model's operations depend on the size or the values of a batch (lstm_cell is called with parameters",
    ),
    "LSTM of packed sequences": (
        lambda: embedded(lambda self, h: self.layers(packed(h))[1][0][-1], layers=nn.LSTM(WIDTH, WIDTH)),
        VMAP,
    ),
    "transformer with dropout": (lambda: transformer(0.2), DRAWS),
    "embedding of bounded norm": (
        lambda: embedded(lambda self, h: h.mean(1), nn.Embedding(WORDS, WIDTH, max_norm=9.0)),
        "the model has an embedding with max_norm, scale_grad_by_freq or sparse",
    ),
}
