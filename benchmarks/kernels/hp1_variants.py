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

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.inputs import block_table, randn
from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common import tiles as tiles_module
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.common.timing import median_us
from rosebatch_kernels.hp1.gate import Gate, mean_taps
from rosebatch_kernels.hp1.sizes import SIZES, Sizes, num_splits

_DECODE, _PREFILL = Launchers("hp1.decode"), Launchers("hp1.prefill")
_HEADS, _KV_HEADS, _SIZE = 8, 4, 128
_SCALE = _SIZE**-0.5
_BLOCK_SIZE = 64
_BATCHES = (1, 16, 64, 128)
_LENGTHS = (128, 256, 512, 1024, 2048)
_SIGMAS = (1.4, 2.9)
_SIGMA = 1.4
# Caches that take turns, like the layers of a model.
_TURNS = 4
# Runs of a warp, keys in a group, warps. The first are in use.
_GROUPS = ((2, 8, 1), (2, 4, 1), (2, 16, 1), (1, 8, 1), (1, 16, 1), (4, 4, 1), (2, 8, 2), (2, 8, 4))
# Bytes of a row of K that a thread holds, times the threads of a warp, for one run.
_ROW = 2 * _SIZE
_WARP = 32
_PROGRAMS = (528, 1056, 2112)
_MIN_KEYS = (32, 128, 256, 512)
_TAIL = 16
_PREFIXES = (256, 1024)

_IN_USE = partial(_DECODE.decode, append=False)

Times = Mapping[str, float]


def main() -> None:
    """Write a line for each shape, with a column for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parts = {"values": _values, "groups": _groups, "splits": _splits, "tails": _tails}
    parser.add_argument("--part", action="append", choices=parts)
    for name in parser.parse_args().part or parts:
        for shape, times in parts[name]():
            minimum = min(times.values())
            cells = (f"{label}: {us:.2f}{'*' if us == minimum else ''}" for label, us in times.items())
            sys.stdout.write(f"{name:<7} {shape:<24} " + "   ".join(cells) + "\n")
            sys.stdout.flush()


def _values() -> Iterator[tuple[str, Times]]:
    for batch in _BATCHES:
        for length in _LENGTHS:
            step = _DecodeStep(batch, length)
            for sigma in _SIGMAS:
                yield (
                    f"B={batch} T={length} sigma={sigma}",
                    {
                        "all": step.time(partial(_DECODE.decode, append=False, sparse=False), sigma),
                        "with weight": step.time(_IN_USE, sigma),
                    },
                )


def _groups() -> Iterator[tuple[str, Times]]:
    for batch in _BATCHES:
        for length in _LENGTHS:
            step, times = _DecodeStep(batch, length), {}
            for runs, keys, warps in _GROUPS:
                # As many warps at once as in use.
                programs = SIZES.measured.programs // warps
                row_bytes = runs * _ROW // _WARP
                sizes: dict[str, Any] = {
                    "row_bytes": row_bytes,
                    "keys": ((0, keys),),
                    "warps": warps,
                    "programs": programs,
                }
                times[f"{runs}/{keys}/{warps}"] = step.time(_IN_USE, keys=((0, keys),), **sizes)
            yield f"B={batch} T={length}", times


def _splits() -> Iterator[tuple[str, Times]]:
    for batch in _BATCHES:
        for length in _LENGTHS:
            step, times = _DecodeStep(batch, length), {}
            times["one"] = step.time(_IN_USE, max_splits=1)
            for programs in _PROGRAMS:
                for keys in _MIN_KEYS:
                    times[f"{programs}/{keys}"] = step.time(_IN_USE, programs=programs, min_keys=keys)
            yield f"B={batch} T={length}", times


def _tails() -> Iterator[tuple[str, Times]]:
    for batch in _BATCHES:
        for prefix in _PREFIXES:
            yield f"B={batch} {prefix}+{_TAIL}", _tail_times(batch, prefix)


def _tail_times(batch: int, prefix: int) -> Times:
    length, rows = prefix + _TAIL, batch * _TAIL
    table = block_table(batch, length, _BLOCK_SIZE)
    tiles = torch.tensor([(s, s * _TAIL, prefix, _TAIL) for s in range(batch)], dtype=torch.int32, device="cuda")
    layers = cycle([(randn(rows, (_HEADS + 2 * _KV_HEADS) * _SIZE), _cache(table)) for _ in range(_TURNS)])
    common: dict[str, Any] = {"num_heads": _HEADS, "scale": _SCALE, "gate": _gate(_SIGMA)}
    positions = (prefix + torch.arange(_TAIL, dtype=torch.int32, device="cuda")).repeat(batch)
    steps: dict[str, Any] = {
        "block_table": table.repeat_interleave(_TAIL, 0),
        "positions": positions,
        "limits": positions + 1,
        "workspace": _workspace(rows),
    }
    in_tiles = partial(_PREFILL.prefill, block_table=table, tiles=tiles, **common)
    times = {f"tiles of {TILE_ROWS}": _median_us(in_tiles, layers)}
    with patch.object(tiles_module, "TILE_ROWS", _TAIL):
        times[f"tiles of {_TAIL}"] = _median_us(in_tiles, layers)
    times["decode"] = _median_us(partial(_DECODE.decode, append=False, **steps, **common), layers)
    return times


class _DecodeStep:
    """The last token of each sequence, whose K and V are in the cache."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch = batch
        self.table = block_table(batch, length, _BLOCK_SIZE)
        self.limits = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.layers = [(randn(batch, (_HEADS + 2 * _KV_HEADS) * _SIZE), _cache(self.table)) for _ in range(_TURNS)]

    def time(self, kernel: Callable[..., Tensor], sigma: float = _SIGMA, **changes: Any) -> float:
        """Microseconds of a decode kernel with some sizes changed; Triton compiles for most of them."""
        sizes = replace(SIZES.measured, **changes)
        step = partial(
            kernel,
            sizes=sizes,
            block_table=self.table,
            positions=self.limits - 1,
            limits=self.limits,
            workspace=_workspace(self.batch, sizes),
            gate=_gate(sigma),
            num_heads=_HEADS,
            scale=_SCALE,
        )
        return _median_us(step, cycle(self.layers))


def _median_us(step: Callable[..., Tensor], layers: Iterator[tuple[Tensor, Tensor]]) -> float:
    return median_us(lambda: step(*next(layers)))


def _workspace(rows: int, sizes: Sizes = SIZES.measured) -> DecodeWorkspace:
    return DecodeWorkspace(rows, _HEADS, _KV_HEADS, _SIZE, torch.device("cuda"), partial(num_splits, sizes=sizes))


def _gate(sigma: float) -> Gate:
    sigmas = torch.full((_HEADS,), sigma, device="cuda")
    return Gate(mean_taps(sigmas, 3), torch.ones(_HEADS, device="cuda"))


def _cache(table: Tensor) -> Tensor:
    return randn(2, table.numel(), _KV_HEADS, _BLOCK_SIZE, _SIZE)


if __name__ == "__main__":
    main()
