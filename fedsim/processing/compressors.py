"""Compressors: sparsification, quantization, low rank and sketches. `codec.py` defines what they send.

In the sizes below, a number takes 4 bytes in float32 and 8 in float64. Codes are rounded up to whole bytes.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.numbers import Limits, PositiveFraction, PositiveInt
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError
from fedsim.processing.codec import Compressor, Format, Packet, Sender, Spec
from fedsim.processing.processors import processor

DEFAULT_RATIO = 0.01
SEED = {"seed": (1, 64)}  # a key from which the receiver repeats the sender's draws
SAMPLED = 1 << 14  # numbers from which a lower bound of the k-th largest magnitude is estimated
PRIME = (1 << 31) - 1  # modulus of hash functions
CHUNK = 1 << 16  # coordinates that are hashed at once, so that they stay in cache


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Compressor):
    """Base class of compressors that keep k of d coordinates."""

    stage: ClassVar[int] = 0
    ratio: PositiveFraction | None = None
    k: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.k is not None:
            raise ExperimentError(f"processors: both k = {self.k} and ratio = {self.ratio} are set; omit one of them")

    def size(self, d: int) -> int:
        """Return how many of d coordinates are kept: at most `k`, or max(1, floor(ratio d))."""
        ratio = DEFAULT_RATIO if self.ratio is None else self.ratio
        return min(self.k or max(1, int(ratio * d + 1e-9)), d)


@processor("top_k")
@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Keep the k numbers with the largest magnitudes, and set all other numbers to zero (Stich et al. 2018).

    The other numbers are lost, unless `error_feedback = true` adds them to the worker's next update. The compressor is
    a contraction: |x - C(x)|^2 <= (1 - k / d) |x|^2. Records contain `kept_energy`, the fraction of the squared norm
    that is kept.

    Args:
        ratio: fraction of the d numbers to keep, k = max(1, floor(ratio d)). Unset: 0.01, unless `k` is set.
        k: number of values to keep, >= 1. With k >= d the update is not changed.

    Sends k numbers, and either k indices of ceil(log2 d) bits or a bitmap of d bits, whichever is smaller. Cost: a few
    passes over the update [d], and a partial sort of the largest candidates.

    >>> fedsim.compress(torch.tensor([1.0, -3.0, 2.0]), "top_k", k=1)
    (tensor([ 0., -3.,  0.]), 5)
    """

    def format(self, spec: Spec) -> Format:
        k, index_bits = self.size(spec.d), (spec.d - 1).bit_length()
        if k == spec.d:
            return Format(k, {})
        return Format(k, {"bitmap": (spec.d, 1)} if k * index_bits > spec.d else {"indices": (k, index_bits)})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        _, codes = self.format(spec)
        if not codes:
            return Packet(vector, {})
        indices = largest(vector, self.size(spec.d))
        values = vector[indices]
        energy = torch.linalg.vector_norm(vector).clamp(min=torch.finfo(vector.dtype).tiny)  # not 0 / 0 for zeros
        sender.metrics["kept_energy"] = (torch.linalg.vector_norm(values) / energy).square()
        if "indices" in codes:
            return Packet(values, {"indices": indices})
        return Packet(values, {"bitmap": torch.zeros_like(vector, dtype=torch.bool).index_fill_(0, indices, True)})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        if not message.codes:
            out.copy_(message.values)
        elif "indices" in message.codes:
            out.zero_().index_copy_(0, message.codes["indices"], message.values)
        else:
            out.zero_().masked_scatter_(message.codes["bitmap"].bool(), message.values)


