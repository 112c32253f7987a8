"""The seam of token mixing: what a kind states of a layer and computes, and what the step of a runner gives it.

A kind is a folder next to this file. A runner finds its computations by the type of the layer's spec.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rosebatch.config.model import Planes
from rosebatch.config.switches import Switches
from rosebatch.model.rope import Rotary
from rosebatch.ops.ops import Ops, PackedChunks, Pieces, SharedKeys


class StateShape(NamedTuple):
    """What a layer keeps of each sequence, whatever its length, in one tensor.

    Attributes:
        shape: of one sequence's part.
        dtype: None for that of activations.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MixerSpec(ABC):
    """The token mixing of one layer. The model owns it, a runner carries it out; layers may differ in all of it.

    Attributes:
        layer: counted from 0 among the layers with planes, or among those with states.
        shares: whether planes are those of that layer, an earlier one, which appends to them: this one only reads.
        window: keys that a query sees, its own included; 0 for all. Of whole prompts, those on each side.
        rotary: None if positions are not rotary.
    """

    layer: int
    shares: bool = False
    window: int = 0
    rotary: Rotary | None = None

    @property
    def planes(self) -> tuple[Planes, ...]:
        """What the layer keeps of each token in blocks, or shares, such as K and V: a tensor for each item."""
        return ()

    @property
    def states(self) -> tuple[StateShape, ...]:
        """What the layer keeps of each sequence. A token at position 0 starts from zeros, whatever a slot holds."""
        return ()

    @property
    def chunk_unit(self) -> int:
        """Chunks that end at a multiple of so many tokens, or where the prompt does, have the bits of a whole prompt.

        Beside that, they end where a block does.
        """
        return 1

    @property
    def prefix_heads(self) -> tuple[int, int] | None:
        """Query heads and K/V heads, if decode rows may share the keys of a prefix; None if they may not."""
        return None

    @property
    def whole_prompts(self) -> bool:
        """Whether tokens see those after them: a prompt is computed in one step, and nothing of it is kept."""
        return False

    @property
    def by_chunks(self) -> bool:
        """Whether packed steps of the Triton runner go by chunks here, and not by tiles of queries alone."""
        return self.whole_prompts or bool(self.states)

    @property
    def groups_tiles(self) -> bool:
        """Whether chunks of several sequences may share a tile of queries in the Triton runner."""
        return False

    @abstractmethod
    def torch_step(self, step: "TorchContext", inputs: tuple[Tensor, ...]) -> Tensor:
        """The kind in the PyTorch runner, a step of one layer: ``[T, ...]`` inputs of the layer to ``[T, out]``."""

    @classmethod
    def triton_mixer(cls, specs: Sequence[Any], setup: "TritonSetup") -> "TritonMixer[Any]":
        """The kind in the Triton runner, for all of a model's layers of this type."""
        raise NotImplementedError(f"{cls.__name__} has no kernels")


