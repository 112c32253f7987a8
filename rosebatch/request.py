"""What is asked of the engine and what becomes of it: SamplingParams, Request, Sequence, Completion."""

import enum
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, Self

MOST_LOGPROBS = 20
MOST_SAMPLES = 1024

GrammarKind = Literal["json_schema", "json_object", "regex", "choice"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a completion has to match, as the user wrote it.

    Attributes:
        kind: of grammar.
        source: a JSON schema as JSON, a regular expression, or the choices as a JSON list; empty for ``json_object``.
    """

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one completion are chosen and when it ends.

    Logits are changed in this order: ``logit_bias``, ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty``, ``min_tokens``, ``grammar``; then the filters apply, each to what the one before left:
    temperature, top-k, top-p, min-p.

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
        n: completions of one prompt, each with random numbers of its own.
        min_tokens: before so many are generated, no end token is, and stop strings do not count.
        presence_penalty: taken off the logit of every token generated so far.
        frequency_penalty: the same, times how often it was generated.
        repetition_penalty: of every token of the prompt or generated so far, a positive logit is divided by this, a
            negative one multiplied (source: Keskar et al. 2019, CTRL).
        logit_bias: pairs of token id and what is added to its logit.
        logprobs: report the log-probability of each token generated, and of so many likeliest ones in its place, by the
            model's own logits, before any of the above; None for no report.
        prompt_logprobs: the same of the prompt's tokens from the second on.
        grammar: what the completion has to match.

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
    n: int = 1
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        for name, rule in self._broken_rules():
            value = getattr(self, name)
            raise ValueError(f"{name} must be {rule}, got {list(value) if isinstance(value, tuple) else value!r}")
        if self.grammar is not None and self.min_tokens:
            raise ValueError("min_tokens and a grammar exclude each other: the grammar says where it may end")

    def _broken_rules(self) -> Iterator[tuple[str, str]]:
        """Field, and what it must be. A generator of plain conditions: this runs for every row of a file."""
        if not 0 <= self.temperature < math.inf:
            yield "temperature", ">= 0"
        if self.top_k < 0:
            yield "top_k", ">= 0 (0 keeps all tokens)"
        if not 0 < self.top_p <= 1:
            yield "top_p", "in (0, 1]"
        if not 0 <= self.min_p <= 1:
            yield "min_p", "in [0, 1]"
        if self.max_tokens < 1:
            yield "max_tokens", ">= 1"
        if not 0 <= self.seed < 2**64:
            yield "seed", "in [0, 2^64)"
        if not all(self.stop):
            yield "stop", "made of non-empty strings"
        if any(token_id < 0 for token_id in self.stop_token_ids):
            yield "stop_token_ids", ">= 0"
        if not 1 <= self.n <= MOST_SAMPLES:
            yield "n", f"in [1, {MOST_SAMPLES}]"
        if not 0 <= self.min_tokens <= self.max_tokens:
            yield "min_tokens", "in [0, max_tokens]"
        if not -2 <= self.presence_penalty <= 2:
            yield "presence_penalty", "in [-2, 2]"
        if not -2 <= self.frequency_penalty <= 2:
            yield "frequency_penalty", "in [-2, 2]"
        if not 0 < self.repetition_penalty < math.inf:
            yield "repetition_penalty", "> 0"
        if not all(math.isfinite(bias) for _, bias in self.logit_bias):
            yield "logit_bias", "finite"
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            yield "logprobs", f"in [0, {MOST_LOGPROBS}]"
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MOST_LOGPROBS:
            yield "prompt_logprobs", f"in [0, {MOST_LOGPROBS}]"

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens the prompt or the completion has."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before tokens are filtered and chosen, but for a grammar."""
        return self.penalizes or bool(self.logit_bias) or self.min_tokens > 0


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
    sampling: SamplingParams = SamplingParams()
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
