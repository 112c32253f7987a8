"""What is asked of the engine and what becomes of it: Request, Sequence, Completion."""

import enum
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

from rosebatch.sampling_params import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt as the engine takes it.

    Attributes:
        index: position in the input, counted from 0.
        prompt_token_ids: at least one token.
        metadata: the input line's other fields, carried through untouched.
        where: the line it came from, for messages to people.
        echo: what the completion's text is to begin with.
        choice: which of the row's completions this is, the first of ``n``.
        num_choices: how many the row has in all.
        prompt_only: whether the completion is to be dropped.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    echo: str = ""
    choice: int = 0
    num_choices: int = 1
    prompt_only: bool = False

    def sample(self, number: int) -> "Request":
        """The request for one of its ``n`` completions: each has a seed of its own, the first reports on the prompt."""
        if number == 0:
            return self
        # Multiples of an odd number are all different (source: Weyl sequences; this one is 2^64 over the golden ratio).
        seed = (self.sampling.seed + number * 0x9E3779B97F4A7C15) % 2**64
        sampling = replace(self.sampling, seed=seed, prompt_logprobs=None)
        return replace(self, choice=self.choice + number, sampling=sampling)


class Logprobs(NamedTuple):
    """Of one token: its log-probability, and the likeliest tokens in its place with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StopMatcher(Protocol):
    """Watches the generated tokens of one sequence for its stop strings."""

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True once a stop string has appeared."""
        ...


class Constraint(Protocol):
    """Keeps the tokens of one sequence to a grammar. Not for several threads at a time.

    Attributes:
        error: why the completion ended before it matched; None where nothing went wrong.
    """

    error: str | None

    @classmethod
    def fill_all(cls, constraints: "Seq[Self]", masks: Any) -> None:
        """Write which tokens may come next.

        Args:
            constraints: of R sequences.
            masks: ``[R, ceil(V / 32)]`` int32 of numpy, token 0 as the first word's lowest bit.
        """
        ...

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True where nothing may follow it."""
        ...


class Status(enum.Enum):
    """Where a sequence stands in the scheduler; one that is ending waits for tokens that are all planned."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: the tokens so far, how many of them are computed, and the blocks that hold their K/V.

    ``num_computed_tokens`` trails ``num_tokens``: each step lets it catch up by one chunk, and once it has caught
    up a token is sampled. Prompts, prefix hits and resumed sequences differ in nothing else. Both count what has been
    planned: the last ``num_pending_tokens`` tokens are sampled or about to be, and not known here yet. ``decoding``
    says that a plan sampled its last token.

    ``forks`` are further completions of the same prompt, which begin when this one's prompt is computed, with its
    blocks. ``logprobs`` and ``prompt_logprobs`` are of the tokens so far, where they are asked for. ``special`` says
    that its logits are not only sampled.
    """

    request: Request
    token_ids: list[int]
    max_len: int
    stop_ids: frozenset[int]
    stop_matcher: StopMatcher | None = None
    constraint: Constraint | None = None
    special: bool = False
    forks: list["Sequence"] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
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
        constraint: Constraint | None = None,
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
            constraint=constraint,
            special=sampling.adjusts or sampling.logprobs is not None,
        )

    @property
    def sampling(self) -> SamplingParams:
        """The request's."""
        return self.request.sampling

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
    def needs_prompt_logprobs(self) -> bool:
        """Whether some of them are yet to come, so that the whole prompt has to be computed."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def apply_token_ids(self, token_ids: Seq[int], logprobs: Iterable[Logprobs] = ()) -> int:
        """Append sampled tokens up to the one that finishes the sequence; how many were appended.

        The only place that writes a token (source: article S3), so that first tokens, later tokens and
        tokens after a preemption cannot come to differ.
        """
        now = time.perf_counter()
        if self.first_token_time is None:
            self.first_token_time = now
        room = self.max_len - len(self.token_ids)
        appended = self._end_of(token_ids)
        if appended is not None:
            self.finish_reason = "stop"
        elif len(token_ids) >= room:
            self.finish_reason = "length"
        appended = min(len(token_ids), room) if appended is None else appended
        self.token_ids += token_ids[:appended]
        self.logprobs += islice(logprobs, appended)
        if self.finish_reason is not None:
            self.finish_time = now
        return appended

    def _end_of(self, token_ids: Seq[int]) -> int | None:
        """How many of the next tokens there are up to one that ends the sequence, its length apart; None for no end."""
        watched = self.stop_matcher is not None or self.constraint is not None
        if not watched and self.stop_ids.isdisjoint(token_ids):
            return None
        # Of the next ones, so many may not end it.
        protected = self.num_prompt_tokens + self.sampling.min_tokens - len(self.token_ids)
        for count, token_id in enumerate(token_ids[: self.max_len - len(self.token_ids)], start=1):
            matched = self.stop_matcher is not None and self.stop_matcher.feed(token_id)
            complete = self.constraint is not None and self.constraint.feed(token_id)
            if complete or (count > protected and (matched or token_id in self.stop_ids)):
                return count
        return None

    def apply_prompt_logprobs(self, first: int, logprobs: Seq[Logprobs]) -> None:
        """Take those of the prompt's tokens from position ``first`` on; computed again, they are the same."""
        self.prompt_logprobs[first - 1 : first - 1 + len(logprobs)] = logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request; times are seconds on the clock of ``time.perf_counter``.

    ``error`` says why it does not match its grammar, where something went wrong.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: str
    cached_tokens: int
    arrival_time: float
    first_token_time: float
    finish_time: float
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    error: str | None = None
