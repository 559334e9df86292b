"""Models that predict the next token: a character LSTM and a small transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.numbers import FractionBelowOne, PositiveInt
from fedsim.errors import ExperimentError
from fedsim.models.base import model


class LSTM(nn.Module):
    """LSTM layers that map [batch, length, inputs] to [batch, length, hidden]. The initial state is zero.

    Equivalent to `torch.nn.LSTM` with `batch_first=True` and `bias_hh` = 0.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for layer in range(layers):
            for name, shape in (
                (f"weight_ih_l{layer}", (4 * hidden, hidden if layer else inputs)),
                (f"weight_hh_l{layer}", (4 * hidden, hidden)),
                (f"bias_l{layer}", (4 * hidden,)),
            ):
                bound = hidden**-0.5
                self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
            with torch.no_grad():
                self.get_parameter(f"bias_l{layer}")[hidden : 2 * hidden] += 1  # gates: input, forget, cell, output

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(self.layers, len(x), self.hidden)
        no_bias = x.new_zeros(4 * self.hidden)  # `torch.lstm` adds two biases
        parameters = list[Tensor]()
        for layer in range(self.layers):
            names = f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_l{layer}"
            parameters += [*(getattr(self, name) for name in names), no_bias]
        return torch.lstm(x, (zeros, zeros), parameters, True, self.layers, 0.0, self.training, False, True)[0]


@model("char_lstm", stacked="merged")
class CharLSTM(nn.Module):
    """Character LSTM of LEAF (Caldas et al. 2018): 820,522 parameters for 90 characters, as in Reddi et al. 2021.

    An embedding of width 8 is followed by two LSTM layers of 256 units and a linear layer. The outputs are logits for
    the character after each position, [batch, length, classes], for the task next_token. The LSTM has one
    bias per gate, and the initial bias of the forget gates is increased by 1.

    Args:
        vocabulary: number of characters in the inputs.
        classes: number of classes of the outputs: the characters, for the task next_token.
        embedding: width of the embedding.
        hidden: number of units of a layer.
        layers: number of LSTM layers.
        last_only: whether to return only the logits after the last position, [batch, classes], for the task
            classification, as LEAF does.

    >>> fedsim.models.CharLSTM(vocabulary=30, classes=30)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 30])
    """

    def __init__(
        self,
        *,
        vocabulary: PositiveInt = 90,
        classes: PositiveInt = 90,
        embedding: PositiveInt = 8,
        hidden: PositiveInt = 256,
        layers: PositiveInt = 2,
        last_only: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = LSTM(embedding, hidden, layers)
        self.head = nn.Linear(hidden, classes)
        self.last_only = last_only

    def forward(self, characters: Tensor) -> Tensor:
        hidden = self.lstm(self.embedding(characters))
        return self.head(hidden[:, -1] if self.last_only else hidden)


class TransformerBlock(nn.Module):
    """Causal self-attention and a perceptron, each preceded by a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.attention_out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.contract(F.gelu(self.expand(self.norm2(x)))))


@model("gpt", stacked="merged")
class GPT(nn.Module):
    """Decoder-only transformer like GPT-2 (Radford et al. 2019): 815,104 parameters by default.

    Token and position embeddings are followed by blocks of causal self-attention and a perceptron of four times the
    width with GELU, each with a LayerNorm before it (pre-norm), and a final LayerNorm. The output layer shares its
    weights with the token embedding. Weights are drawn from N(0, 0.02^2), those of the last layer in a residual branch
    from N(0, 0.02^2 / (2 layers)). The outputs are logits [batch, length, classes] for the task next_token.

    Args:
        layers: number of blocks.
        heads: number of attention heads, a divisor of `width`.
        width: width of the embeddings.
        context: maximum length of the inputs [batch, length].
        classes: number of tokens.
        dropout: dropout probability after the embeddings and in the residual branches, 0 <= dropout < 1.

    >>> fedsim.models.GPT(layers=1, width=16, heads=2, classes=30)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 30])
    """

    def __init__(
        self,
        *,
        layers: PositiveInt = 4,
        heads: PositiveInt = 4,
        width: PositiveInt = 128,
        context: PositiveInt = 80,
        classes: PositiveInt = 90,
        dropout: FractionBelowOne = 0.0,
    ) -> None:
        if width % heads:
            raise ExperimentError(f"model.heads = {heads}: must divide model.width = {width}")
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                is_last = name.endswith(("attention_out.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ExperimentError(f"model.context = {self.context}: must be at least {length}, the length of a sample")
        # One position per sample and place, because a stack of rows looks up each row's embedding for its samples.
        places = torch.arange(length, device=tokens.device).expand(tokens.shape)
        hidden = self.drop(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(self.blocks(hidden)), self.tokens.weight)
