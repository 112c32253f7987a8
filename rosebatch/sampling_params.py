"""How the tokens of a completion are chosen, and when it ends."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


# What holds where nothing is said.
GREEDY = SamplingParams()