@processor("rand_k")
@dataclass(frozen=True, kw_only=True)
class RandK(Sparsifier):
    """Keep k random coordinates, multiplied by d / k so that the update has no bias (Stich et al. 2018).

    With `error_feedback = true`, set `scaled = false`: error feedback needs a contraction, and d / k makes errors grow.

    Args:
        ratio: fraction of the d numbers to keep, k = max(1, floor(ratio d)). Unset: 0.01, unless `k` is set.
        k: number of coordinates to keep, >= 1. With k >= d the update is not changed.
        scaled: whether to multiply the kept numbers by d / k.

    Sends k numbers and a 64-bit seed, from which the server draws the same coordinates. Cost: a draw of k out of d
    numbers at the worker and at the server, and two passes over the update [d].

    >>> fedsim.compress(torch.ones(4), "rand_k", k=2)
    (tensor([0., 2., 0., 2.]), 16)
    """

    scaled: bool = True

    def format(self, spec: Spec) -> Format:
        return Format(self.size(spec.d), SEED)

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        k = self.size(spec.d)
        values = vector[sender.draws.choice(spec.d, k)]
        extremes = torch.stack(torch.aminmax(vector))  # the fastest way to find NaN and infinity
        values = torch.where(extremes.isfinite().all(), values, torch.nan)  # the server must see a diverged worker
        return Packet(values * (spec.d / k) if self.scaled else values, {"seed": sender.draws.key.view(1)})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        indices = Draws(message.codes["seed"][0]).choice(spec.d, self.size(spec.d))
        out.zero_().index_copy_(0, indices, message.values)


