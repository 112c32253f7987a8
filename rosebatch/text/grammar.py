"""Structured output: the tokens that may come next, so that a completion matches a JSON schema, regex or choice.

llguidance compiles and follows the grammars, and knows the bytes of every token.
"""

import functools
import json
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from rosebatch.core.errors import is_failure
from rosebatch.core.sampling_params import GrammarSpec
from rosebatch.host.threads import DaemonPool
from rosebatch.text.grammar_check import GrammarLimits, TokenTable, Tried, start_process, try_grammar
from rosebatch.text.grammar_source import (
    compile_matcher,
    load_tokens,
    new_matcher,
    one_line,
    serialize,
    unusable,
    without_excerpts,
)
from rosebatch.text.tokenizer import Tokenizer

# Imported in the functions: it takes 50 ms, and most runs have no grammar.
if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

V = TypeVar("V")

# Grammars that are remembered.
_MAX_GRAMMARS = 128
# Grammars that are tried or compiled at a time: a slow one must not hold up the others.
_THREADS = max(2, min(4, os.cpu_count() or 1))

# Another matcher is compiled for every this many completions, up to one for each core; none of a slow grammar.
_COMPLETIONS_A_MATCHER = 16
_MAX_MATCHERS = os.cpu_count() or 1
_SLOW_SECONDS = 0.05

# Of ``ru_maxrss``: macOS counts bytes, Linux KiB.
_PEAK_UNIT = 1 if os.uname().sysname == "Darwin" else 1024


