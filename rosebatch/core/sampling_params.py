"""How the tokens of a completion are chosen, and when it ends."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import FrozenInstanceError, InitVar, dataclass, fields, replace
from operator import attrgetter, index
from typing import Any, Self

from rosebatch.core.not_served import not_served
from rosebatch.core.plain import is_text, plain
from rosebatch.core.structured_outputs import GrammarSpec, StructuredOutputsParams, grammars_of
from rosebatch.core.words import quoted

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
# Stop strings, or bad words: each costs time at every token. Bad words are encoded as a whole.
MAX_TEXTS = 4096
MAX_BAD_CHARACTERS = 1 << 16
# Values of any other list, and of a bias: twice the tokens of any model.
MAX_IDS = 1 << 19
# As good as no limit: sequences end at the model's length. A prompt's length added to it fits 32 bits.
MAX_TOKENS = 2**30
# What a device holds as 32-bit numbers. A larger top-k keeps all tokens; a higher temperature makes all equally likely.
_MAX_TOP_K = 2**31 - 1
_HOTTEST = 1e30
# Beyond these, logits would overflow.
_MAX_BIAS = 1e28
_PENALTIES = (1e-9, 1e9)
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]*)")

# vLLM's parameters that change nothing here, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "detokenize": (True, False),
    "spaces_between_special_tokens": (True, False),
    "flat_logprobs": (False,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "truncate_prompt_tokens": (None,),
}


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
        max_tokens: most tokens to generate. No limit is beyond ``MAX_TOKENS``, here or in ``min_tokens``.
        seed: every random number is a function of this and the token's position alone. None lets the library or job
            choose one for each prompt; the engine takes it as 0.
        stop: strings that end the completion; the text ends before the first of them. One string will do.
        stop_token_ids: tokens that end the completion, as the model's own end tokens do.
        ignore_eos: continue past the model's end tokens.
        n: completions of one prompt, each with its own random numbers.
        min_tokens: no end token is generated, and no stop string counts, before so many tokens.
        presence_penalty: subtracted from the logit of every generated token.
        frequency_penalty: subtracted once for each time the token was generated.
        repetition_penalty: divides a positive logit, multiplies a negative one, of every token in the prompt or
            generated (source: Keskar et al. 2019, CTRL).
        logit_bias: pairs of token id and the number added to its logit; a mapping will do.
        logprobs: report the log-probability of each generated token and of so many likeliest ones at its position. They
            are of the model's own logits, before any of the above. None for no report.
        prompt_logprobs: the same for the prompt's tokens from the second on.
        grammar: what the completion has to match.
        bad_words: texts that are never generated, alone or after a space, as the tokenizer writes them.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: the text ends after the stop string, not before it.
        max_reasoning_tokens: most tokens that the model may think before it answers; needs a model whose reasoning can
            be parsed. None for no limit.

    Args:
        structured_outputs: the grammar as vLLM's ``StructuredOutputsParams``, or as a mapping of its fields.
        guided_decoding: an older name of that.

    Others are vLLM's parameters that change nothing here.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
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
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    max_reasoning_tokens: int | None = None
    structured_outputs: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    best_of: InitVar[int | None] = None
    detokenize: InitVar[bool] = True
    spaces_between_special_tokens: InitVar[bool] = True
    flat_logprobs: InitVar[bool] = False
    logits_processors: InitVar[Any] = None
    extra_args: InitVar[Any] = None
    truncate_prompt_tokens: InitVar[int | None] = None

    def __post_init__(self, structured_outputs: Any, guided_decoding: Any, *neutral: Any) -> None:
        if neutral != _NOTHING_ASKED:
            _require_neutral(neutral)
        if structured_outputs is not None or guided_decoding is not None:
            self._take_grammar(structured_outputs, guided_decoding)
        self._normalize()
        for name, rule in self._broken_rules():
            value = getattr(self, name)
            told = quoted(list(value) if isinstance(value, tuple) else value)
            raise ValueError(f"{name} must be {rule}, got {told}")
        if self.grammar is not None and self.min_tokens:
            raise ValueError("min_tokens and a grammar exclude each other: the grammar says where it may end")

    def _take_grammar(self, *given: Any) -> None:
        """Make the grammar of what has other names."""
        several = [each for each in (self.grammar, *given) if each is not None]
        if len(several) > 1:
            raise ValueError("an answer can have one grammar: keep one of grammar, structured_outputs, guided_decoding")
        params = StructuredOutputsParams.of(several[0]) if isinstance(several[0], Mapping) else several[0]
        if not isinstance(params, StructuredOutputsParams):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams, got {type(params).__name__}")
        (grammar,) = grammars_of(params)
        object.__setattr__(self, "grammar", grammar)

    def _normalize(self) -> None:
        """Take what scripts pass: NumPy's numbers, one stop string or a list, ``top_k`` -1, ``max_tokens`` None."""
        for name, (kinds, what) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                value = plain(value)
                object.__setattr__(self, name, value)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"{name} must be {what}, got {quoted(value)}")
        loose: dict[str, Any] = {}
        if isinstance(self.stop, str):
            loose["stop"] = (self.stop,)
        elif not isinstance(self.stop, tuple):
            loose["stop"] = tuple(self.stop or ())
        for name in ("stop_token_ids", "bad_words"):
            if (value := getattr(self, name)) or not isinstance(value, tuple):
                loose[name] = tuple(map(plain, _few(name, value or ())))
        if self.allowed_token_ids is not None:
            loose["allowed_token_ids"] = tuple(map(plain, _few("allowed_token_ids", self.allowed_token_ids)))
        if self.logit_bias or not isinstance(self.logit_bias, tuple):
            loose["logit_bias"] = _bias_pairs(_few("logit_bias", self.logit_bias or ()))
        if self.top_k == -1:
            loose["top_k"] = 0
        elif self.top_k > _MAX_TOP_K:
            loose["top_k"] = _MAX_TOP_K
        if self.max_tokens is None or self.max_tokens > MAX_TOKENS:
            loose["max_tokens"] = MAX_TOKENS
            if MAX_TOKENS < self.min_tokens <= (self.max_tokens or self.min_tokens):
                loose["min_tokens"] = MAX_TOKENS
        if _HOTTEST < self.temperature < math.inf:
            loose["temperature"] = _HOTTEST
        for name, value in loose.items():
            # The one way to convert a field of a frozen dataclass before anybody sees it.
            object.__setattr__(self, name, value)

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
        if self.max_tokens < 1 and (self.max_tokens < 0 or self.prompt_logprobs is None):
            yield "max_tokens", ">= 1"
        if self.seed is not None and not 0 <= self.seed < 2**64:
            yield "seed", "in [0, 2^64)"
        if not all(is_text(each) and each for each in self.stop):
            yield "stop", "made of non-empty strings"
        if not all(is_text(each) and each.strip() for each in self.bad_words):
            yield "bad_words", "made of texts with more than white space"
        for name in ("stop", "bad_words"):
            if len(getattr(self, name)) > MAX_TEXTS:
                yield name, f"at most {MAX_TEXTS} texts"
        if sum(map(len, self.bad_words)) > MAX_BAD_CHARACTERS:
            yield "bad_words", f"at most {MAX_BAD_CHARACTERS} characters together"
        if any(type(token_id) is not int or token_id < 0 for token_id in self.stop_token_ids):
            yield "stop_token_ids", "made of integers >= 0"
        if self.allowed_token_ids is not None and (
            not self.allowed_token_ids or any(type(each) is not int or each < 0 for each in self.allowed_token_ids)
        ):
            yield "allowed_token_ids", "made of integers >= 0, at least one"
        if not 1 <= self.n <= MAX_SAMPLES:
            yield "n", f"in [1, {MAX_SAMPLES}]"
        if not 0 <= self.min_tokens <= self.max_tokens:
            yield "min_tokens", "in [0, max_tokens]"
        if not -2 <= self.presence_penalty <= 2:
            yield "presence_penalty", "in [-2, 2]"
        if not -2 <= self.frequency_penalty <= 2:
            yield "frequency_penalty", "in [-2, 2]"
        if not _PENALTIES[0] <= self.repetition_penalty <= _PENALTIES[1]:
            yield "repetition_penalty", "in [1e-9, 1e9]"
        if not all(-_MAX_BIAS <= bias <= _MAX_BIAS for _, bias in self.logit_bias):
            yield "logit_bias", "made of numbers in [-1e28, 1e28]"
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            yield "logprobs", f"in [0, {MAX_LOGPROBS}]"
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            yield "prompt_logprobs", f"in [0, {MAX_LOGPROBS}]"
        if self.max_reasoning_tokens is not None and self.max_reasoning_tokens < 0:
            yield "max_reasoning_tokens", ">= 0"

    def clone(self) -> Self:
        """A copy, for scripts that make one. It cannot be changed either: use ``dataclasses.replace``."""
        return replace(self)

    def seeded(self, seed: int) -> Self:
        """The same with another seed below 2^64. Nothing is checked again: each row that is sampled needs one."""
        made = object.__new__(type(self))
        for setter, value in zip(_SETTERS, _VALUES(self), strict=True):
            setter(made, value)
        _SET_SEED(made, seed)
        return made

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def bans(self) -> bool:
        """Whether tokens or words are ruled out."""
        return bool(self.bad_words or self.allowed_token_ids)

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
        return bool(self.logit_bias) or self.min_tokens > 0 or self.penalizes


