"""The process that tries grammars."""

import ctypes
from typing import TYPE_CHECKING, Any

from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.host.within_limits import answer_all
from rosebatch.text.grammar.source import compile_matcher, load_tokens, serialize, validate

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def main() -> None:
    """Answer until stdin ends: a request has the tokenizer's ends, and its JSON as content, or a grammar."""
    answer_all(_Trials().answer)


class _Trials:
    """Grammars of one tokenizer after the other."""

    def __init__(self) -> None:
        # Or why it cannot be used.
        self._tokens: LLTokenizer | str | None = None

    def answer(self, request: dict[str, Any], content: bytes) -> dict[str, Any]:
        """Load the tokenizer, or try a grammar: ``bytes`` are those that it keeps when compiled."""
        if "ends" in request:
            self._tokens = load_tokens(content.decode(), request["ends"])
            return {}
        spec = GrammarSpec(request["kind"], request["source"])
        if request["only_parse"] or self._tokens is None:
            validate(spec)
            return {}
        if isinstance(self._tokens, str):
            return {"error": self._tokens}
        before = _heap_bytes()
        matcher = compile_matcher(self._tokens, serialize(spec))
        kept = _heap_bytes() - before
        del matcher
        return {"bytes": kept}


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
