"""The kernels of a model's first steps, compiled all at once if Triton's cache lacks them.

A launch compiles its kernel and waits. So a model's first steps would compile dozens of kernels one after the other.
Warm-up launches the steps before: each launch only names the kernel that it needs. Threads compile these into Triton's
cache, where the launches of the run find them. Threads are enough, because most of a compilation is not Python. They
take turns at Python's part. Otherwise all would finish it with the last one, and only then begin with the compiler's.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch

import rosebatch.engine
import rosebatch.model
import rosebatch.ops
import rosebatch_kernels
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, padded_size
from rosebatch.host.run_once import run_once
from rosebatch.host.threads import in_background

# More kernels than this are rarely missing, and each thread holds a compiler's memory.
_MAX_THREADS = 16
# The version of Triton whose hashes go by no order.
_HASHES_CALLEES_FIRST = (3, 9)
# Sizes of steps that together need nearly all kernels that those of other sizes do.
_ROWS = (128, 48, 24, 4, 1)
_TOKENS = (2048, 1152, 512, 64, 16)


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def hash_compiler() -> Callable[[], Any]:
    """Begin to hash Triton's files, half a GB; the returned function waits for that.

    Triton looks for compiled kernels by this hash, so its first launch would make it. The processor is idle while
    weights are read.
    """
    from triton.runtime.cache import triton_key

    _hash_callees_first()
    return in_background(triton_key)


def compile_for(warm_up: Callable[[], None], shape: Any) -> bool:
    """Compile what the launches of ``warm_up`` need, unless that was done before on this machine.

    Of several processes that call this at once, one goes first. Not all versions of Triton can be used so: one line on
    stderr says that kernels are compiled at their first launch then.

    Args:
        warm_up: launches kernels, in this thread; they do not run.
        shape: what decides which kernels these are; two shapes are equal if their ``repr`` is.

    Returns:
        whether they are compiled.
    """
    done = triton_cache() / f"rosebatch-{_digest(shape)}"
    if done.exists():
        return True
    if lacking := _lacking():
        _tell(f"it has no {lacking}")
        return False
    with run_once(triton_cache() / "rosebatch.lock"):
        if done.exists():
            return True
        count = min(_MAX_THREADS, os.cpu_count() or 1)
        with _parsing_alone(), ThreadPoolExecutor(count) as threads, _asking(threads) as asked:
            warm_up()
        failed = [error for each in asked if (error := each.exception()) is not None]
        if failed:
            _tell(f"{len(failed)} of {len(asked)} failed ({type(failed[0]).__name__}: {failed[0]})")
        # Also then: launches compile what is missing.
        with suppress(OSError):
            done.touch()
    return not failed


def _lacking() -> str:
    """What Triton lacks of what is taken over here; empty if nothing is missing."""
    from triton import knobs
    from triton.runtime import jit

    needed = ((jit, "JITFunction.run"), (jit, "JITCallable.parse"), (knobs, "runtime.jit_cache_hook"))
    for place, names in needed:
        found: Any = place
        for name in names.split("."):
            if not hasattr(found, name):
                return f"{place.__name__}.{names}"
            found = getattr(found, name)
    return "" if "warmup" in signature(jit.JITFunction.run).parameters else "warmup of JITFunction.run"


@cache
def _tell(why: str) -> None:
    """Once a process, which may load several models."""
    import triton

    told = f"with triton {triton.__version__}, kernels are compiled at their first launch, not before: {why}"
    if sys.stderr is not None:
        sys.stderr.write(f"rosebatch: warning: {' '.join(told.split())}\n")


def _hash_callees_first() -> None:
    """Let a kernel's hash not depend on which kernels were hashed before.

    Triton 3.6 takes over the constants of a called function in front of its hash, which finds them. So a second start,
    which hashes in another order than the first, compiled some kernels anew. 3.9 does not.
    """
    import triton
    from triton.runtime.jit import DependenciesFinder

    if tuple(map(int, triton.__version__.split(".")[:2])) >= _HASHES_CALLEES_FIRST:
        return

    update = DependenciesFinder._update_hash
    if getattr(update, "__wrapped__", None) is not None:
        return

    @wraps(update)
    def update_hashed(self: Any, func: Any) -> None:
        _ = func.cache_key
        update(self, func)

    DependenciesFinder._update_hash = update_hashed


@contextmanager
def _asking(threads: ThreadPoolExecutor) -> Iterator[list[Future[None]]]:
    """Meanwhile, a launch in this thread has its kernel compiled unless it is loaded already, and does no more.

    The list has what is compiled.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target, asked, here = driver.active.get_current_target(), set[tuple[str, str]](), get_ident()
    turn, compiled = Lock(), list[Future[None]]()

    def ask(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if get_ident() != here:
            # Another engine's launch: it is real.
            return False
        if (fn.name, key) not in asked:
            asked.add((fn.name, key))
            # Here, because the function and those it calls are hashed together: threads would do that again.
            _ = fn.jit_function.cache_key
            compiled.append(threads.submit(_compile, fn.jit_function, target, compile, turn))
        # Triton then neither compiles nor launches.
        return True

    run, before = JITFunction.run, knobs.runtime.jit_cache_hook

    def run_nothing(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        # A loaded kernel would read what others have not computed: numbers of experts, for example, or tokens.
        return run(self, *args, warmup=warmup or get_ident() == here, **options)

    JITFunction.run, knobs.runtime.jit_cache_hook = run_nothing, ask
    try:
        yield compiled
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, before


@contextmanager
def _parsing_alone() -> Iterator[None]:
    """Meanwhile, one thread at a time makes a kernel's syntax tree.

    Python 3.11 counts the depth of trees for all threads together: two at a time can end in a ``SystemError``.
    """
    from triton.runtime.jit import JITCallable

    parse, lock = JITCallable.parse, Lock()

    def parse_alone(self: Any) -> Any:
        with lock:
            return parse(self)

    JITCallable.parse = parse_alone
    try:
        yield
    finally:
        JITCallable.parse = parse


def _compile(function: Any, target: Any, asked: dict[str, Any], turn: Lock) -> None:
    """Put a kernel and its launcher into Triton's cache; Python's part of it while it holds ``turn``.

    Of a kernel that cannot be compiled, the launch has the error, too.
    """
    from triton.compiler import compile

    # Triton's own, or that of Gluon.
    class Source(function.ASTSource):  # type: ignore[misc]
        def make_ir(self, *args: Any, **options: Any) -> Any:
            with turn:
                return super().make_ir(*args, **options)

    source = Source(function, asked["signature"], asked["constants"], *asked["configs"])
    options = json.loads(asked["specialization_data"])["options"]
    kernel = compile(source, target, {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})
    # Builds the launcher.
    _ = kernel.run


def _digest(shape: Any) -> str:
    """Digest of the shape, versions of all that compiles, the kernels, and the code that launches them."""
    import triton

    versions = triton.__version__, torch.__version__, platform.python_version(), torch.cuda.is_available()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    digest = hashlib.sha256(repr((versions, device, shape)).encode())
    packages = rosebatch_kernels, rosebatch.engine, rosebatch.model, rosebatch.ops
    for file in sorted(file for package in packages for file in Path(str(package.__file__)).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def warm_up_decodes(sizes: Sequence[int], form: Callable[..., Hashable]) -> Collection[tuple[int, bool]]:
    """Batch sizes of decode steps, with and without divided rows.

    Args:
        sizes: all that there are, in order.
        form: see ``TritonMixer.decode_form``.
    """
    chosen = [sizes[-1], *(rows for rows in _ROWS if rows < sizes[-1])]
    # Among sizes of one form the last counts: the largest that is chosen already, whose rows can share keys.
    last = (*sizes, *reversed(chosen))
    return dict.fromkeys([*((rows, True) for rows in chosen), *forms_of(last, form)])


def forms_of(sizes: Sequence[int], form: Callable[..., Hashable]) -> Collection[tuple[int, bool]]:
    """Of the sizes whose decode steps have one form, the last one, with and without divided rows."""
    return {form(rows, divided=divided): (rows, divided) for divided in (False, True) for rows in sizes}.values()


def warm_up_tokens(limit: int) -> Collection[int]:
    """Tokens of packed steps without padding, at most ``limit``.

    A large one is among them: each of many experts has few tokens, and attention on Hopper walks the heads of many
    keys in parts.
    """
    large = padded_size(min(limit, MAX_PADDED_TOKENS))
    return dict.fromkeys([large, *(tokens for tokens in _TOKENS if tokens <= limit)])
