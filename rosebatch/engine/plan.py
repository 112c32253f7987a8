"""What passes between scheduler and runner: plain data that can be pickled, sent to another process and replayed.

A plan names sequences by id. The first plan that computes a sequence brings its ``SequenceSpec``. Later plans only
bring changes: new blocks, new tokens, and at last the release of the id.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from rosebatch.core.images import PromptImage
from rosebatch.core.pooling_params import AnyPooling
from rosebatch.core.request import Logprobs
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.scoring import Scoring
from rosebatch_kernels.common.tokens import NOT_FINITE as NOT_FINITE

# Tokens of an ending that must have come before, for drafts: fewer would often be chance.
SHORTEST_ENDING = 3
# Tokens of finished answers in which drafts are found, and what stands behind each answer: no token.
POOL_TOKENS, NO_ANSWER = 1 << 13, (1 << 32) - 1
# In a block table: a block that left its group's sliding window, and is not read.
GONE = -1
# (group of layers, first index in the sequence's block table of this group, block ids or ``GONE`` from there on)
BlockChange = tuple[int, int, tuple[int, ...]]
# (group of layers, source, destination)
BlockCopy = tuple[int, int, int]
# (block, block of the host), of the only group of layers
HostCopy = tuple[int, int]


class AdapterKey(NamedTuple):
    """An adapter of the model.

    Attributes:
        number: counted from 1; 0 is the model alone.
        salt: of the keys that it makes: equal names may have other contents in the next run, and other names the same.
    """

    number: int
    salt: bytes


NO_ADAPTER = AdapterKey(0, b"")


class SequenceSpec(msgspec.Struct, frozen=True):
    """What a runner needs of a sequence.

    Attributes:
        id: unique in an engine.
        prompt_token_ids: all of the prompt.
        sampling: with the sequence's own seed.
        max_len: maximum number of tokens of prompt and completion together.
        stop_ids: tokens that end it: the model's own end tokens, unless ignored, and those of the request.
        guided: whether a grammar decides which tokens may come next.
        has_features: whether its logits are more than sampled: penalties, biases, log-probabilities.
        salt: what decides its keys besides tokens and images. Sequences share blocks only if their salts are equal.
        adapter: the number of the one that it is computed with; 0 for the model alone.
        restart_len: number of tokens with which it is computed again from the start; None for never.
        pooling: what becomes of its hidden states; None if they are not pooled.
        classifies: whether the pooled states go through the model's classifier.
        step_token: see ``PoolingParams``.
        scoring: which tokens get log-probabilities, and none are generated; None for no such sequence.
        images: in the prompt.
        predicted: tokens that may follow the prompt, behind its end, as if they had followed once: for drafts.
    """

    id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    max_len: int
    stop_ids: frozenset[int] = frozenset()
    guided: bool = False
    has_features: bool = False
    salt: bytes = b""
    restart_len: int | None = None
    pooling: AnyPooling | None = None
    classifies: bool = False
    step_token: int | None = None
    scoring: Scoring | None = None
    images: tuple[PromptImage, ...] = ()
    predicted: "array[int]" = array("I")
    adapter: int = 0

    @property
    def generates(self) -> bool:
        """Whether tokens follow the prompt."""
        return self.pooling is None and self.scoring is None

    @property
    def first_scored(self) -> int | None:
        """Position of the prompt's first token that gets a log-probability; None if none does."""
        if self.scoring is not None:
            return self.scoring.start
        return None if self.sampling.prompt_logprobs is None else 1

    def pooled_places(self, start: int, end: int) -> np.ndarray:
        """``[N]`` int64, positions from ``start`` to ``end`` of tokens that get numbers of their own."""
        if self.pooling != "all":
            return np.empty(0, np.int64)
        if self.step_token is None:
            return np.arange(start, end)
        return start + np.flatnonzero(np.array(self.prompt_token_ids[start:end]) == self.step_token)

    def is_scored(self, end: int) -> bool:
        """Whether tokens after those of a chunk that ends here may get log-probabilities."""
        return self.first_scored is not None and end >= self.first_scored

    @property
    def decode_len(self) -> int:
        """The number of tokens at which decode steps end: there the sequence ends or restarts."""
        return self.max_len if self.restart_len is None else self.restart_len


