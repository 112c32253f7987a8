"""Tries a grammar in another process before this one compiles it, within limits of time and memory.

A compiled grammar cannot be sent between processes. So the other one only says whether it compiles; then this process
compiles it too. Processes are started when they are needed, and wait for the next grammar after that.
"""

import atexit
import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from rosebatch.core.errors import RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.grammar.source import unusable

if TYPE_CHECKING:
    from rosebatch.text.grammar.token_table import TokenTable

_CODE = "import sys; sys.path[:] = {path!r}; from rosebatch.text.grammar.worker import main; main()"


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
        answer = process.ask(spec, limits, tokens)
    except OSError as error:
        return Tried("invalid_grammar", unusable(spec, f"no process for it can be started ({error})"))
    if answer is None:
        reason = _reason(process.end(), limits)
        return Tried("grammar_too_large", unusable(spec, reason))
    with _lock:
        _idle.append(process)
    if answer.get("exceeds_memory"):
        return Tried("grammar_too_large", unusable(spec, _reason(-signal.SIGABRT, limits)))
    if "error" in answer:
        return Tried("invalid_grammar", unusable(spec, answer["error"]))
    return Tried(memory=answer.get("bytes", 0))


def _reason(status: int, limits: GrammarLimits) -> str:
    """Why a process ended, from its exit status."""
    if status == -signal.SIGPROF:
        return f"compiling it takes more than {limits.seconds:g} s (--grammar-timeout); simplify it"
    # SIGKILL: the system ran out of memory.
    if status in (-signal.SIGABRT, -signal.SIGKILL):
        return f"compiling it takes more than {limits.memory / 2**30:.3g} GiB (--grammar-memory); simplify it"
    return f"llguidance failed to compile it (exit status {status}); simplify it"


def start_process(tokens: "TokenTable") -> None:
    """Start a process that has the tokenizer, so that the first grammar need not wait for that.

    A failure shows when a grammar is tried.
    """
    with suppress(OSError):
        process = _take(tokens)
        if process.learn(tokens):
            with _lock:
                _idle.append(process)
        else:
            process.end()


class _Process:
    """One that tries grammars."""

    def __init__(self) -> None:
        # Of a process group of its own: Ctrl-C in a terminal is for the parent alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.tokens: TokenTable | None = None

    def ask(self, spec: GrammarSpec, limits: GrammarLimits, tokens: "TokenTable | None") -> dict[str, Any] | None:
        """The answer; None if the process ended instead."""
        if tokens is not None and not self.learn(tokens):
            return None
        request = {
            "kind": spec.kind,
            "source": spec.source,
            "seconds": limits.seconds,
            "memory": limits.memory,
            "only_parse": tokens is None,
        }
        return self._send(request)

    def learn(self, tokens: "TokenTable") -> bool:
        """Load a tokenizer, unless that is done already; False if the process ended instead."""
        if tokens is not self.tokens:
            content = tokens.tokenizer.encode()
            if self._send({"tokenizer_bytes": len(content), "ends": list(tokens.ends)}, content) is None:
                return False
            self.tokens = tokens
        return True

    def _send(self, request: dict[str, Any], content: bytes = b"") -> dict[str, Any] | None:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n" + content)
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def end(self) -> int:
        """End it; returns its exit status, which is below 0 for a signal."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        return self._process.wait()


# Processes that wait for a grammar.
_idle: list[_Process] = []
_lock = Lock()


def _take(tokens: "TokenTable | None") -> _Process:
    """A process that does nothing else now; if possible, one that has the tokenizer."""
    with _lock:
        found = next((each for each in _idle if each.tokens is tokens), None)
        found = found or (_idle[-1] if _idle else None)
        if found is not None:
            _idle.remove(found)
            return found
    return _Process()


@atexit.register
def _end_all() -> None:
    with _lock:
        while _idle:
            _idle.pop().end()