# Of a slot each: the frozen class's own way does the same by name.
_SLOTS = [f.name for f in fields(SamplingParams)]
_SETTERS = [getattr(SamplingParams, name).__set__ for name in _SLOTS]
_VALUES, _SET_SEED = attrgetter(*_SLOTS), _SETTERS[_SLOTS.index("seed")]

_NUMBER, _INTEGER, _OPTIONAL_INTEGER = (int, float), (int,), (int, type(None))
_SEQUENCE = (tuple, list, type(None))
# What each field may be given as.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (_NUMBER, "a number"),
    ),
    **dict.fromkeys(("top_k", "n", "min_tokens"), (_INTEGER, "an integer")),
    **dict.fromkeys(
        ("max_tokens", "seed", "logprobs", "prompt_logprobs", "max_reasoning_tokens"),
        (_OPTIONAL_INTEGER, "an integer or None"),
    ),
    "stop": ((str, *_SEQUENCE), "a string or a list of strings"),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), (_SEQUENCE, "a list of token ids")),
    "bad_words": (_SEQUENCE, "a list of texts"),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), ((bool,), "True or False")),
    "logit_bias": ((tuple, Mapping, type(None)), "a mapping of token ids to numbers"),
    "grammar": ((GrammarSpec, type(None)), "a GrammarSpec or None"),
}


