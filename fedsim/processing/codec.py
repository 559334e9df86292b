"""What compressors send: the parts of a message, their sizes, and their encoding as bytes.

A compressor turns an update into a `Packet`: floating-point numbers, which the next compressor in the chain may
compress further, and codes, which are integers of a fixed number of bits. A run needs only the decoded update and the
number of bytes, which the sizes of the parts give. `Codec.encode` writes the bytes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.randomness import Draws

Shapes = Sequence[Sequence[int]]


class Spec(NamedTuple):
    """Description of a vector to compress, which sender and receiver know.

    Attributes:
        d: number of values.
        dtype: their floating-point type.
        shapes: shapes of the tensors that the vector contains, in order.
    """

    d: int
    dtype: torch.dtype
    shapes: Shapes


class Format(NamedTuple):
    """Sizes of a message's parts.

    Attributes:
        numbers: number of floating-point numbers.
        codes: for each tensor of integers, (number of integers, bits of each integer).
    """

    numbers: int
    codes: dict[str, tuple[int, int]]

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes. Each tensor of codes begins at a whole byte."""
        return sum(math.ceil(count * bits / 8) for count, bits in self.codes.values())


class Packet(NamedTuple):
    """Parts of a message.

    Attributes:
        values: floating-point numbers, [numbers].
        codes: tensors of integers, [count], of which only the lowest bits are sent.
    """

    values: Tensor
    codes: dict[str, Tensor]


class Sender(NamedTuple):
    """Inputs of a compressor besides the vector that the sender compresses.

    Attributes:
        draws: source of random tensors.
        metrics: dict that receives numbers to record.
        memory: state [width] that the compressor keeps for the sender, initially zeros; None for a compressor without
            state.
    """

    draws: Draws
    metrics: dict[str, Any]
    memory: Tensor | None = None


class Compressor:
    """Base class of compressors, which are frozen dataclasses. The fields are the configuration.

    The methods get a `Spec`, which describes the vector to compress, and a `Sender`, which contains further inputs.

    Attributes:
        compresses: whether error feedback is allowed.
        stage: what the compressor does: 0 selects or combines coordinates, 1 replaces them by codes with a scale, 2
            rounds each number by itself. A compressor can follow one of an earlier stage, and several of stage 0 can
            follow each other.
    """

    compresses: ClassVar[bool] = True
    stage: ClassVar[int] = 1

    def format(self, spec: Spec) -> Format:
        """Return the sizes of the message for a vector that `spec` describes."""
        raise NotImplementedError

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        """Return the message for a vector [d], which is not changed."""
        raise NotImplementedError

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        """Write the vector that a message describes to `out` [d]."""
        raise NotImplementedError

    def memory_size(self, spec: Spec) -> int:
        """Return the number of values that each sender keeps from one message to the next (`Sender.memory`)."""
        return 0

    def __call__(self, update: Tensor, draws: Draws, metrics: dict[str, Any]) -> tuple[Tensor, int]:
        """Compress one update [d] as a flat vector. Returns the decoded update and the number of bytes to send."""
        codec = Codec((self,), Spec(len(update), update.dtype, [update.shape]))
        return codec.restore(codec.parts(update, [Sender(draws, metrics)])), codec.nbytes


