"""Structured output: the tokens that may come next, so that a completion matches a JSON schema, regex or choice.

llguidance compiles and follows the grammars, and knows the bytes of every token.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.errors import RowError
from rosebatch.sampling_params import GrammarSpec
from rosebatch.text.tokenizer import Tokenizer

# Imported in the functions: it takes 50 ms, and most runs have no grammar.
if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MOST_GRAMMARS = 128
_MOST_CHARACTERS = 300

# Lexer states that llguidance may discover in one grammar; some hundred bytes each.
_MOST_STATES = 250_000

# Another matcher is compiled for every this many completions, up to one for each core.
_COMPLETIONS_A_MATCHER = 16
_MOST_MATCHERS = os.cpu_count() or 1

_NAMES = {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "regex", "choice": "list of choices"}

# One line, with at most one space after a comma or colon, as json.dumps and most models write it. The library's default
# allows any white space, so a weak model may write white space until max_tokens. Pretty-printed JSON would need that.
_JSON_FORMAT = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}

# Options that a schema may set in "x-guidance": they relax keywords that llguidance would refuse.
_JSON_LENIENCIES = ("coerce_one_of", "lenient")


class Grammars:
    """Compiles grammars, each once.

    Args:
        tokenizer: of the model. The first ``compile`` reads it, which takes a second for 150,000 tokens.
        vocab_size: width of the model's logits. Ids without a token in the tokenizer are never allowed.
        eos_token_ids: the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        count = tokenizer.backend.get_vocab_size()
        self._vocabulary = _Vocabulary(count, vocab_size, eos_token_ids)
        self._tokens = functools.cache(functools.partial(_load_tokens, tokenizer, self._vocabulary))
        self._compiled = functools.lru_cache(_MOST_GRAMMARS)(self._compile)

    def compile(self, spec: GrammarSpec) -> "Grammar":
        """Compile a specification. Another thread may follow compiled grammars at the same time.

        Raises:
            RowError: ``invalid_grammar``: the grammar is broken, nothing matches it, or llguidance does not support
                one of its features or the model's tokenizer.
        """
        compiled = self._compiled(spec)
        if isinstance(compiled, str):
            # A new error each time: the traceback of a cached error would grow with every row.
            raise RowError("invalid_grammar", compiled)
        return compiled

    def _compile(self, spec: GrammarSpec) -> "Grammar | str":
        tokens = self._tokens()
        if isinstance(tokens, str):
            return tokens
        try:
            return Grammar(tokens, self._vocabulary, _serialized(spec))
        except (ValueError, RecursionError) as error:
            return _one_line(f"the {_NAMES[spec.kind]} cannot be used: {error}")


def check_grammar(spec: GrammarSpec) -> None:
    """Check a grammar before the model is loaded.

    Raises:
        RowError: ``invalid_grammar``: the grammar is broken, or llguidance does not support one of its features.
    """
    from llguidance import LLMatcher

    try:
        found = LLMatcher.validate_grammar(_serialized(spec))
    except (ValueError, RecursionError) as error:
        found = str(error)
    if found:
        what = _without_excerpts(found)
        raise RowError("invalid_grammar", _one_line(f"the {_NAMES[spec.kind]} cannot be used: {what}"))