def _cannot_change(params: SamplingParams, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to {name}: params = dataclasses.replace(params, {name}={quoted(value)})")


# A frozen dataclass has a method of its own for this, which does not say what to do.
setattr(SamplingParams, "__setattr__", _cannot_change)  # noqa: B010
_NOTHING_ASKED = tuple(values[0] for values in _NEUTRAL.values())


def _require_neutral(given: tuple[Any, ...]) -> None:
    for (name, values), value in zip(_NEUTRAL.items(), given, strict=True):
        if value not in values:
            raise not_served(name, value)


def _few(name: str, given: Collection[Any]) -> Collection[Any]:
    """The same, before a look at each of them."""
    if len(given) > MAX_IDS:
        raise ValueError(f"{name} must be at most {MAX_IDS} values, got {len(given)}")
    return given


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        found = tuple((_token_id(token_id), plain(bias)) for token_id, bias in pairs)
        if all(isinstance(bias, _NUMBER) for _, bias in found):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"logit_bias must be {_KINDS['logit_bias'][1]}, got {quoted(given)}")


def _token_id(key: Any) -> int:
    """A key of ``logit_bias``; JSON has texts there. Python's own reading takes ``1_0`` and digits of all scripts."""
    return int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else index(key)


# The defaults.
GREEDY = SamplingParams()
