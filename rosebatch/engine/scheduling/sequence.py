"""A completion under way: its tokens, how many of them are computed, and the blocks that hold their K and V."""

import enum
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rosebatch.core.errors import RowError
from rosebatch.core.request import Completion, Constraint, Logprobs, PackedLogprobs, Request, StopMatcher
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.plan import NO_ADAPTER, NOT_FINITE, SHORTEST_ENDING, AdapterKey, SequenceSpec

# 2^64 over the golden ratio. Its multiples modulo 2^64 are all different (source: Weyl sequences).
_SEED_STEP = 0x9E3779B97F4A7C15
_NO_IDS: frozenset[int] = frozenset()
_POOLED = {"embed": "embedded", "classify": "classified", "score": "scored"}


class Status(enum.Enum):
    """Where the scheduler keeps a sequence. An ending one waits for results of tokens that are all planned."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    FINISHED = enum.auto()


class SequenceState(msgspec.Struct, eq=False):
    """The scheduler's view of one completion. A struct, because one is made for every row.

    ``num_computed_tokens`` trails ``num_tokens``: each step lets it catch up by one chunk. Once it has caught up, a
    token is sampled. Prompts, prefix hits and resumed sequences differ in nothing else. Both numbers count what is
    planned: the last ``num_pending_tokens`` tokens are being sampled, and their values are not known yet.

    Attributes:
        spec: what the runner needs. Only ``restart`` changes it.
        prompt: its token ids, 32 bits each.
        num_prompt_tokens: those of the prompt.
        generated: the tokens so far, 32 bits each.
        forks: further completions of the same prompt. They start from this one's blocks when the prompt is computed.
        tables: its block table in each group of layers, see ``BlockTables``; empty if it holds no blocks.
        snapshot: the slot of the states that it begins with, see ``Snapshots``; None where it begins with zeros.
        snapshot_ends: places in its prompt where a chunk ends, and its states are saved; those to come.
        saved_blocks: of the host, see ``HostBlocks``: they hold K and V of its first ``num_saved_tokens``.
        turn: a number that is higher for those that started to run later; 0 before.
        decoding: whether a plan has sampled its newest token.
        resumed: whether it has its saved blocks again, and its next decode step tells the runner of it.
        replayed: known tokens after those of ``generated``, which are to be sampled once more, see ``rewind``.
        drafts: tokens that may follow. The next chunk verifies as many as it has room for; a result drops them.
        num_unsure_tokens: of the computed ones, those of a window with drafts that may be wrong; a result drops them.
        lags: whether the device may have another last token: its next decode step is one of known tokens.
        num_seen_tokens: known ones that windows with drafts have had. What such a window samples is among them.
        ahead: the constraint behind each of them. Asked again, it may know fewer: near its limit of states.
        mask: the one of the next token, if it was asked for already.
        logprobs, prompt_logprobs: those of the tokens so far, if asked for.
        token_times: when each generated token arrived.
        not_finite: whether its logits or hidden states were not finite, so that nothing follows.
        pooled: what the request gets of its pooled hidden states.
    """

    request: Request
    sample: int
    spec: SequenceSpec
    prompt: TokenIds
    num_prompt_tokens: int
    generated: "array[int]"
    stop_matcher: StopMatcher | None = None
    constraint: Constraint | None = None
    forks: list["SequenceState"] = []
    logprobs: PackedLogprobs | tuple[()] = ()
    prompt_logprobs: PackedLogprobs | tuple[()] = ()
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None
    tables: list[list[int]] = []
    snapshot: int | None = None
    snapshot_ends: list[int] = []
    saved_blocks: list[int] = []
    num_saved_tokens: int = 0
    status: Status = Status.WAITING
    turn: int = 0
    decoding: bool = False
    resumed: bool = False
    replayed: list[int] = []
    drafts: tuple[int, ...] = ()
    num_unsure_tokens: int = 0
    lags: bool = False
    num_seen_tokens: int = 0
    ahead: Sequence[Constraint] = ()
    mask: NDArray[np.int32] | None = None
    finish_reason: str | None = None
    has_end_token: bool = False
    not_finite: bool = False
    pooled: "array[float] | None" = None
    arrival_time: float = 0.0
    finish_time: float | None = None
    # A float for all tokens that came together: it takes less time and no more memory than an array.
    token_times: list[float] = []

    @classmethod
    def start(
        cls,
        request: Request,
        *,
        id: int,
        max_model_len: int,
        sample: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        stop_matcher: StopMatcher | None = None,
        constraint: Constraint | None = None,
        arrival_time: float = 0.0,
        adapter: AdapterKey = NO_ADAPTER,
    ) -> "SequenceState":
        """A completion of a request; prompt and completion together never exceed ``max_model_len`` tokens.

        All completions of a request share ``stop_ids``, see ``stop_ids_of``: a row may give very many.
        A prompt that is pooled or scored gets a single token: its pooled hidden state, or its log-probabilities, come
        in the token's place.

        Raises:
            OverflowError: a token id has more than 32 bits, or a sign; see ``require_servable`` of the engine.
        """
        prompt, sampling = request.prompt_token_ids, request.sampling
        if sample:
            sampling = _sampling_of(sampling, sample)
        own, length = request.pooling, len(prompt)
        generates = own is None and request.scoring is None
        spec = SequenceSpec(
            id,
            prompt,
            sampling,
            min(length + sampling.max_tokens, max_model_len) if generates else length + 1,
            stop_ids,
            guided=constraint is not None,
            has_features=sampling.logprobs is not None or sampling.adjusts,
            scoring=request.scoring,
            images=request.images,
            predicted=_followed(prompt, request.predicted),
            salt=adapter.salt,
            adapter=adapter.number,
        )
        if own is not None:
            assert own.pooling, "the engine has resolved it"
            classifies = own.task != "embed"
            spec = structs.replace(spec, pooling=own.pooling, classifies=classifies, step_token=own.step_token)
        token_ids = prompt if type(prompt) is TokenIds else TokenIds.of(prompt)
        return cls(
            request, sample, spec, token_ids, length, array("I"), stop_matcher, constraint, arrival_time=arrival_time
        )

    @property
    def id(self) -> int:
        """Unique in an engine."""
        return self.spec.id

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of this completion, with its own seed."""
        return self.spec.sampling

    @property
    def may_be_forced(self) -> bool:
        """Whether it may get tokens that no step samples: only a step has log-probabilities."""
        return self.constraint is not None and self.constraint.forces and self.sampling.logprobs is None

    @property
    def waits(self) -> bool:
        """Whether it waits to be admitted, perhaps again."""
        return self.status is Status.WAITING

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self.spec.max_len

    @property
    def block_ids(self) -> list[int]:
        """Its block table in the first group of layers, the only one of most models."""
        return self.tables[0] if self.tables else []

    @property
    def token_ids(self) -> "array[int]":
        """The tokens of prompt and completion, 32 bits each. Not to be changed."""
        return self.prompt + self.generated if self.generated else self.prompt

    def tokens(self, start: int, end: int) -> "array[int]":
        """The known ones at positions from ``start`` to ``end``; of a whole prompt, its own array."""
        prompt = self.num_prompt_tokens
        if end <= prompt:
            return self.prompt if end - start == prompt else self.prompt[start:end]
        generated = self.generated[max(start - prompt, 0) : end - prompt]
        return generated if start >= prompt else self.prompt[start:] + generated

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and completion whose values are known."""
        return self.num_prompt_tokens + len(self.generated)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, pending ones included."""
        return self.num_prompt_tokens + len(self.generated) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V are not in the cache yet; 1 while decoding."""
        # Read for each sequence of a step: another property would take as long again.
        known = self.num_prompt_tokens + len(self.generated)
        return known + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_settled_tokens(self) -> int:
        """Computed tokens, without drafts that may be taken back."""
        return self.num_computed_tokens - len(self.drafts) - self.num_unsure_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens can still follow."""
        return self.spec.max_len - self.num_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether some are still missing; also those of the tokens that may follow a scored prompt."""
        first, scoring = self.spec.first_scored, self.spec.scoring
        following = 0 if scoring is None else len(scoring.next_token_ids)
        return first is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - first + following

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens need not be computed where their K and V are known."""
        spec = self.spec
        if spec.pooling is None and spec.scoring is None and spec.sampling.prompt_logprobs is None:
            # Nearly all, and quicker to check.
            return self.num_prompt_tokens + len(self.generated)
        if spec.pooling in ("mean", "max"):
            return 0
        if spec.pooling == "all":
            return 0 if spec.step_token is None else spec.prompt_token_ids.index(spec.step_token)
        if not self.needs_prompt_logprobs:
            return self.num_known_tokens
        assert spec.first_scored is not None
        # The token before each that is scored is computed, so the last one of the prompt if those after it are.
        return min(spec.first_scored + len(self.prompt_logprobs), self.num_prompt_tokens) - 1

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return list(self.generated)

    def restart(self, spec: SequenceSpec) -> None:
        """Compute all tokens again, by this spec. The sequence holds no blocks, and keeps its tokens."""
        assert not self.tables and not self.saved_blocks, "blocks were computed by the last spec"
        self.spec = spec

    def rewind(self) -> None:
        """Go back to the prompt: the tokens after it are sampled again, in the steps that they came from.

        They are the same then, and so are K and V: computed like a prompt, both might differ in their last bits.
        """
        assert not self.tables and not self.num_pending_tokens, "no block holds the tokens, and all are known"
        self.replayed = [*self.generated, *self.replayed]
        del self.generated[:]

    def verify(self, token_ids: list[int]) -> list[int]:
        """Drop the drafts; returns the sampled tokens up to the first that is not the draft for its position.

        Those after it follow a wrong draft. Random numbers are keyed on seed and position, so the others are the tokens
        of steps without drafts (the idea: arXiv 2211.17192).
        """
        drafts, self.drafts, self.ahead = self.drafts, (), ()
        pairs = enumerate(zip(drafts, token_ids, strict=False), start=1)
        return token_ids[: next((count for count, (draft, token_id) in pairs if draft != token_id), len(token_ids))]

    def apply_token_ids(
        self,
        token_ids: list[int],
        logprobs: Sequence[Logprobs] = (),
        now: float | None = None,
        *,
        complete: bool | None = None,
    ) -> int:
        """Append tokens up to the one that finishes the sequence; returns how many were appended.

        No other place writes a token (source: article S3). So first tokens, later tokens and tokens after a
        preemption follow one rule. All of these arrived at the time ``now``, but for those that are ``replayed``.
        ``complete``: see ``_tokens_until_stop``.
        """
        now = time.perf_counter() if now is None else now
        spec, own, known, self.mask = self.spec, self.generated, 0, None
        if self.replayed:
            known = min(len(self.replayed), len(token_ids) - (NOT_FINITE in token_ids))
            own.fromlist(self.replayed[:known])
            del self.replayed[:known]
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        room = spec.max_len - self.num_prompt_tokens - len(own)
        if not_finite := NOT_FINITE in token_ids:
            token_ids = token_ids[:-1]
        stopped = None
        if self.stop_matcher is not None or self.constraint is not None or not spec.stop_ids.isdisjoint(token_ids):
            stopped = self._tokens_until_stop(token_ids, complete)
        appended = len(token_ids)
        if stopped is not None:
            self.finish_reason, appended = "stop", stopped
        elif appended >= room:
            self.finish_reason, appended = "length", room
        elif not_finite:
            self.not_finite, self.finish_reason = True, "error"
        # ``extend`` takes three times as long.
        own.fromlist(token_ids[:appended])
        self.token_times += [now] * appended
        if logprobs:
            self.logprobs = self.logprobs or PackedLogprobs()
            self.logprobs.extend(logprobs[:appended])
        if self.finish_reason is not None:
            self.finish_time = now
        return known + appended

    def apply_rest(self, constraint: Constraint, now: float) -> None:
        """Append the tokens up to the end that no other could replace: only their log-probabilities need a step."""
        if self.sampling.logprobs is not None or self.replayed:
            return
        if rest := constraint.rest():
            self.apply_token_ids([*rest], now=now)

    def _tokens_until_stop(self, token_ids: list[int], completes: bool | None) -> int | None:
        """How many of the next tokens to keep if one of them stops the sequence, that one included; else None.

        ``completes``: whether the last one does, as the constraint says, which has followed them. None: it follows now.
        """
        # How many of the next tokens may not stop it.
        protected = self.sampling.min_tokens - len(self.generated)
        for count, token_id in enumerate(token_ids[: self.spec.max_len - self.num_known_tokens], start=1):
            matched = self.stop_matcher is not None and self.stop_matcher.feed(token_id)
            if completes is None:
                complete = self.constraint is not None and self.constraint.feed(token_id)
            else:
                complete = completes and count == len(token_ids)
            self.has_end_token = count > protected and token_id in self.spec.stop_ids
            if complete or self.has_end_token or (count > protected and matched):
                return count
        return None

    def apply_pooled(self, pooled: "array[float] | None", now: float) -> None:
        """Take what the request gets of its pooled states, which finishes the sequence; None if they are not finite."""
        assert self.request.pooling is not None, "the states are to be pooled"
        self.pooled, self.finish_time = pooled, now
        self.not_finite = pooled is None
        self.finish_reason = "error" if self.not_finite else _POOLED[self.request.pooling.task]

    def apply_prompt_logprobs(self, first: int, logprobs: Sequence[Logprobs], now: float) -> None:
        """Take those of the tokens after a chunk, whose first has position ``first``, as far as they are asked for.

        Recomputed ones are the same again. The last ones finish a sequence that is scored.
        """
        assert self.spec.first_scored is not None, "they are asked for"
        self.prompt_logprobs = self.prompt_logprobs or PackedLogprobs()
        known = self.spec.first_scored + len(self.prompt_logprobs)
        self.prompt_logprobs.extend(logprobs[known - max(first, self.spec.first_scored) :])
        if self.spec.scoring is not None and not self.needs_prompt_logprobs:
            self.not_finite = not math.isfinite(self.prompt_logprobs.total())
            self.finish_time, self.finish_reason = now, "error" if self.not_finite else "scored"

    def completion(self) -> Completion:
        """The result of a finished sequence."""
        assert self.finish_reason and self.finish_time is not None
        return Completion(
            request=self.request,
            sample=self.sample,
            token_ids=tuple(self.generated),
            finish_reason=self.finish_reason,
            has_end_token=self.has_end_token,
            cached_tokens=self.num_cached_tokens or 0,
            arrival_time=self.arrival_time,
            finish_time=self.finish_time,
            token_times=self.token_times,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            error=self._error() if self.not_finite or self.constraint is not None else None,
        )

    def _error(self) -> RowError | None:
        if self.not_finite and self.spec.pooling is not None:
            return RowError("non_finite_logits", "the model's hidden states of the prompt are not finite")
        if self.not_finite and self.spec.scoring is not None:
            return RowError("non_finite_logits", "the model's logits of the prompt are not finite")
        reason = None if self.constraint is None else self.constraint.error
        if self.not_finite and reason is None:
            where = len(self.generated) + 1
            return RowError("non_finite_logits", f"the model's logits for token {where} of the answer are not finite")
        if reason is None:
            return None
        # Where a constraint has left no token, no logit is finite.
        return RowError("invalid_sampling" if self.not_finite else "grammar_failed", reason)


def stop_ids_of(sampling: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """The tokens that end the completions of a request, of those that can be generated."""
    model = _NO_IDS if sampling.ignore_eos else eos_token_ids
    if not sampling.stop_token_ids:
        return model
    return model.union(token_id for token_id in sampling.stop_token_ids if token_id < vocab_size)


def _followed(prompt: Sequence[int], predicted: Sequence[int]) -> "array[int]":
    """A prediction behind the prompt's end: the first token of the answer decides whether it follows again."""
    return array("I", [*prompt[max(len(prompt) - SHORTEST_ENDING + 1, 0) :], *predicted] if predicted else ())


def _sampling_of(sampling: SamplingParams, sample: int) -> SamplingParams:
    """The parameters of a further completion: each has its own seed, and only the first reports on the prompt."""
    seed = ((sampling.seed or 0) + sample * _SEED_STEP) % 2**64
    fork = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
    return fork.seeded(seed)
