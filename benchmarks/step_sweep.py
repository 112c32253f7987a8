"""What the sizes of kernels' programs are worth in whole steps, one change at a time.

``python -m benchmarks.step_sweep --model CONFIG --rows 32 --change linear.part_depth=64``, on a GPU, with
made-up weights, writes a line for each change: the median milliseconds of a decode step and of all prompts, the least
and the most. The first and the last line are without a change. A change sets fields of operators' tables of sizes;
several are joined by ``+``, as in ``linear.stages=4+decode.group=(64,2,2)``. Rows take the given prompt lengths in
turn. Alone, a kernel may be faster with sizes that make the step slower.
"""

import ast
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

from benchmarks.options import options
from rosebatch.bench.case import release_memory, spread
from rosebatch.bench.workload import token_range
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.launch.launch import launch
from rosebatch_kernels.common.sizes import Program, table

# Where an operator's table is, and the part of its sizes.
_TABLES = {
    "linear": ("linear.sizes", ""),
    "gated": ("linear.gated", ""),
    "head": ("linear.head", ""),
    "norm": ("norm.kernel", ""),
    "decode": ("paged_attention.sizes", "decode"),
    "shared": ("paged_attention.sizes", "shared"),
    "prefill": ("paged_attention.sizes", "prefill"),
    "items": ("common.shared_keys", ""),
}

Change = dict[str, dict[str, Any]]


def parse_change(text: str) -> Change:
    """The fields that ``text`` sets, by operator: ``linear.part_depth=64`` and more of them, joined by ``+``.

    A number for a table of steps holds for all sizes, and so does a program.

    Raises:
        FlagError: there is no such field, or its value is none.
    """
    change: Change = {}
    for each in text.split("+") if text else ():
        name, _, value = each.partition("=")
        operator, _, field = name.strip().partition(".")
        sizes = _sizes(operator) if operator in _TABLES else None
        if not hasattr(sizes, field):
            raise FlagError(f"--change {each}: no such size; operators are {', '.join(_TABLES)}")
        try:
            given = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            raise FlagError(f"--change {each}: not a number, or numbers in brackets") from None
        before = getattr(sizes, field)
        if isinstance(before, Program):
            given = Program(*given)
        elif isinstance(before, tuple):
            program = type(before[0][1])
            if hasattr(program, "_fields"):
                given = ((0, program(*given)),)
            elif isinstance(given, int):
                given = ((0, given),)
        change.setdefault(operator, {})[field] = given
    return change


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Meanwhile, engines that are launched take these sizes."""
    with ExitStack() as stack:
        for operator, fields in change.items():
            (name, part), new = _TABLES[operator], replace(_sizes(operator), **fields)
            module = import_module(f"rosebatch_kernels.{name}")
            whole = replace(module.SIZES.measured, **{part: new}) if part else new
            stack.enter_context(patch.object(module, "SIZES", table(whole)))
        yield


def _sizes(operator: str) -> Any:
    name, part = _TABLES[operator]
    whole = import_module(f"rosebatch_kernels.{name}").SIZES.measured
    return getattr(whole, part) if part else whole


def time_steps(
    engine: Engine, rows: int, prompt_len: Sequence[int], steps: int, repeats: int, shared_prefix_len: int = 0
) -> list[dict[str, float]]:
    """Milliseconds of a decode step of so many rows, and of all their prompts.

    With a shared prefix, prompts are computed in the first run, and later ones find them in the prefix cache.
    """
    sampling = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    # Equal ids would make equal rows of x, which no job has: a GPU at its power limit might be faster with them.
    numbers, ids = random.Random(0), token_range(engine.vocab_size)
    own = (tuple(numbers.choices(ids, k=length)) for length in islice(cycle(prompt_len), rows))
    prompts = [(1,) * shared_prefix_len + each for each in own]
    times = []
    for _ in range(repeats + 2):
        stats = engine.restart_stats()
        requests = [Request(row, prompt, sampling) for row, prompt in enumerate(prompts)]
        completions = list(engine.run(requests))
        assert [len(each.token_ids) for each in completions] == [steps + 1] * rows, "a change breaks what is computed"
        times.append((1000 * stats.decode_seconds / stats.decode_steps, 1000 * stats.prefill_seconds))
    # The first two runs capture graphs.
    return [spread(each) for each in zip(*times[2:], strict=True)]


def run(launch_engine: Callable[[], Engine], changes: Sequence[str], **sizes: Any) -> None:
    """Write a line for each change, and two for none; ``sizes`` are those of ``time_steps``."""
    parsed = {text: parse_change(text) for text in changes}
    for text, change in [("", Change()), *parsed.items(), ("", Change())]:
        with changed(change):
            # An engine for each: its workspaces have the sizes that the change asks for.
            found = time_steps(launch_engine(), **sizes)
        release_memory()
        step, prompts = (f"{each['median']:.4f} ({each['min']:.4f}-{each['max']:.4f})" for each in found)
        sys.stdout.write(f"step {step}  prompts {prompts} ms  {text or 'no change'}\n")


def main() -> None:
    """Time all changes in one process."""
    sizes = {"rows": 32, "prompt_len": [128], "shared_prefix_len": 0, "steps": 128, "repeats": 3}
    changes = {"action": "append", "default": []}
    given = options(__doc__, model=str, dtype="auto", **sizes, batch_invariant=False, change=changes)
    settings = {"load_format": "dummy", "device": "cuda", "dtype": given.dtype, "max_num_seqs": given.rows}
    switches = {"batch_invariant": given.batch_invariant, "prefix_cache": given.shared_prefix_len > 0}
    config = RunConfig.of(given.model, **settings, **switches)
    run(lambda: launch(config).engine, given.change, **{name: getattr(given, name) for name in sizes})


if __name__ == "__main__":
    main()