class Grammars:
    """Compiles grammars, each once: in another process first, within limits, and then in this one.

    Only the thread that made it may call it; grammars compile on threads of their own.

    Args:
        tokenizer: of the model. The first grammar reads it, which takes a second for 150,000 tokens.
        vocab_size: width of the model's logits. Ids without a token in the tokenizer are never allowed.
        eos_token_ids: the model's end tokens.
        limits: what one grammar may take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        # None of these holds ``self``: the threads end with the last reference to it.
        vocabulary = _Once(lambda: _Vocabulary(tokenizer.backend.get_vocab().values(), vocab_size, eos_token_ids))
        table = _Once(lambda: vocabulary().table(tokenizer))
        self._vocabulary, self._table = vocabulary, table
        self._tokens = _Once(lambda: load_tokens(table().tokenizer, table().ends))
        self._renewals = _Renewals(self._limits.memory)
        self._pool = DaemonPool(_THREADS, "rosebatch-grammar")
        self._tried = _Recent[Future[Tried]](self._limits.memory)
        self._compiled = _Recent["Future[Grammar | Tried]"](self._limits.memory)
        self._started: Future[None] | None = None

    def begin(self, spec: GrammarSpec) -> Future[Tried]:
        """Try a specification in another process."""
        self.start()
        found = self._tried.get(spec)
        if found is None:
            found = self._pool.submit(lambda: try_grammar(spec, self._limits, self._table()))
            self._tried.put(spec, found, len(spec.source))
        return found

    def start(self) -> "Future[None]":
        """Read the tokenizer here and in another process, once."""
        if self._started is None:
            here = self._pool.submit(self._tokens)
            self._started = self._pool.submit(self._start, here)
        return self._started

    def _start(self, here: "Future[LLTokenizer | str]") -> None:
        start_process(self._table())
        here.result()

    def compiled(self, spec: GrammarSpec, tried: Tried) -> "Future[Grammar | Tried]":
        """Compile a specification that was tried; the result is what it became, or why it cannot be used."""
        found = self._compiled.get(spec)
        if found is None:
            found = self._pool.submit(self._compile, spec, tried)
            self._compiled.put(spec, found, len(spec.source) + tried.memory)
        return found

    def compile(self, spec: GrammarSpec) -> "Grammar":
        """Compile a specification now.

        Raises:
            RowError: ``invalid_grammar``: the grammar is broken, nothing matches it, or llguidance does not support
                one of its features or the model's tokenizer; ``grammar_too_large``: it exceeds the limits.
        """
        tried = self.begin(spec).result()
        tried.require()
        found = self.compiled(spec, tried).result()
        if isinstance(found, Grammar):
            return found
        found.require()
        raise AssertionError("a grammar compiles, or there is a reason")

    def _compile(self, spec: GrammarSpec, tried: Tried) -> "Grammar | Tried":
        tokens = self._tokens()
        if isinstance(tokens, str):
            return Tried("invalid_grammar", tokens)
        try:
            return Grammar(tokens, self._vocabulary(), serialize(spec), self._renewals, tried.memory)
        except BaseException as error:
            if not is_failure(error):
                raise
            return Tried("invalid_grammar", unusable(spec, error))


class Grammar:
    """A compiled grammar.

    Args:
        tokens: of the tokenizer.
        vocabulary: the layout of the masks.
        serialized: the grammar in llguidance's format.
        renewals: of all grammars.
        memory: see below.

    Attributes:
        memory: bytes that it takes, as far as that is known before a completion follows it.

    Raises:
        ValueError: the grammar does not compile, or nothing matches it.
    """

    def __init__(
        self,
        tokens: "LLTokenizer",
        vocabulary: "_Vocabulary",
        serialized: str,
        renewals: "_Renewals",
        memory: int,
    ) -> None:
        self.memory = memory
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._serialized = serialized
        self._renewals = renewals
        started = time.perf_counter()
        self._matchers = [compile_matcher(tokens, serialized)]
        self._slow = time.perf_counter() - started > _SLOW_SECONDS
        self._started = 0

    @property
    def renewal(self) -> int:
        """Counts up when completions should follow the grammar with new matchers."""
        return self._renewals.count

    def start(self) -> "TokenConstraint":
        """Start to follow the grammar through one completion.

        Copies of a matcher share states behind a lock. So completions are spread over several matchers, up to one for
        each core, if there are enough completions to be worth compiling more.
        """
        return TokenConstraint(self, self._vocabulary, self.matcher())

    def matcher(self) -> "LLMatcher":
        """A matcher for one completion, at the beginning."""
        self._renewals.used(self)
        wanted = 1 if self._slow else min(_MAX_MATCHERS, 1 + self._started // _COMPLETIONS_A_MATCHER)
        if len(self._matchers) < wanted:
            self._matchers.append(new_matcher(self._tokens, self._serialized))
        matcher = self._matchers[self._started % len(self._matchers)]
        self._started += 1
        return matcher.deep_copy()

    def look_at_memory(self) -> None:
        """Find out whether matchers should be renewed."""
        self._renewals.look()

    def forget_matchers(self) -> None:
        """Free the states that completions have found, as far as no completion follows them any more."""
        self._matchers.clear()

    def replace_matcher(self) -> "LLMatcher":
        """A new matcher that shares no states with earlier ones. Later completions start from new matchers too."""
        self._matchers.clear()
        return new_matcher(self._tokens, self._serialized)


class TokenConstraint:
    """Follows a grammar through one completion (see ``rosebatch.core.request.Constraint``).

    Attributes:
        error: why the completion ended before it matched: the grammar took too much time or memory, or did not allow
            a generated token. None if nothing went wrong, also if max_tokens or a stop string ended the completion.
    """

    def __init__(self, grammar: Grammar, vocabulary: "_Vocabulary", matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._renewal = grammar.renewal
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
        constraints[0]._grammar.look_at_memory()
        for constraint in constraints:
            constraint._renew()
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

    def _renew(self) -> None:
        """Follow the tokens so far again with a new matcher, if those of all grammars have grown too large."""
        if self._renewal == self._grammar.renewal or self._ended:
            return
        self._renewal = self._grammar.renewal
        self._matcher = self._grammar.matcher()
        self._matcher.consume_tokens(self._token_ids)

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
        self.error = one_line(without_excerpts(reason))


class _Vocabulary:
    """The layout of masks.

    Args:
        token_ids: of the tokenizer.
        vocab_size: width of the model's logits.
        eos_token_ids: the model's end tokens.

    Attributes:
        eos_token_ids: the end tokens that the model can generate.
        known: ids below this are tokens of both the tokenizer and the model.
        num_words: words of a mask for the known tokens.
        num_tokenizer_words: words of a mask for all tokens that llguidance has, see ``_without_gaps``.
    """

    def __init__(self, token_ids: Collection[int], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.known = min(1 + max(token_ids, default=-1), vocab_size)
        self.num_words = -(-self.known // 32)
        beyond = sum(i >= self.known for i in token_ids)
        self.num_tokenizer_words = -(-(self.known + beyond) // 32)
        self._has_gaps = len({i for i in token_ids if i < self.known}) < self.known
        eos = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token_id in self.eos_token_ids:
            eos[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._eos_words = np.flatnonzero(eos)
        self._eos_bits = eos[self._eos_words].view(np.int32)

    def table(self, tokenizer: Tokenizer) -> TokenTable:
        """What another process has to know of the tokenizer."""
        ends = sorted(i for i in self.eos_token_ids if i < self.known)
        return TokenTable(_without_gaps(tokenizer, self.known) if self._has_gaps else tokenizer.backend.to_str(), ends)

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


def _without_gaps(tokenizer: Tokenizer, count: int) -> str:
    """The tokenizer as JSON, without gaps in the first ``count`` ids: special tokens, which no text has, fill them.

    llguidance takes the number of tokens for the end of their ids.
    """
    vocab = tokenizer.backend.get_vocab()
    fillers = {f"<|no token {i}|>": i for i in sorted(set(range(count)).difference(vocab.values()))}
    content = json.loads(tokenizer.backend.to_str())
    content["model"]["vocab"] = vocab | fillers
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": i, "content": text, **form} for text, i in fillers.items()]
    return json.dumps(content)


@functools.cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


class _Renewals:
    """Counts how often all matchers had to be made anew, because the states that they find take too much memory.

    llguidance does not tell the size of a matcher. So the peak memory of the process decides. A new matcher allows the
    same tokens as the one before it.

    Args:
        memory: bytes that the peak may grow by, from the first look on.
    """

    def __init__(self, memory: int) -> None:
        self.count = 0
        self._memory = memory
        self._limit: int | None = None
        # Those without a completion now are still remembered, with all of their states.
        self._used: WeakSet[Grammar] = WeakSet()

    def used(self, grammar: Grammar) -> None:
        """Completions follow this grammar from now on."""
        self._used.add(grammar)

    def look(self) -> None:
        """Compare the peak with what it may be."""
        peak = _peak_memory()
        if self._limit is None:
            self._limit = peak + self._memory
        elif peak > self._limit:
            self.count += 1
            for grammar in self._used:
                grammar.forget_matchers()
            self._used.clear()
            # The memory that is freed now is used again. If the peak still grows, something else may be the reason.
            self._limit = peak + self._memory // 4


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


class _Once(Generic[V]):
    """A value that is made when somebody needs it, by one thread."""

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[V] = []

    def __call__(self) -> V:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


class _Recent(Generic[V]):
    """What was used last, by grammar: a bounded number, and a bounded number of bytes.

    Args:
        memory: most bytes.
    """

    def __init__(self, memory: int) -> None:
        self._limit = memory
        self._bytes = 0
        self._kept: OrderedDict[GrammarSpec, tuple[V, int]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> V | None:
        """What was put there, if it is still there."""
        if spec not in self._kept:
            return None
        self._kept.move_to_end(spec)
        return self._kept[spec][0]

    def put(self, spec: GrammarSpec, value: V, size: int) -> None:
        """Keep a value of so many bytes, and forget the ones used least recently if there is no room."""
        self._kept[spec] = value, size
        self._bytes += size
        while len(self._kept) > 1 and (len(self._kept) > _MAX_GRAMMARS or self._bytes > self._limit):
            self._bytes -= self._kept.popitem(last=False)[1][1]
