"""Random generators of the GPU."""

from __future__ import annotations

import torch

from tests.device.pretend.placement import GPU

CpuGenerator = torch.Generator
OTHER_SEED = 2**20  # bit in which the seed of a GPU generator differs from that of the CPU generator with its numbers

_of_gpu = set[int]()  # addresses of the GPU generators, because PyTorch passes on another Python object for each


class Generator(CpuGenerator):
    """A GPU generator, which draws other numbers than a CPU generator with the same seed.

    It stays in the capturing state if a capture fails, as before PyTorch 2.12.
    """

    device, captured = GPU, False

    def __init__(self) -> None:
        _of_gpu.add(self._cdata)
        self.manual_seed(self.initial_seed())

    def __del__(self) -> None:
        _of_gpu.discard(self._cdata)

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed ^ OTHER_SEED)
        return self

    def initial_seed(self) -> int:
        return super().initial_seed() ^ OTHER_SEED

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.set_state(state.get_state())
        self.captured = False


class _OfBothDevices(type):
    def __call__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        return Generator() if torch.device(device).type == GPU.type else CpuGenerator(device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, CpuGenerator)


class AnyGenerator(metaclass=_OfBothDevices):
    """Replacement for torch.Generator, which creates generators of both devices."""


def is_of_gpu(generator: torch.Generator) -> bool:
    return generator._cdata in _of_gpu
