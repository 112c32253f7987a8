"""The tensors of a model that has no files."""

import zlib

import torch
from torch import Tensor

from rosebatch.model.weights import Rounding, Take
from rosebatch.ops.weight import Weight

# Standard deviation.
DEVIATION = 0.02


class RandomWeights:
    """Random tensors, for benchmarks and kernel work. The same name and seed give the same numbers.

    Args:
        dtype, device: of the run.
        seed: of all numbers.
        rounding: see ``WeightSource``.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0, rounding: Rounding | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.rounding = rounding

    def names(self) -> list[str]:
        """See ``WeightSource``: nothing is stored."""
        return []

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``WeightSource``: nothing is stored."""
        return None

    def find(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """See ``WeightSource``: nothing is stored."""
        return None

    def change(self, name: str, shape: tuple[int, ...]) -> None:
        """See ``WeightSource``: there is no adapter."""

    def added(self, name: str, shape: tuple[int, ...]) -> tuple[()]:
        """See ``WeightSource``: there is no adapter."""
        return ()

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        fill: float | None = None,
        take: Take | None = None,
    ) -> Tensor:
        """See ``WeightSource``; random numbers have a normal distribution with deviation ``DEVIATION``."""
        if take is not None:
            # The numbers are those of the whole tensor.
            whole = self.get(name, shape, dtype=dtype, fill=fill)
            return torch.cat([whole.narrow(take.dim, start, stop - start) for start, stop in take.runs()], take.dim)
        if fill is not None:
            return torch.full(shape, fill, dtype=dtype or self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        tensor = torch.empty(shape, dtype=torch.float32, device=self.device)
        return tensor.normal_(0.0, DEVIATION, generator=generator).to(dtype or self.dtype)
