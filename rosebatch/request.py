"""What is asked of the engine and what becomes of it: SamplingParams, Request, Sequence, Completion."""

import enum
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one completion are chosen and when it ends.

    The filters apply in this order, each to what the one before left: temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to at least this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0 keeps all.
        max_tokens: most tokens to generate.
        seed: every random number is a function of this and the token's position alone.
        stop: strings that end the completion; the text ends before the first of them.
        stop_token_ids: tokens that end the completion, beside the model's own end tokens.
        ignore_eos: go on past the model's end tokens.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", ">= 0", self.temperature)
        _require(self.top_k >= 0, "top_k", ">= 0 (0 keeps all tokens)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.max_tokens >= 1, "max_tokens", ">= 1", self.max_tokens)
        _require(0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        _require(all(self.stop), "stop", "made of non-empty strings", list(self.stop))
        _require(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", ">= 0", list(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0.0


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt as the engine takes it.

    Attributes:
        index: position in the input, counted from 0.
        prompt_token_ids: at least one token.
        metadata: the input line's other fields, carried through untouched.
        where: the line it came from, for messages to people.
        echo: what the completion's text is to begin with.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    echo: str = ""


class StopMatcher(Protocol):
    """Watches the generated tokens of one sequence for its stop strings."""

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True once a stop string has appeared."""
        ...


class Status(enum.Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: the tokens so far, how many of them are computed, and the blocks that hold their K/V.

    ``num_computed_tokens`` trails ``num_tokens``: each step lets it catch up by one chunk, and once it has caught
    up a token is sampled. Prompts, prefix hits and resumed sequences differ in nothing else. Both count what has been
    planned: the last ``num_pending_tokens`` tokens are sampled or about to be, and not known here yet. ``decoding``
    says that a plan sampled its last token.
    """

    request: Request
    token_ids: list[int]
    max_len: int
    stop_ids: frozenset[int]
    stop_matcher: StopMatcher | None = None
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    decoding: bool = False
    finish_reason: str | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    @classmethod
    def start(
        cls,
        request: Request,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        stop_matcher: StopMatcher | None = None,
    ) -> "Sequence":
        """Wrap a request: prompt and completion together never exceed ``max_model_len`` tokens."""
        prompt, sampling = list(request.prompt_token_ids), request.sampling
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        return cls(
            request=request,
            token_ids=prompt,
            max_len=min(len(prompt) + sampling.max_tokens, max_model_len),
            stop_ids=eos | frozenset(sampling.stop_token_ids),
            stop_matcher=stop_matcher,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V is not in the cache yet; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Most tokens that can still follow."""
        return self.max_len - self.num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def apply_token_ids(self, token_ids: Iterable[int]) -> int:
        """Append sampled tokens up to the one that finishes the sequence; how many were appended.

        The only place that writes a token (source: article S3), so that first tokens, later tokens and
        tokens after a preemption cannot come to differ.
        """
        before = len(self.token_ids)
        now = time.perf_counter()
        if self.first_token_time is None:
            self.first_token_time = now
        for token_id in token_ids:
            self.token_ids.append(token_id)
            matched = self.stop_matcher is not None and self.stop_matcher.feed(token_id)
            if token_id in self.stop_ids or matched:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_len:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.finish_time = now
                break
        return len(self.token_ids) - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request; times are seconds on the clock of ``time.perf_counter``."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: str
    cached_tokens: int
    arrival_time: float
    first_token_time: float
    finish_time: float