class Parts(NamedTuple):
    """Message of several consecutive compressors: the numbers of the last one, and the codes of each."""

    values: Tensor
    codes: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Codec:
    """Encoding of updates by consecutive compressors, each of which compresses the numbers that the previous one sends.

    Attributes:
        compressors: compressors, in order.
        spec: description of the updates.

    >>> from fedsim.processing.codec import Codec, Sender, Spec
    >>> from fedsim.processing.compressors import TopK
    >>> update = torch.tensor([1.0, -3.0, 2.0])
    >>> codec = Codec((TopK(k=1),), Spec(3, torch.float32, [(3,)]))
    >>> data = codec.encode(codec.parts(update, [Sender(fedsim.Draws.of("example", seed=0), {})]))
    >>> codec.nbytes, len(data), codec.restore(codec.decode(data))
    (5, 5, tensor([ 0., -3.,  0.]))
    """

    compressors: tuple[Compressor, ...]
    spec: Spec

    @cached_property
    def _levels(self) -> list[tuple[Compressor, Spec, Format]]:
        """For each compressor, the triple (compressor, description of its input vector, sizes of its message)."""
        levels, spec = [], self.spec
        for compressor in self.compressors:
            sizes = compressor.format(spec)
            levels.append((compressor, spec, sizes))
            spec = Spec(sizes.numbers, spec.dtype, [(sizes.numbers,)])
        return levels

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of an encoded update."""
        numbers = self._levels[-1][2].numbers * self.spec.dtype.itemsize
        return numbers + sum(sizes.code_bytes for _, _, sizes in self._levels)

    def memory_sizes(self) -> list[int]:
        """Return the number of values that a sender keeps between its messages, for each compressor."""
        return [compressor.memory_size(spec) for compressor, spec, _ in self._levels]

    def parts(self, update: Tensor, senders: Sequence[Sender]) -> Parts:
        """Compress an update [d], which is not changed, and return the message.

        `senders` contains the further inputs of each compressor.
        """
        all_codes = []
        for (compressor, spec, _), sender in zip(self._levels, senders, strict=True):
            update, codes = compressor.message(update, spec, sender)
            all_codes.append(codes)
        return Parts(update, all_codes)

    def restore(self, parts: Parts, out: Tensor | None = None) -> Tensor:
        """Return the update [d] that a message describes.

        It is written to `out`, which may be the tensor that was compressed, or to a new tensor if `out` is None.
        """
        values = parts.values
        for position, codes in reversed(list(enumerate(parts.codes))):
            compressor, spec, _ = self._levels[position]
            target = values.new_empty(spec.d) if position or out is None else out
            compressor.restore(Packet(values, codes), spec, target)
            values = target
        return values

    def encode(self, parts: Parts) -> bytes:
        """Return the message as `nbytes` bytes: the codes of each compressor in turn, then the numbers of the last."""
        packed = [
            pack(codes[name], bits)
            for (_, _, sizes), codes in zip(self._levels, parts.codes, strict=True)
            for name, (_, bits) in sizes.codes.items()
        ]
        return b"".join(packed) + parts.values.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def decode(self, data: bytes) -> Parts:
        """Return the message that `encode` has written."""
        start, all_codes = 0, []
        for _, _, sizes in self._levels:
            codes = {}
            for name, (count, bits) in sizes.codes.items():
                stop = start + math.ceil(count * bits / 8)
                codes[name], start = unpack(data[start:stop], count, bits), stop
            all_codes.append(codes)
        values = torch.frombuffer(bytearray(data[start:]), dtype=self.spec.dtype) if start < len(data) else None
        return Parts(torch.empty(0, dtype=self.spec.dtype) if values is None else values, all_codes)


def pack(codes: Tensor, bits: int) -> bytes:
    """Return the lowest `bits` bits of each integer, without gaps.

    >>> from fedsim.processing.codec import pack, unpack
    >>> pack(torch.tensor([1, 2, 3]), bits=3), unpack(b"\\xd1\\x00", 3, bits=3)
    (b'\\xd1\\x00', tensor([1, 2, 3]))
    """
    words = codes.cpu().to(torch.int64).numpy().astype(np.uint64)
    of_words = (words[:, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(of_words.astype(np.uint8), bitorder="little").tobytes()


def unpack(data: bytes, count: int, bits: int) -> Tensor:
    """Return `count` integers of `bits` bits that `pack` has written, int64 [count]."""
    of_words = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    words = (of_words.reshape(count, bits).astype(np.uint64) << np.arange(bits, dtype=np.uint64)).sum(
        1, dtype=np.uint64
    )
    return torch.from_numpy(words.astype(np.int64))
