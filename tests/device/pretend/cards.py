"""Models of graphics cards that the pretend GPU can be."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class Card:
    """A model of a graphics card.

    Attributes:
        name: name of the model.
        total, free: total memory and free memory, in bytes.
        capability: compute capability. From 8.0 on, cards compute in bfloat16 and TF32. Older cards emulate bfloat16.
        multiprocessors: number of multiprocessors.
    """

    name: str
    total: int
    free: int
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def computes_bf16(self) -> bool:
        """Whether the card computes in bfloat16 natively."""
        return self.capability >= (8, 0)

    @property
    def properties(self) -> SimpleNamespace:
        """The attributes of `torch.cuda.get_device_properties` that this card answers."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            total_memory=self.total,
            major=major,
            minor=minor,
            multi_processor_count=self.multiprocessors,
            uuid="pretend",
        )


LARGE = Card("pretend GPU", 141 * 10**9, 100 * 10**9, (9, 0), 132)
SMALL = Card("small pretend GPU", 8 * 10**9, 7 * 10**9, (7, 5), 36)  # no native bfloat16