class Step(Protocol):
    """What the mixers of both runners get of a step."""

    ops: Ops

    def planes(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """``[number, blocks, heads, block_size, width]`` for each of the layer's ``MixerSpec.planes``."""
        ...

    def states(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """``[slots, *shape]`` for each of the layer's states."""
        ...


class QueryTiles(NamedTuple):
    """Queries of one shape, attended in one call, and where their keys are.

    Attributes:
        generated: whether they are generated tokens, one of each sequence; else tiles of successive prompt tokens.
        rows: for each of the layer's tensors where the keys are, see ``rosebatch_kernels.common.gather``.
        mask: in the cache's dtype, 0 for keys that are seen, -inf for others. ``[B, 1, 1, keys]`` for generated tokens,
            ``[R, keys]`` for all tiles alike.
    """

    generated: bool
    rows: tuple[Tensor, ...]
    mask: Tensor


class WholePrompts(NamedTuple):
    """The prompts of a step of the PyTorch runner, those of one length next to each other.

    Attributes:
        order, inverse: ``[T]`` int64, the step's rows in that order, and back; None if they lie so.
        shapes: how many there are of each length, and the length.
    """

    order: Tensor | None
    inverse: Tensor | None
    shapes: Sequence[tuple[int, int]]

    def ordered(self, x: Tensor) -> Tensor:
        """Rows of the step ``[T, ...]`` in this order."""
        return x if self.order is None else x.index_select(0, self.order)

    def restored(self, x: Tensor) -> Tensor:
        """The same rows as they lie in the step."""
        return x if self.inverse is None else x.index_select(0, self.inverse)


class TorchContext(Step, Protocol):
    """A step of the PyTorch runner.

    Attributes:
        chunks: for layers with states.
    """

    chunks: PackedChunks

    def prompts(self) -> WholePrompts:
        """For layers that need them whole."""
        ...

    def rotation(self, rotary: Rotary | None) -> tuple[Tensor, Tensor] | None:
        """The rows of the tables, ``[T, 1, R]`` each."""
        ...

    def append_rows(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """``[T, heads]`` int64 for each of the layer's planes: where the tokens' rows go, see ``kv_append``."""
        ...

    def attend(self, spec: MixerSpec, q: Tensor, attend: Callable[[Tensor, QueryTiles], Tensor]) -> Tensor:
        """``[T, out]`` of queries ``[T, ...]``: ``attend`` gets those of one shape at a time."""
        ...


@dataclass(frozen=True, slots=True)
class TritonSetup:
    """What kinds get once, before the first step of the Triton runner.

    Attributes:
        max_num_seqs: most sequences of a step.
        dtype: of the planes.
    """

    max_num_seqs: int
    dtype: torch.dtype
    device: torch.device
    switches: Switches


class TritonContext(Step, Protocol):
    """What packed and decode steps of the Triton runner have in common.

    Attributes:
        positions: ``[T]`` int32 of each token.
        rotary_rows: ``[T]`` int32, each token's row of the rotary tables; None if it is the position.
    """

    positions: Tensor
    rotary_rows: Tensor | None

    def rotary_tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin that have these rows: the model's, or those of a step with images."""
        ...

    def table(self, spec: MixerSpec) -> Tensor:
        """``[S, M]`` int32 block ids in this layer's group."""
        ...

    def rows(self) -> Tensor:
        """``[T]`` int32, each token's row of the table; -1 for tokens that nobody reads."""
        ...

    def append_rows(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``TorchContext``."""
        ...


class PackedContext(TritonContext, Protocol):
    """A packed step of the Triton runner; see ``rosebatch.engine.triton_runner.packing.PackedInputs``."""

    tiles: Tensor
    last_tiles: Tensor
    pieces: Tensor
    chunks: PackedChunks

    def key_ends(self, spec: MixerSpec) -> Tensor | None:
        """``[T]`` int32, the place after the last key that each token sees; None if that is its own plus one."""
        ...


class DecodeContext(TritonContext, Protocol):
    """A decode step of the Triton runner.

    Attributes:
        limits: ``[S]`` int32: rows at this position or later are not live.
        state_slots: ``[S]`` int32 of layers with states.
        keys: that rows share; None if there are none.
        divided: whether any row may have more keys than ``TritonMixer.undivided_keys``, shared ones left out.
        queries: successive rows of a sequence, with one row in its block table: the last token, and drafts.
    """

    limits: Tensor
    state_slots: Tensor
    keys: SharedKeys | None
    divided: bool
    queries: int


SpecT = TypeVar("SpecT", bound=MixerSpec)


class TritonMixer(ABC, Generic[SpecT]):
    """A kind in the Triton runner. Decode steps are captured as graphs: nothing in them depends on the host.

    Attributes:
        shares_keys: whether layers with ``MixerSpec.prefix_heads`` may attend to keys of several rows at once.
        verifies: whether a decode step may have several rows of a sequence.
        pieces: how such keys are cut; None if they may be cut anywhere.
    """

    shares_keys: bool = False
    verifies: bool = False
    pieces: Pieces | None = None

    @abstractmethod
    def packed(self, spec: SpecT, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None) -> Tensor:
        """``[T, out]`` of packed chunks, or ``[S, out]`` of the rows ``wanted [S]``, which are chunks' last ones."""

    @abstractmethod
    def decode(self, spec: SpecT, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """``[S, out]`` of the step's rows."""

    def undivided_keys(self, batch: int) -> int:
        """Maximum keys of a row that decode steps of so many rows never divide."""
        return sys.maxsize

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """What batch size, and whether rows are divided, change in the compiled kernels of decode steps."""
        return None