class Grammar:
    """A compiled grammar.

    Args:
        tokens: of the tokenizer.
        vocabulary: the layout of the masks.
        serialized: the grammar in llguidance's format.

    Raises:
        ValueError: the grammar does not compile, or nothing matches it.
    """

    def __init__(self, tokens: "LLTokenizer", vocabulary: "_Vocabulary", serialized: str) -> None:
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._serialized = serialized
        matcher = self._new_matcher()
        if matcher.is_error():
            raise ValueError(_without_excerpts(matcher.get_error()))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = _without_excerpts(first.get_error())
            raise ValueError("nothing matches it" if reason == "NoExtensionBias" else reason)
        self._matchers: list[LLMatcher] = [matcher]
        self._started = 0

    def start(self) -> "TokenConstraint":
        """Start to follow the grammar through one completion.

        Copies of a matcher share states behind a lock. So completions are spread over several matchers, up to one for
        each core, if there are enough completions to be worth compiling more.
        """
        wanted = min(_MOST_MATCHERS, 1 + self._started // _COMPLETIONS_A_MATCHER)
        if len(self._matchers) < wanted:
            self._matchers.append(self._new_matcher())
        matcher = self._matchers[self._started % len(self._matchers)]
        self._started += 1
        return TokenConstraint(self, self._vocabulary, matcher.deep_copy())

    def replace_matcher(self) -> "LLMatcher":
        """A new matcher that shares no states with earlier ones. Later completions start from new matchers too."""
        self._matchers.clear()
        return self._new_matcher()

    def _new_matcher(self) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        # Verbose errors contain the whole grammar.
        limits = LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        return LLMatcher(self._tokens, self._serialized, log_level=0, limits=limits)


class TokenConstraint:
    """Follows a grammar through one completion (see ``rosebatch.request.Constraint``).

    Attributes:
        error: why the completion ended before it matched: the grammar took too much time or memory, or did not allow
            a generated token. None if nothing went wrong, also if max_tokens or a stop string ended the completion.
    """

    def __init__(self, grammar: Grammar, vocabulary: "_Vocabulary", matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._alone = False
        self._token_ids: list[int] = []
        self._ended = False
        self.error: str | None = None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: at least one.

        All end tokens of the model are allowed if the grammar can end here. Only they are if nothing else can follow.

        Args:
            mask: [ceil(vocab_size / 32)] int32, overwritten. Token 0 is the lowest bit of the first word.
        """
        found = None if self._ended else self._allowed()
        if found is None:
            none = np.zeros(self._vocabulary.num_tokenizer_words, np.int32)
            self._vocabulary.write(mask[None], none[None], [True])
        else:
            words = np.frombuffer(found, "<i4", count=self._vocabulary.num_tokenizer_words)
            self._vocabulary.write(mask[None], words[None], [self._matcher.is_accepting()])

    @classmethod
    def fill_all(cls, constraints: Sequence["TokenConstraint"], masks: NDArray[np.int32]) -> None:
        """``fill`` for several completions of one model, on all cores.

        Args:
            constraints: R of them.
            masks: [R, ceil(vocab_size / 32)] int32, overwritten.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        vocabulary = constraints[0]._vocabulary
        words = np.zeros((len(constraints), vocabulary.num_tokenizer_words), np.int32)
        live = [(constraint._matcher, row) for row, constraint in enumerate(constraints) if not constraint._ended]
        if live:
            fill_next_token_bitmask_par(_executor(), live, words)
        vocabulary.write(masks, words, [c._ended or c._matcher.is_accepting() for c in constraints])
        for mask, constraint in zip(masks, constraints, strict=True):
            if not constraint._ended and constraint._matcher.is_error():
                constraint.fill(mask)

    def feed(self, token_id: int) -> bool:
        """Add the next generated token. True if nothing may follow it, or if the grammar does not allow it."""
        if self._ended:
            return True
        if token_id in self._vocabulary.eos_token_ids:
            self._ended = True
            if not self._matcher.is_accepting():
                self._fail("an end token came too early")
        elif not 0 <= token_id < self._vocabulary.known:
            self._fail(f"the tokenizer has no token {token_id}")
        else:
            self._token_ids.append(token_id)
            if self._matcher.consume_token(token_id) or self._start_over():
                self._ended = self._matcher.is_stopped()
            else:
                self._fail(self._matcher.get_error())
        return self._ended

    def _allowed(self) -> bytes | None:
        """One bit for each token; None if the grammar cannot be followed further."""
        words = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._start_over():
            words = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            return None
        return words

    def _start_over(self) -> bool:
        """Follow the tokens so far again, with a matcher of its own; False if that fails too.

        Completions share the states of a matcher. Some grammars reach the limit of states after some hundred rows, and
        then every row would fail, whatever its tokens are.
        """
        if self._alone:
            return False
        self._alone = True
        self._matcher = self._grammar.replace_matcher()
        return self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        self._ended = True
        self.error = _one_line(_without_excerpts(reason))


class _Vocabulary:
    """The layout of masks.

    Args:
        count: number of tokens in the tokenizer.
        vocab_size: width of the model's logits.
        eos_token_ids: the model's end tokens.

    Attributes:
        eos_token_ids: the end tokens that the model can generate.
        known: ids below this are tokens of both the tokenizer and the model.
        num_words: words of a mask for the known tokens.
        num_tokenizer_words: words of a mask for all tokens of the tokenizer.
    """

    def __init__(self, count: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.known = min(count, vocab_size)
        self.num_words = -(-self.known // 32)
        self.num_tokenizer_words = -(-count // 32)
        eos = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token_id in self.eos_token_ids:
            eos[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._eos_words = np.flatnonzero(eos)
        self._eos_bits = eos[self._eos_words].view(np.int32)

    def write(self, masks: NDArray[np.int32], words: NDArray[np.int32], ends: Sequence[bool]) -> None:
        """Fill masks.

        Args:
            masks: [R, ceil(vocab_size / 32)] int32.
            words: [R, num_tokenizer_words] int32, a bit for each token of the tokenizer; end tokens are ignored.
            ends: R, whether end tokens are allowed. They are also allowed if nothing else is.
        """
        masks[:, : self.num_words] = words[:, : self.num_words]
        masks[:, self.num_words :] = 0
        if self.known % 32:
            masks[:, self.num_words - 1] &= (1 << self.known % 32) - 1
        masks[:, self._eos_words] &= ~self._eos_bits
        rows = np.flatnonzero(np.array(ends) | ~masks.any(axis=1))
        masks[np.ix_(rows, self._eos_words)] |= self._eos_bits


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


def _load_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> "LLTokenizer | str":
    """The tokenizer in llguidance's form, or the reason why llguidance does not support it."""
    from llguidance import LLTokenizer

    ends = sorted(i for i in vocabulary.eos_token_ids if i < vocabulary.known)
    if not ends:
        return "a grammar needs a model with an end token, and this one has none"
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=ends)
    except BaseException as error:
        # A panic of the Rust code is not a subclass of Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return _one_line(f"grammars cannot be used with this model's tokenizer: {error}")


def _serialized(spec: GrammarSpec) -> str:
    """A grammar in llguidance's format.

    Raises:
        ValueError: the grammar is broken. Not every broken grammar is found here.
        RecursionError: the JSON has too many levels.
    """
    from llguidance import LLMatcher, grammar_from

    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_formatted(json.loads(spec.source)))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_formatted({"type": "object"}))
        case "regex":
            # llguidance would ignore the last backslash.
            if (len(spec.source) - len(spec.source.rstrip("\\"))) % 2:
                raise ValueError("nothing follows its last backslash")
            return LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            choices = json.loads(spec.source)
            if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
                raise ValueError("expected a list of strings, at least one and none empty")
            return grammar_from("choice", spec.source)


def _formatted(schema: object) -> str:
    """A JSON schema with our white space rules instead of its own.

    Raises:
        ValueError: not a schema.
    """
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    if not isinstance(schema, dict):
        raise ValueError(f"expected a JSON object or a boolean, got {type(schema).__name__}")
    own: Any = schema.get("x-guidance")
    lenient = {name: True for name in _JSON_LENIENCIES if isinstance(own, dict) and own.get(name) is True}
    return json.dumps({**schema, "x-guidance": {**_JSON_FORMAT, **lenient}}, allow_nan=False)


def _without_excerpts(error: str) -> str:
    """An error of llguidance without positions and excerpts of a grammar that the user did not write."""
    return re.sub(r"^(at )?\d+\(\d+\): |\n\s*(\^+|\d+ \|.*|<non-verbose/>)(?=\n|$)", "", error).strip()


def _one_line(message: str) -> str:
    """A message on one line, shortened in the middle: the cause is often at the end."""
    message = " ".join(message.split())
    if len(message) <= _MOST_CHARACTERS:
        return message
    half = (_MOST_CHARACTERS - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"
