"""Tries a grammar in another process before this one compiles it, within limits of time and memory.

A compiled grammar cannot be sent between processes. So the other one only says whether it compiles; then this process
compiles it too.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rosebatch.core.errors import RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.host.limited_process import IdleProcesses, LimitedProcess
from rosebatch.text.grammar.source import unusable

if TYPE_CHECKING:
    from rosebatch.text.grammar.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling one grammar may take.

    Attributes:
        seconds: of processor time.
        memory: bytes. macOS limits the time alone.
    """

    seconds: float = 10.0
    memory: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a grammar.

    Attributes:
        code, message: why it cannot be used; None if it can.
        memory: bytes that it keeps when compiled; 0 where that is not known.
    """

    code: str | None = None
    message: str | None = None
    memory: int = 0

    def require(self) -> None:
        """Raise the error, if there is one.

        Raises:
            RowError: a new one each time, for the traceback of a kept error would grow with every row.
        """
        if self.code is not None and self.message is not None:
            raise RowError(self.code, self.message)


def check_grammar(spec: GrammarSpec, limits: GrammarLimits | None = None) -> None:
    """Check a grammar before the model is loaded.

    Raises:
        RowError: see ``try_grammar``. Whether anything matches it shows only with a tokenizer.
    """
    try_grammar(spec, limits or GrammarLimits()).require()


def try_grammar(spec: GrammarSpec, limits: GrammarLimits, tokens: "TokenTable | None" = None) -> Tried:
    """Compile a grammar in another process. Any thread may call this; each call has a process of its own meanwhile.

    Args:
        spec: the grammar.
        limits: what it may take.
        tokens: None only parses it.

    Returns:
        the outcome. Its codes are ``invalid_grammar``: the grammar is broken, nothing matches it, or llguidance does
        not support it; and ``grammar_too_large``: it exceeds the limits.
    """
    try:
        process = _take(tokens)
    except OSError as error:
        return Tried("invalid_grammar", unusable(spec, f"no process for it can be started ({error})"))
    answer = process.try_one(spec, limits, tokens)
    processes.put(process)
    if "error" in answer:
        return Tried("invalid_grammar", unusable(spec, answer["error"]))
    if reason := _reason(answer, limits):
        return Tried("grammar_too_large", unusable(spec, reason))
    return Tried(memory=answer.get("bytes", 0))


def _reason(answer: dict[str, Any], limits: GrammarLimits) -> str | None:
    """Why a grammar is too large; None if it is not."""
    match answer:
        case {"exceeds": "seconds"}:
            return f"compiling it takes more than {limits.seconds:g} s (--grammar-timeout); simplify it"
        case {"exceeds": "memory"}:
            return f"compiling it takes more than {limits.memory / 2**30:.3g} GiB (--grammar-memory); simplify it"
        case {"died": status}:
            return f"llguidance failed to compile it (exit status {status}); simplify it"
    return None


def start_process(tokens: "TokenTable") -> None:
    """Start a process that has the tokenizer, so that the first grammar need not wait for that.

    A failure shows when a grammar is tried.
    """
    with suppress(OSError):
        process = _take(tokens)
        process.learn(tokens)
        processes.put(process)


class _Process(LimitedProcess):
    """One that tries grammars."""

    def __init__(self) -> None:
        super().__init__("rosebatch.text.grammar.worker")
        self.tokens: TokenTable | None = None

    def try_one(self, spec: GrammarSpec, limits: GrammarLimits, tokens: "TokenTable | None") -> dict[str, Any]:
        """The answer about a grammar."""
        learned = {} if tokens is None else self.learn(tokens)
        if self.ended:
            return learned
        request = {"kind": spec.kind, "source": spec.source, "only_parse": tokens is None}
        return self.ask({**request, "seconds": limits.seconds, "memory": limits.memory})

    def learn(self, tokens: "TokenTable") -> dict[str, Any]:
        """Load a tokenizer, unless that is done already. The answer says how the process ended, if it did."""
        if tokens is self.tokens:
            return {}
        self.tokens = tokens
        return self.ask({"ends": list(tokens.ends)}, tokens.tokenizer.encode())


# Those that wait for a grammar.
processes = IdleProcesses(_Process)


def _take(tokens: "TokenTable | None") -> _Process:
    """If possible, one that has the tokenizer."""
    return processes.take(lambda each: each.tokens is tokens)
