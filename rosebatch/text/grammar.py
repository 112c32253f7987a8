"""Structured output: the tokens that may come next, so that a completion matches a JSON schema, regex or choice.

llguidance compiles and follows the grammars, and has the bytes of every token.
"""

import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakSet

from rosebatch.core.errors import is_failure
from rosebatch.core.sampling_params import GrammarSpec
from rosebatch.host.threads import DaemonPool
from rosebatch.text.grammar_check import GrammarLimits, Tried, start_process, try_grammar
from rosebatch.text.grammar_source import compile_matcher, load_tokens, new_matcher, serialize, unusable
from rosebatch.text.mask_layout import MaskLayout
from rosebatch.text.token_constraint import TokenConstraint
from rosebatch.text.tokenizer import Tokenizer

# Imported in the functions: it takes 50 ms, and most runs have no grammar.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
        layout = _Once(lambda: MaskLayout(tokenizer.backend.get_vocab().values(), vocab_size, eos_token_ids))
        table = _Once(lambda: layout().table(tokenizer))
        self._layout, self._table = layout, table
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
            return Grammar(tokens, self._layout(), serialize(spec), self._renewals, tried.memory)
        except BaseException as error:
            if not is_failure(error):
                raise
            return Tried("invalid_grammar", unusable(spec, error))


class Grammar:
    """A compiled grammar.

    Args:
        tokens: of the tokenizer.
        layout: the layout of the masks.
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
        layout: MaskLayout,
        serialized: str,
        renewals: "_Renewals",
        memory: int,
    ) -> None:
        self.memory = memory
        self._tokens = tokens
        self._layout = layout
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

        Copies of a matcher share states under a lock. So completions are spread over several matchers, up to one for
        each core, if there are enough completions to be worth compiling more.
        """
        return TokenConstraint(self, self._layout, self.matcher())

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


class _Renewals:
    """Counts how often all matchers had to be made anew, because the states that they find take too much memory.

    llguidance does not state the size of a matcher. So the peak memory of the process decides. A new matcher allows the
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
