"""A process that answers requests within limits. One that takes all memory, or hours, ends this process and no other.

It reads lines of JSON from stdin, and answers each with a line on stdout. It limits itself: the process that started
it (``limited_process``) only notices that it ended, and by which signal.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rosebatch.core.errors import is_failure

_PAGE = resource.getpagesize()


def answer_all(answer: Callable[[dict[str, Any], bytes], Mapping[str, Any]]) -> None:
    """Answer until stdin ends.

    Args:
        answer: to a request and its content. Of what it raises, ``error`` has the text; ``{"exceeds": "memory"}`` is
            the answer where there is not enough.
    """
    # The parent may ignore or block this signal, and a process inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in requests:
        request = json.loads(line)
        content = requests.read(request["content_bytes"])
        answers.write(json.dumps(_answer(answer, request, content)).encode() + b"\n")
        answers.flush()


def _answer(
    answer: Callable[[dict[str, Any], bytes], Mapping[str, Any]], request: dict[str, Any], content: bytes
) -> Mapping[str, Any]:
    try:
        with _limits(request["seconds"], request["memory"]) if "seconds" in request else nullcontext():
            return answer(request, content)
    except MemoryError:
        return {"exceeds": "memory"}
    except BaseException as error:
        if not is_failure(error):
            raise
        return {"error": str(error) or type(error).__name__}


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
