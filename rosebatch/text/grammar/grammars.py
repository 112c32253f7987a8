"""Structured output: the tokens that may come next, so that a completion matches a JSON schema, regex or choice.

llguidance compiles and follows the grammars, and has the bytes of every token.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rosebatch.core.errors import is_failure
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.host.threads import DaemonPool
from rosebatch.text.grammar.check import GrammarLimits, Tried, start_process, try_grammar
from rosebatch.text.grammar.compiled import Grammar, Renewals
from rosebatch.text.grammar.mask_layout import MaskLayout
from rosebatch.text.grammar.source import load_tokens, serialize, unusable
from rosebatch.text.grammar.token_table import TokenTable
from rosebatch.text.tokenizer import Tokenizer

# Imported in the functions: it takes 50 ms, and most runs have no grammar.
if TYPE_CHECKING:
    from llguidance import LLTokenizer

    Tokens = tuple[LLTokenizer, MaskLayout]

V = TypeVar("V")

# Grammars that are remembered.
_MAX_GRAMMARS = 128
# Characters of a short list of choices, and the bytes that one keeps when it is compiled: measured, the most of several
# lists.
_SHORT = 1 << 10
_BYTES, _BYTES_OF_CHARACTER = 60_000, 1_000
# Grammars that are tried or compiled at a time: a slow one must not hold up the others.
_THREADS = max(2, min(4, os.cpu_count() or 1))


class Grammars:
    """Compiles grammars, each once: in another process first, within limits, and then in this one.

    Short lists of choices need no trial: with a list of its own for each row, that was most of a job's time.

    Only the thread that made it may call it; grammars compile on threads of their own.

    Args:
        tokenizer: of the model. The first grammar reads it, which takes a second for 150,000 tokens.
        vocab_size: width of the model's logits. Ids without a token in the tokenizer are never allowed.
        eos_token_ids: the model's end tokens.
        limits: what one grammar may take.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], limits: GrammarLimits | None = None
    ) -> None:
        self._limits = limits or GrammarLimits()
        # None of these holds ``self``: the threads end with the last reference to it.
        ends = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        table = _Once(lambda: TokenTable.of(tokenizer, vocab_size, ends))
        self._table = table
        self._tokens = _Once(lambda: _load(tokenizer, table(), ends))
        self._renewals = Renewals(self._limits.memory)
        self._pool = DaemonPool(_THREADS, "rosebatch-grammar")
        # A row whose turn it is would wait for the tries of all rows that are read ahead.
        self._compilers = DaemonPool(_THREADS, "rosebatch-compile")
        self._tried = _Recent[Future[Tried]](self._limits.memory)
        self._compiled = _Recent["Future[Grammar | Tried]"](self._limits.memory)
        self._read: Future[Tokens | str] | None = None
        self._started: Future[None] | None = None

    def begin(self, spec: GrammarSpec) -> Future[Tried]:
        """Try a specification in another process, unless it is sure to be within limits."""
        self.ready(spec)
        found = self._tried.get(spec)
        if found is None:
            if _is_short(spec):
                found = Future()
                found.set_result(Tried(memory=_BYTES + _BYTES_OF_CHARACTER * len(spec.source)))
            else:
                found = self._pool.submit(lambda: try_grammar(spec, self._limits, self._table()))
            self._tried.put(spec, found, len(spec.source))
        return found

    def ready(self, spec: GrammarSpec) -> "Future[Any]":
        """Read the tokenizer here, and in another process if the specification is tried there; each once."""
        if self._read is None:
            self._read = self._pool.submit(self._tokens)
        if _is_short(spec):
            return self._read
        if self._started is None:
            self._started = self._pool.submit(self._start, self._read)
        return self._started

    def _start(self, here: "Future[Tokens | str]") -> None:
        start_process(self._table())
        here.result()

    def compiled(self, spec: GrammarSpec, tried: Tried) -> "Future[Grammar | Tried]":
        """Compile a specification that was tried; the result is what it became, or why it cannot be used."""
        found = self._compiled.get(spec)
        if found is None:
            found = self._compilers.submit(self._compile, spec, tried)
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
            return Grammar(*tokens, serialize(spec), self._renewals, tried.memory, is_choice=spec.kind == "choice")
        except BaseException as error:
            if not is_failure(error):
                raise
            return Tried("invalid_grammar", unusable(spec, error))


def _is_short(spec: GrammarSpec) -> bool:
    """Whether it is a list of choices that compiles in a few milliseconds, whatever they are."""
    return spec.kind == "choice" and len(spec.source) <= _SHORT


def _load(tokenizer: Tokenizer, table: TokenTable, eos_token_ids: frozenset[int]) -> "Tokens | str":
    """The tokenizer in llguidance's form, and the layout of its masks; or why it has none."""
    tokens = load_tokens(table.tokenizer, table.ends)
    if isinstance(tokens, str):
        return tokens
    added = tokenizer.backend.get_added_tokens_decoder()
    return tokens, MaskLayout(table.known, tokens.vocab_size, eos_token_ids, added)


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
