"""Kernels that are not compiled yet: one worker compiles them, and the others find them in Triton's cache."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rosebatch.engine.engine import Engine

# After that time the others compile for themselves: the first one may hang.
_MOST_SECONDS = 300.0
_PATIENCE_SECONDS = 0.05
_PROMPT_TOKENS = 8
# More than two decode windows.
_OUTPUT_TOKENS = 20


def compile_kernels(engine: "Engine") -> None:
    """Run two short prompts, one greedy and one sampled, so that the kernels of every step are compiled.

    Of several processes that call this at once, one goes first.
    """
    with first_alone(_cache_folder() / "rosebatch.lock"):
        run_briefly(engine)


def run_briefly(engine: "Engine") -> None:
    """Run two short prompts to their end. The engine keeps nothing of them but its counts."""
    length = min(_PROMPT_TOKENS, engine.max_model_len // 2)
    most = min(_OUTPUT_TOKENS, engine.max_model_len - length)
    params = [SamplingParams(max_tokens=most, ignore_eos=True)]
    params.append(SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, seed=0))
    for _ in engine.run([Request(number, (0,) * length, each) for number, each in enumerate(params)]):
        pass


@contextmanager
def first_alone(path: Path, most_seconds: float = _MOST_SECONDS) -> Iterator[None]:
    """Let the first process that comes go alone, and all others together once it has left.

    The system releases the lock of a process that dies. Where files cannot be locked, nobody waits.

    Args:
        path: of the file that is locked; it is made.
        most_seconds: after which the others do not wait any longer.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        if not _lock(file.fileno(), fcntl.LOCK_EX):
            until = time.monotonic() + most_seconds
            # A shared lock: those that waited hold it together, and none of them is a first one.
            while not _lock(file.fileno(), fcntl.LOCK_SH) and time.monotonic() < until:
                time.sleep(_PATIENCE_SECONDS)
        yield


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the file is locked now, without waiting; True where files cannot be locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    given = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(given) if given else Path(home) / ".triton" / "cache"
