"""The process that tries grammars. One that takes all memory, or hours, ends this process and no other.

It reads lines of JSON from stdin, and answers each with a line on stdout. It limits itself: the process that started
it only notices that it ended, and by which signal.
"""

import ctypes
import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rosebatch.core.errors import is_failure
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.grammar.source import compile_matcher, load_tokens, serialize, validate

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_PAGE = resource.getpagesize()


def main() -> None:
    """Answer until stdin ends."""
    # The parent may ignore or block this signal, and a process inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _answer_all(sys.stdin.buffer, sys.stdout.buffer)


def _answer_all(requests: IO[bytes], answers: IO[bytes]) -> None:
    tokens: LLTokenizer | str | None = None
    for line in requests:
        request = json.loads(line)
        if "tokenizer_bytes" in request:
            tokens, found = load_tokens(requests.read(request["tokenizer_bytes"]).decode(), request["ends"]), {}
        else:
            spec, own = GrammarSpec(request["kind"], request["source"]), None if request["only_parse"] else tokens
            found = _try(spec, own, request["seconds"], request["memory"])
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


def _try(spec: GrammarSpec, tokens: "LLTokenizer | str | None", seconds: float, memory: int) -> dict[str, Any]:
    if isinstance(tokens, str):
        return {"error": tokens}
    try:
        with _limits(seconds, memory):
            before = _heap_bytes()
            if tokens is None:
                validate(spec)
                return {}
            matcher = compile_matcher(tokens, serialize(spec))
            kept = _heap_bytes() - before
            del matcher
            return {"bytes": kept}
    except MemoryError:
        return {"exceeds_memory": True}
    except BaseException as error:
        if not is_failure(error):
            raise
        return {"error": str(error)}


@contextmanager
def _limits(seconds: float, memory: int) -> Iterator[None]:
    """End this process if it takes more than so many seconds of processor time, or fails to allocate more bytes."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + memory
    if _address_space():
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _address_space():
            resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _address_space() -> int:
    """Bytes of address space in use; 0 where only time can be limited, as on macOS."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE
    except OSError:
        return 0


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _heap_bytes() -> int:
    """Allocated bytes, of the only thread; 0 where the C library does not count them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