class Chunk(msgspec.Struct, frozen=True):
    """Tokens of a sequence that one packed step computes.

    Attributes:
        id: the sequence's.
        start: position of the first token.
        token_ids: the tokens, 32 bits each.
        sampled: how many tokens at its end each get a sampled token after them: 1 for the last known token, and 1 for
            each draft after that. 0 for a chunk that does not reach the end of the known tokens.
        blocks: changes of its block tables since the last plan with it; all of the tables in the first. A block that
            leaves a window changes nothing, and one that is copied is a change of its own.
        output_token_ids: all tokens generated so far, if sampling depends on them; else empty.
        pools: whether the chunk reaches the end of a prompt whose hidden states are pooled.
        decodes: whether a token before these was sampled since the sequence began to run: they are no prompt then, but
            the last token, those that a grammar forced after it, and drafts.
    """

    id: int
    start: int
    token_ids: "array[int]"
    sampled: int
    blocks: tuple[BlockChange, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    pools: bool = False
    decodes: bool = False

    @property
    def drafts(self) -> "array[int]":
        """The last tokens, each of which the token that is sampled before it verifies."""
        return self.token_ids[len(self.token_ids) - max(self.sampled - 1, 0) :]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


class DecodeRow(msgspec.Struct, frozen=True):
    """A sequence in a window of decode steps: tokens ``start .. start + length - 1``, each fed back by the device.

    Attributes:
        resumed: all tokens generated so far, if the plan starts the sequence: K and V of all but the last come back
            from the host. ``blocks`` has all of its tables then. Else empty.
        unseen: its last known tokens, in a window with drafts: all that no such window has had before.
        known: its tokens from ``start`` on, in a window of known tokens. Its one step computes all of them, and samples
            a token after them if ``length`` is 1; there are more to come if it is 0.
        output_token_ids: all tokens generated so far, if sampling depends on them and not all were sampled; else empty.
    """

    id: int
    start: int
    length: int
    blocks: tuple[BlockChange, ...] = ()
    resumed: tuple[int, ...] = ()
    unseen: "array[int]" = array("I")
    known: "array[int]" = array("I")
    output_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token that is computed at most."""
        return self.start + (len(self.known) or self.length)


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both kinds of plan.

    Attributes:
        saves: blocks to copy to the host before all else: their sequences give them up.
        wipes: (group, block) to overwrite with zeros then: the last holder's K and V may not be finite.
        copies: (group, source, destination) blocks to copy before the forward pass; no block is both.
        restores: blocks to copy back from the host after that.
        state_loads: (slot of a snapshot, sequence) whose states to copy before the forward pass.
        state_saves: (sequence, slot of a snapshot) whose states to copy after it.
        adapter_loads: (adapter, slot of the stack that it gets), before all that this plan computes.
        started: sequences that this plan computes for the first time, or again after it lost its blocks.
        released: ids that the runner may forget: no later plan has them, unless they are started again.
        num_preempted: how many of the released ones lost their blocks to others, and wait again.
        reset: whether the runner first forgets all sequences, because they were aborted.
    """

    saves: tuple[HostCopy, ...] = ()
    wipes: tuple[tuple[int, int], ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    restores: tuple[HostCopy, ...] = ()
    state_loads: tuple[tuple[int, int], ...] = ()
    state_saves: tuple[tuple[int, int], ...] = ()
    adapter_loads: tuple[tuple[int, int], ...] = ()
    started: tuple[SequenceSpec, ...] = ()
    released: tuple[int, ...] = ()
    num_preempted: int = 0
    reset: bool = False


class PackedStep(_Plan, frozen=True):
    """One step over chunks of any length, one after the other; chunks of a single token come first."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def num_sequences(self) -> int:
        """Sequences that take part."""
        return len(self.chunks)

    @property
    def sampled_ids(self) -> list[int]:
        """Sequences that get tokens, in the order of the result."""
        return [chunk.id for chunk in self.chunks if chunk.sampled]

    @property
    def pooled_numbers(self) -> list[int]:
        """Numbers of the chunks that pool."""
        return [number for number, chunk in enumerate(self.chunks) if chunk.pools]

    @property
    def read_numbers(self) -> list[int]:
        """Numbers of the chunks whose last hidden state is read: first those that sample, then those that pool."""
        return [number for number, chunk in enumerate(self.chunks) if chunk.sampled] + self.pooled_numbers


class DecodeWindow(_Plan, frozen=True):
    """Decode steps back to back; each row takes part in the first ``length`` of them.

    Attributes:
        queries: of each row in a step: its last token, and drafts that the device finds. With more than one, a row
            gets at most ``length`` tokens in all, and it is not known how many.
        answers: of a window with drafts, at most ``POOL_TOKENS`` of finished answers, if others than before; else None.
    """

    rows: tuple[DecodeRow, ...]
    steps: int
    queries: int = 1
    answers: "array[int] | None" = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum([len(row.known) or row.length for row in self.rows])

    @property
    def num_sequences(self) -> int:
        """Sequences that take part."""
        return len(self.rows)

    @property
    def sampled_ids(self) -> list[int]:
        """Sequences that get tokens, in the order of the result."""
        return [row.id for row in self.rows if row.length]

    @property
    def drafts(self) -> bool:
        """Whether the device looks for drafts."""
        return self.queries > 1

    @property
    def knows(self) -> bool:
        """Whether its only step is one of known tokens, a row of the device for each."""
        return len(self.rows[0].known) > 0


StepPlan = PackedStep | DecodeWindow


class DraftRequest(NamedTuple):
    """A decoding sequence for which a head of drafts is asked, between two steps.

    Attributes:
        id: the sequence's.
        token_id: its last token, the only one that is not computed.
        position: of it.
        most: drafts at most.
    """

    id: int
    token_id: int
    position: int
    most: int


class RestartPolicy(Protocol):
    """Decides when a sequence is computed again, because its keys depend on more than its tokens and positions."""

    def spec_for(self, spec: SequenceSpec, num_tokens: int) -> SequenceSpec:
        """The spec of a sequence with so many known tokens that holds no blocks: its salt and ``restart_len``."""
        ...

    def rotary_rows(self, chunk: Chunk, spec: SequenceSpec) -> np.ndarray:
        """``[tokens of the chunk]`` int32, the row of each in the rotary tables. Decode steps use the positions."""
        ...


class StepResult(msgspec.Struct, frozen=True):
    """What a plan brought.

    Attributes:
        token_ids: for each of the plan's ``sampled_ids``, the tokens. They are as many as its chunk's ``sampled``, or
            at most the length of its row in a window: fewer if the model's end token came first. ``NOT_FINITE`` is the
            last where the logits are not finite.
        logprobs: in the same order, of each token; an empty list for a sequence without.
        prompt_logprobs: by the number of a chunk in the plan, of the prompt token after each of its own, from the
            sequence's ``first_scored`` on. At the end of a scored prompt, those of its next tokens follow.
        pooled: by the number of a chunk that pools, ``[H]`` fp32; of all tokens, ``[N, labels]``.
        seconds: that the device was busy with it.
        syncs: how often the host waited for the device.
        graph_replays, graph_captures: of CUDA graphs.
        images, image_seconds: that were encoded for it, and what that took of ``seconds``.
        drafted, accepted: drafts of a window, and those of them that were right.
    """

    token_ids: list[list[int]]
    logprobs: Sequence[Sequence[Logprobs]] = ()
    prompt_logprobs: Mapping[int, Sequence[Logprobs]] = {}
    pooled: Mapping[int, np.ndarray] = {}
    seconds: float = 0.0
    syncs: int = 0
    graph_replays: int = 0
    graph_captures: int = 0
    images: int = 0
    image_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