@processor("qsgd")
@dataclass(frozen=True, kw_only=True)
class QSGD(Compressor):
    """Quantize each number by unbiased random rounding to multiples of norm / levels (QSGD, Alistarh et al. 2017).

    x_i becomes sign(x_i) |x| floor(levels |x_i| / |x| + u_i) / levels, with u_i uniform in [0, 1). |x| is the L2 norm
    of the update, or of the bucket of x_i.

    Args:
        levels: number of quantization levels, >= 1.
        bucket: number of consecutive coordinates that share a norm, >= 1. Smaller buckets have smaller errors. Unset:
            the whole update [d].

    Sends one norm per bucket, and ceil(log2(2 levels + 1)) bits for each coordinate, without entropy coding. Cost: d
    draws, and six passes over the update.

    >>> fedsim.compress(torch.tensor([0.0, -2.0]), "qsgd", levels=1)
    (tensor([ 0., -2.]), 5)
    """

    levels: Annotated[int, Limits(gt=0, le=2**20)] = 16
    bucket: PositiveInt | None = None

    def format(self, spec: Spec) -> Format:
        return Format(-(-spec.d // self._width(spec)), {"levels": (spec.d, (2 * self.levels).bit_length())})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        width = self._width(spec)
        buckets = torch.nn.functional.pad(vector, (0, -spec.d % width)).view(-1, width)
        norms = torch.linalg.vector_norm(buckets, dim=1)
        scaled = (buckets.abs() / norms.clamp(min=torch.finfo(vector.dtype).tiny)[:, None]).view(-1)[: spec.d]
        scaled = scaled.mul_(self.levels).add_(sender.draws.uniform(spec.d, dtype=vector.dtype)).floor_()
        scaled = scaled.clamp_(max=self.levels).copysign_(vector)  # rounding may have reached levels + 1
        return Packet(
            norms, {"levels": scaled.add_(self.levels).to(torch.int16 if self.levels < 2**14 else torch.int32)}
        )

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        width = self._width(spec)
        out.copy_(message.codes["levels"]).sub_(self.levels).div_(self.levels)
        whole = spec.d // width * width
        out[:whole].view(-1, width).mul_(message.values[: spec.d // width, None])
        out[whole:].mul_(message.values[-1])

    def _width(self, spec: Spec) -> int:
        return min(self.bucket or spec.d, max(1, spec.d))


@processor("sign")
@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """Compress an update to one bit per number: x becomes sign(x) times the mean of |x| (Karimireddy et al. 2019).

    With `error_feedback = true` the algorithm is EF-SGD. The sign of zero is +1.

    Sends one number and d bits, for an update [d]. Cost: two passes over the update.

    >>> fedsim.compress(torch.tensor([1.0, -3.0]), "sign")
    (tensor([ 2., -2.]), 5)
    """

    def format(self, spec: Spec) -> Format:
        return Format(1, {"negative": (spec.d, 1)})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        scale = vector.abs().sum() / max(1, spec.d)  # more precise than vector_norm in float32
        return Packet(scale.view(1), {"negative": vector < 0})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        out.copy_(message.codes["negative"]).mul_(-2 * message.values).add_(message.values)


@processor("terngrad")
@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    """Quantize each number to -s, 0 or s without bias, where s is the largest magnitude (TernGrad, Wen et al. 2017).

    x_i becomes s sign(x_i) b_i, where b_i is 1 with probability |x_i| / s and otherwise 0.

    Sends one number, and 2 bits for each coordinate of the update [d]. Cost: d draws, and five passes over the update.

    >>> fedsim.compress(torch.tensor([0.0, -2.0]), "terngrad")
    (tensor([ 0., -2.]), 5)
    """

    def format(self, spec: Spec) -> Format:
        return Format(1, {"signs": (spec.d, 2)})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        scale = torch.linalg.vector_norm(vector, math.inf) if spec.d else vector.new_zeros(())
        kept = sender.draws.uniform(spec.d, dtype=vector.dtype).mul_(scale) < vector.abs()
        return Packet(scale.view(1), {"signs": vector.sign().to(torch.int8).mul_(kept).add_(1)})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        out.copy_(message.codes["signs"]).sub_(1).mul_(message.values)


@processor("natural")
@dataclass(frozen=True, kw_only=True)
class NaturalCompression(Compressor):
    """Round each number at random to one of the two nearest powers of two, without bias (Horvath et al. 2022).

    Sends the sign and the exponent of each coordinate of the update [d]: 9 bits in float32, 12 in float64. Cost: d
    draws, and five passes over the update.

    >>> fedsim.compress(torch.tensor([0.0, -2.0, 0.5]), "natural")
    (tensor([ 0.0000, -2.0000,  0.5000]), 4)
    """

    stage: ClassVar[int] = 2

    def format(self, spec: Spec) -> Format:
        return Format(0, {"exponents": (spec.d, 8 * spec.dtype.itemsize - _mantissa(spec.dtype))})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        # Adding a random mantissa carries into the exponent with the probability of rounding up, also below the
        # smallest normal number.
        mantissa, integers = _mantissa(spec.dtype), _integers(spec.dtype)
        drawn = sender.draws.uniform(spec.d, dtype=vector.dtype).mul_(2.0**mantissa).to(integers)
        drawn.mul_(vector.isfinite()).add_(vector.contiguous().view(integers))
        return Packet(vector[:0], {"exponents": (drawn >> mantissa).to(torch.int16)})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        powers = message.codes["exponents"].to(_integers(spec.dtype)) << _mantissa(spec.dtype)
        out.copy_(powers.view(spec.dtype))


def _mantissa(dtype: torch.dtype) -> int:
    """Return the number of mantissa bits that a floating-point type stores."""
    return -round(math.log2(torch.finfo(dtype).eps))


def _integers(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": getattr(torch, "float8_e4m3fn", None)}


@processor("cast")
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Round each number to a floating-point type of 2 bytes or 1 byte (Micikevicius et al. 2018).

    Args:
        to: `bf16` (the range of float32, 8 significant bits), `fp16` (up to 65,504, 11 significant bits) or `fp8`
            (e4m3: 4 significant bits, after the update is scaled to the largest value of the type).

    Sends 2 bytes for each number of an update [d]. With `fp8`: 1 byte for each, and one number for the scale. Cost: two
    passes over the update.

    >>> fedsim.compress(torch.tensor([1.001, -3.0]), "cast")
    (tensor([ 1., -3.]), 4)
    """

    stage: ClassVar[int] = 2
    to: Literal["bf16", "fp16", "fp8"] = "bf16"

    def __post_init__(self) -> None:
        if LOW.get(self.to, torch.bfloat16) is None:
            raise ExperimentError(f'processors: cast to "{self.to}" needs a newer PyTorch; use "bf16" or "fp16"')

    def format(self, spec: Spec) -> Format:
        return Format(int(self.to == "fp8"), {"codes": (spec.d, 8 * self._low.itemsize)})

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        scale = vector[:0]
        if self.to == "fp8":
            largest = torch.linalg.vector_norm(vector, math.inf) if spec.d else vector.new_zeros(())
            scale = (largest / torch.finfo(self._low).max).clamp(min=torch.finfo(vector.dtype).tiny).view(1)
            vector = vector / scale
        return Packet(scale, {"codes": vector.to(self._low).view(self._bits)})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        out.copy_(message.codes["codes"].to(self._bits).view(self._low))
        if len(message.values):
            out.mul_(message.values)

    @property
    def _low(self) -> torch.dtype:
        return typing.cast(torch.dtype, LOW[self.to])

    @property
    def _bits(self) -> torch.dtype:
        return torch.uint8 if self.to == "fp8" else torch.int16


@processor("powersgd")
@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """Approximate the update of each weight matrix by a matrix of low rank (PowerSGD, Vogels et al. 2019).

    A tensor of shape [n, ...] counts as a matrix M [n, m]. One power iteration gives P = orth(M Q) and Q = M^T P, and
    the update becomes P Q^T. Each worker starts from the Q of its previous update, and at first from random numbers.
    Tensors with one dimension, and matrices that would not become smaller, are sent unchanged. The compressor has a
    bias, so use it with `error_feedback = true`.

    Args:
        rank: rank r of the approximation, >= 1.

    Sends r (n + m) numbers for each matrix. Each worker keeps r m numbers. Cost: two products of M [n, m] with r
    columns, and orthogonalization of r columns.

    >>> update = [torch.outer(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 0.0, -1.0, 2.0]))]
    >>> (approximation,), nbytes = fedsim.compress(update, "powersgd", rank=1)
    >>> torch.allclose(approximation, update[0], atol=1e-5), nbytes
    (True, 32)
    """

    stage: ClassVar[int] = 0
    rank: PositiveInt = 2

    def format(self, spec: Spec) -> Format:
        return Format(sum(sum(self._sizes(n, m)) for n, m in self._matrices(spec)), {})

    def memory_size(self, spec: Spec) -> int:
        return sum(self.rank * m for _, m in self._matrices(spec))

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        wide = torch.promote_types(spec.dtype, torch.float32)
        start = sender.draws.normal(self.memory_size(spec), dtype=wide)
        if sender.memory is not None:
            start = torch.where((sender.memory == 0).all(), start, sender.memory)
        parts, first, done = [], 0, 0
        for n, m in self._matrices(spec):
            part = vector[done : (done := done + n * (m or 1))]
            if m:
                matrix, before = part.view(n, m).to(wide), start[first : (first := first + self.rank * m)]
                left = torch.linalg.qr(matrix @ before.view(m, self.rank)).Q
                right = matrix.T @ left
                before.copy_(right.reshape(-1))
                parts += [left.reshape(-1), right.reshape(-1)]
            else:
                parts.append(part)
        if sender.memory is not None:
            sender.memory.copy_(start)
        return Packet(torch.cat([part.to(spec.dtype) for part in parts]), {})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        sent = iter(message.values.split([size for n, m in self._matrices(spec) for size in self._sizes(n, m)]))
        done = 0
        for n, m in self._matrices(spec):
            target = out[done : (done := done + n * (m or 1))]
            if m:
                torch.matmul(next(sent).view(n, self.rank), next(sent).view(m, self.rank).T, out=target.view(n, m))
            else:
                target.copy_(next(sent))

    def _sizes(self, n: int, m: int) -> list[int]:
        return [self.rank * n, self.rank * m] if m else [n]

    def _matrices(self, spec: Spec) -> Iterator[tuple[int, int]]:
        """Yield (n, m) for each compressed matrix, and (number of values, 0) for each other tensor."""
        for shape in spec.shapes:
            count = math.prod(shape)
            n = shape[0] if len(shape) > 1 else count
            m = count // n if n else 0
            yield (n, m) if self.rank * (n + m) < count else (count, 0)


@processor("sketch")
@dataclass(frozen=True, kw_only=True)
class Sketch(Sparsifier):
    """Send a count sketch, from which the server takes the k heaviest coordinates (FetchSGD, Rothchild et al. 2020).

    In each of `rows` rows, a hash function adds each coordinate with a random sign to one of `columns` counters. The
    estimate of a coordinate is the median of its counters (Charikar et al. 2002). With the probability 3/4 or more,
    one row errs by at most 2 |x| / sqrt(columns). The median of several rows errs by more with a probability that falls
    exponentially with `rows`. With `error_feedback = true`, the other coordinates are sent later instead of being lost.

    Args:
        columns: number of counters in a row, at most 2^29.
        rows: number of rows, odd.
        ratio, k: number of coordinates to keep, as for `top_k`.

    Sends rows x columns numbers, and a 64-bit seed of the hash functions. Cost: 2 rows hashes for each coordinate of
    the update [d], and a partial sort.

    >>> update = torch.zeros(1000).index_fill(0, torch.tensor([7]), 5.0)
    >>> row, nbytes = fedsim.compress(update, "sketch", columns=20, rows=3, k=1)
    >>> torch.equal(row, update), nbytes
    (True, 248)
    """

    columns: Annotated[int, Limits(gt=0, le=2**29)] = 1000
    rows: PositiveInt = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 2 == 0:
            raise ExperimentError(
                f"processors: sketch: rows = {self.rows} must be odd, because each number is the median over the rows"
            )

    def format(self, spec: Spec) -> Format:
        return Format(self.rows * self.columns, SEED)

    def message(self, vector: Tensor, spec: Spec, sender: Sender) -> Packet:
        key, table = sender.draws.key.view(1), vector.new_zeros(self.rows, self.columns)
        for part, counters, signs in self._hashes(key, spec.d):
            for row in range(self.rows):
                table[row].index_add_(0, counters[row], vector[part] * signs[row])
        return Packet(table.view(-1), {"seed": key})

    def restore(self, message: Packet, spec: Spec, out: Tensor) -> None:
        table = message.values.view(self.rows, self.columns)
        for part, counters, signs in self._hashes(message.codes["seed"].to(out.device), spec.d):
            out[part] = (table.gather(1, counters) * signs).median(0).values
        indices = largest(out, self.size(spec.d))
        values = out[indices]
        out.zero_().index_copy_(0, indices, values)

    def _hashes(self, key: Tensor, d: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield, for each part of the coordinates, the counters [rows, part] and the signs [rows, part]."""
        factors, offsets = Draws(key[0]).integers(PRIME, 2, self.rows, 1)
        for start in range(0, d, CHUNK):
            numbers = torch.arange(start, min(start + CHUNK, d), device=key.device)
            hashed = numbers * factors + offsets
            for _ in range(2):  # modulo 2^31 - 1, up to one
                hashed = (hashed & PRIME) + (hashed >> 31)
            hashed = (hashed * (2 * self.columns) >> 31).clamp_(max=2 * self.columns - 1)
            yield slice(start, start + len(numbers)), hashed >> 1, 1 - 2 * (hashed & 1)


def largest(vector: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes in a vector [d], ascending, int64 [k]. NaN counts as largest.

    On a CPU, a lower bound from a sample leaves few candidates to sort. Cost: three passes over the vector, and a
    partial sort of about 2 k numbers.
    """
    magnitudes, d = vector.abs(), len(vector)
    if vector.device.type == "cpu" and d >= 4 * SAMPLED and k <= d // 8:
        sample = magnitudes[:: d // SAMPLED]
        bound = sample.topk(2 * k * len(sample) // d + 16, sorted=False).values.min()
        candidates = (magnitudes <= bound).logical_not_().nonzero().view(-1)
        if len(candidates) >= k:
            return candidates[magnitudes[candidates].topk(k, sorted=False).indices].sort().values
    return magnitudes.topk(k, sorted=False).indices.sort().values
