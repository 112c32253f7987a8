"""The share of a model that a process holds, where several processes hold one model together."""

from dataclasses import dataclass

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import FlagError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size`` processes: some heads, inner channels of MLPs, and rows of the vocabulary."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """Its part of so many equal things, as even as possible."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def kv_heads(self, count: int) -> range:
        """Its K/V heads: those that its query heads read. Several processes may hold the same one."""
        if count >= self.size:
            return self.of(count)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def vocabulary(self, count: int) -> range:
        """Its rows of the vocabulary: all processes have equally many, but the last ones may have fewer."""
        rows = self.max_rows(count)
        return range(min(self.rank * rows, count), min((self.rank + 1) * rows, count))

    def max_rows(self, count: int) -> int:
        """Maximum rows of the vocabulary in one process."""
        return -(-count // self.size)


WHOLE = Shard()


def require_divisible(config: ModelConfig, size: int) -> None:
    """Check that so many processes can hold the model together.

    Raises:
        FlagError: they cannot.
    """
    flag = f"--tensor-parallel-size {size}"
    if config.family == "transformers":
        raise FlagError(f"{flag}: transformers' own code runs this model, on one device only")
    counts = {"heads": config.num_heads}
    if config.delta:
        counts["key heads of the delta rule"] = config.delta.key_heads
    if config.mamba:
        counts["groups of heads of Mamba2"] = config.mamba.groups
    if config.conv:
        counts["channels of convolutions"] = config.hidden_size
    for what, count in counts.items():
        if count % size:
            raise FlagError(f"{flag}: the model has {count} {what}, which cannot be divided by {size}")
    for kv_heads in (config.num_kv_heads, config.of_window(0).num_kv_heads):
        if kv_heads % size and size % kv_heads:
            raise FlagError(f"{flag}: the model has {kv_heads} K/V heads; take a divisor or a multiple")
