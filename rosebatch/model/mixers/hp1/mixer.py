"""HP1 attention: a filter over scores and a clip in place of the softmax (source: article S4)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rosebatch.model.mixers.kv_attention import KVAttentionSpec, TritonKVAttention
from rosebatch.model.mixers.mixer import DecodeContext, PackedContext, QueryTiles, TritonSetup
from rosebatch.ops.hp1 import TILE_ROWS, Gate, hp1_kernels, torch_attention


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HP1Spec(KVAttentionSpec):
    """See ``KVAttentionSpec``. The kernels have no windows.

    Attributes:
        gate: what weighs the values.
    """

    gate: Gate

    def __post_init__(self) -> None:
        assert not self.window, "the kernels have no windows"

    @property
    def chunk_unit(self) -> int:
        """See ``MixerSpec``: columns of keys are as long as the end of a tile of queries has it."""
        return TILE_ROWS

    def attend(self, q: Tensor, planes: tuple[Tensor, ...], tiles: QueryTiles) -> Tensor:
        """See ``KVAttentionSpec``."""
        (cache,), (rows,) = planes, tiles.rows
        kernel = torch_attention.decode if tiles.generated else torch_attention.prefill
        return kernel(q, cache, rows, tiles.mask, self.scale, self.gate)

    @classmethod
    def triton_mixer(cls, specs: Sequence["HP1Spec"], setup: TritonSetup) -> "TritonHP1":
        """See ``MixerSpec``."""
        return TritonHP1(specs, setup)


class TritonHP1(TritonKVAttention[HP1Spec]):
    """The kind in the Triton runner. Its decode kernel never divides a row by the row's own length."""

    def __init__(self, specs: Sequence[HP1Spec], setup: TritonSetup) -> None:
        self.kernels = hp1_kernels(setup.max_num_seqs, {spec.heads for spec in specs}, setup.switches, setup.device)
        super().__init__(setup, self.kernels.decode)
        self.shares_keys = self.kernels.shares_keys

    def prefill(self, spec: HP1Spec, step: PackedContext, q: Tensor, tiles: Tensor) -> Tensor:
        """See ``TritonKVAttention``."""
        (cache,) = step.planes(spec)
        options = {"num_heads": spec.num_heads, "scale": spec.scale}
        return self.kernels.prefill(q, cache, step.table(spec), tiles, spec.gate, **options)

    def decode_options(self, spec: HP1Spec, step: DecodeContext) -> dict[str, Any]:
        """See ``TritonKVAttention``."""
        return {"gate": spec.gate, "keys": step.keys}

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """See ``TritonMixer``."""
        return self.kernels.decode_form(batch)
