"""Other ways to compute HP1 attention, timed: ``python -m benchmarks.kernels.hp1_variants [--part PART ...]``.

The article found its own numbers for each of these. The parts, all of them by default:

    values    V of all keys, or V of the keys with weight (in use)
    groups    runs of a warp, keys in a group, and warps: a row of K is held by 32 threads with one run, by 16 with two.
              With four the compiler gives each thread a part of two rows, because it loads 16 bytes at once
    splits    programs that run at once, and keys that make a split
    tails     a prompt's last few tokens: tiles of 64 rows (in use), tiles of 16, or a decode step with a row a token

Each is timed for 1, 16, 64 and 128 sequences, in microseconds, with K and V in the cache and q ready. In a line, the
least is marked. With sigma 1.4, 71 % of the weights are zero.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

from benchmarks.kernels.inputs import HP1, block_table, decode_options, gate, layers, prefill_options
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import in_turns_us
from benchmarks.options import options
from rosebatch_kernels.common import tiles as query_tiles
from rosebatch_kernels.hp1.sizes import SIZES, Sizes, num_splits

_DECODE, _PREFILL = Launchers("hp1.decode"), Launchers("hp1.prefill")
_BATCHES = (1, 16, 64, 128)
_LENGTHS = (128, 256, 512, 1024, 2048)
_SIGMAS = (1.4, 2.9)
_SIGMA = 1.4
# Runs of a warp, keys in a group, warps. The first are in use.
_GROUPS = ((2, 8, 1), (2, 4, 1), (2, 16, 1), (1, 8, 1), (1, 16, 1), (4, 4, 1), (2, 8, 2), (2, 8, 4))
# Bytes of a row of K that a thread holds, times the threads of a warp, for one run.
_ROW = 2 * HP1.size
_WARP = 32
_PROGRAMS = (528, 1056, 2112)
_MIN_KEYS = (32, 128, 256, 512)
_TAIL = 16
_PREFIXES = (256, 1024)

# K is in the cache, rotated.
_HEADS = HP1._replace(rotary=0)

Times = Mapping[str, float]


def main() -> None:
    """Write a line for each shape, with a column for each variant."""
    parts = {"values": _values, "groups": _groups, "splits": _splits, "tails": _tails}
    given = options(__doc__, part={"action": "append", "choices": parts})
    for name in given.part or parts:
        for shape, times in parts[name]():
            minimum = min(times.values())
            cells = (f"{label}: {us:.2f}{'*' if us == minimum else ''}" for label, us in times.items())
            sys.stdout.write(f"{name:<7} {shape:<24} " + "   ".join(cells) + "\n")
            sys.stdout.flush()


def _values() -> Iterator[tuple[str, Times]]:
    for batch, length, sigma in product(_BATCHES, _LENGTHS, _SIGMAS):
        step = _DecodeStep(batch, length)
        times = {"all": step.time(sigma, sparse=False), "with weight": step.time(sigma)}
        yield f"B={batch} T={length} sigma={sigma}", times


def _groups() -> Iterator[tuple[str, Times]]:
    for batch, length in product(_BATCHES, _LENGTHS):
        step, times = _DecodeStep(batch, length), {}
        for runs, keys, warps in _GROUPS:
            sizes = replace(
                SIZES.measured,
                row_bytes=runs * _ROW // _WARP,
                keys=((0, keys),),
                warps=warps,
                # As many warps at once as in use.
                programs=SIZES.measured.programs // warps,
            )
            times[f"{runs}/{keys}/{warps}"] = step.time(sizes=sizes)
        yield f"B={batch} T={length}", times


def _splits() -> Iterator[tuple[str, Times]]:
    for batch, length in product(_BATCHES, _LENGTHS):
        step, sizes = _DecodeStep(batch, length), SIZES.measured
        times = {"one": step.time(sizes=replace(sizes, max_splits=1))}
        for programs, keys in product(_PROGRAMS, _MIN_KEYS):
            times[f"{programs}/{keys}"] = step.time(sizes=replace(sizes, programs=programs, min_keys=keys))
        yield f"B={batch} T={length}", times


def _tails() -> Iterator[tuple[str, Times]]:
    for batch, prefix in product(_BATCHES, _PREFIXES):
        yield f"B={batch} {prefix}+{_TAIL}", _tail_times(batch, prefix)


def _tail_times(batch: int, prefix: int) -> Times:
    options = prefill_options(HP1, batch, _TAIL, before=prefix)
    inputs = layers(HP1, batch * _TAIL, options["block_table"])
    of_rows = decode_options(
        _HEADS, [*range(prefix + 1, prefix + _TAIL + 1)] * batch, partial(num_splits, sizes=SIZES.measured)
    )
    of_rows["block_table"] = options["block_table"].repeat_interleave(_TAIL, 0)
    filters = gate(_SIGMA)
    in_tiles = partial(_PREFILL.prefill, gate=filters, **options)
    times = {f"tiles of {query_tiles.TILE_ROWS}": in_turns_us(in_tiles, inputs)}
    with patch.object(query_tiles, "TILE_ROWS", _TAIL):
        times[f"tiles of {_TAIL}"] = in_turns_us(in_tiles, inputs)
    times["decode"] = in_turns_us(partial(_DECODE.decode, append=False, gate=filters, **of_rows), inputs)
    return times


class _DecodeStep:
    """The last token of each sequence, whose K and V are in the cache."""

    def __init__(self, batch: int, length: int) -> None:
        self.lengths = [length] * batch
        self.layers = layers(HP1, batch, block_table(batch, length))

    def time(self, sigma: float = _SIGMA, sizes: Sizes = SIZES.measured, **options: Any) -> float:
        """Microseconds with other sizes, for most of which Triton compiles, or options."""
        common = decode_options(_HEADS, self.lengths, partial(num_splits, sizes=sizes))
        step = partial(_DECODE.decode, append=False, sizes=sizes, gate=gate(sigma), **common, **options)
        return in_turns_us(step, self.layers)


if __name__ == "__main__":
    main()
