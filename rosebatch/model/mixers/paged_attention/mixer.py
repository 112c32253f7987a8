"""Paged attention: a softmax over K and V in blocks."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rosebatch.config.model import Planes, e4m3_planes
from rosebatch.model.mixers.kv_attention import KVAttentionSpec, TritonKVAttention
from rosebatch.model.mixers.mixer import DecodeContext, PackedContext, QueryTiles, Step, TritonSetup
from rosebatch.ops.paged_attention import paged_attention_kernels, torch_attention


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedAttentionSpec(KVAttentionSpec):
    """See ``KVAttentionSpec``.

    Attributes:
        soft_cap: a score becomes ``soft_cap · tanh(score / soft_cap)`` before the mask; 0 for no cap (Gemma 2).
        sinks: ``[num_heads]``, a further logit of each head's softmax, which has no value (gpt-oss); None for none.
        e4m3: whether K and V are stored so, with a scale for each token and K/V head.
    """

    soft_cap: float = 0.0
    sinks: Tensor | None = None
    e4m3: bool = False

    @property
    def planes(self) -> tuple[Planes, ...]:
        """One tensor for K and V; scales are a further one."""
        planes = Planes(self.num_kv_heads, self.head_dim, 2)
        return e4m3_planes(planes) if self.e4m3 else (planes,)

    @property
    def groups_tiles(self) -> bool:
        """Rows of a tile see the same keys, but for those of a window."""
        return not self.window

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], tiles: QueryTiles) -> Tensor:
        """See ``KVAttentionSpec``."""
        cache, *scales = planes
        kernel = torch_attention.decode if tiles.generated else torch_attention.prefill
        return kernel(q, cache, tiles.rows[0], tiles.mask, self.scale, self.soft_cap, self.sinks, *scales)

    @classmethod
    def triton_mixer(cls, specs: Sequence["PagedAttentionSpec"], setup: TritonSetup) -> "TritonPagedAttention":
        """See ``MixerSpec``."""
        return TritonPagedAttention(specs, setup)


class TritonPagedAttention(TritonKVAttention[PagedAttentionSpec]):
    """The kind in the Triton runner."""

    verifies = True

    def __init__(self, specs: Sequence[PagedAttentionSpec], setup: TritonSetup) -> None:
        heads, stored = {spec.heads for spec in specs}, {spec.e4m3 for spec in specs}
        self.kernels = paged_attention_kernels(
            setup.max_num_seqs, heads, stored, setup.switches, setup.dtype, setup.device
        )
        super().__init__(setup, self.kernels.decode)
        self.shares_keys, self.pieces = self.kernels.shares_keys, self.kernels.pieces

    def prefill(self, spec: PagedAttentionSpec, step: PackedContext, q: Tensor, tiles: Tensor) -> Tensor:
        """See ``TritonKVAttention``."""
        cache, scales = _cache_of(spec, step)
        options = {"num_heads": spec.num_heads, "scale": spec.scale, "soft_cap": spec.soft_cap, "sinks": spec.sinks}
        options["scales"] = scales
        if len(step.pieces):
            return self.kernels.prefill_shared(q, cache, step.table(spec), tiles, step.pieces, **options)
        options |= {"window": spec.window, "key_ends": step.key_ends(spec)}
        return self.kernels.prefill(q, cache, step.table(spec), tiles, **options)

    def decode_options(self, spec: PagedAttentionSpec, step: DecodeContext) -> dict[str, Any]:
        """See ``TritonKVAttention``."""
        keys, divided = step.keys, step.divided
        if spec.window and keys is not None:
            # A key leaves the windows of rows at different times, so a row has all keys of its window here.
            keys, divided = None, spec.window > self.kernels.undivided_keys(len(step.positions))
        of_spec = {"window": spec.window, "soft_cap": spec.soft_cap, "sinks": spec.sinks}
        _, scales = _cache_of(spec, step)
        return {"keys": keys, "divided": divided, "scales": scales, "queries": step.queries, **of_spec}

    def undivided_keys(self, batch: int) -> int:
        """See ``TritonMixer``."""
        return self.kernels.undivided_keys(batch)

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """See ``TritonMixer``."""
        return self.kernels.decode_form(batch, divided=divided)


def _cache_of(spec: PagedAttentionSpec, step: Step) -> tuple[Tensor, Tensor | None]:
    """K and V, and their scales; None if they are no e4m3."""
    cache, *scales = step.planes(spec)
    return cache, scales[0] if scales else None
