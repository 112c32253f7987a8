"""Bandwidth of UClipNorm at decode and prefill sizes: ``python -m benchmarks.kernels.uclip``.

The first lines have article S4's sizes: clip, addition and next clip in one kernel, and in three.
"""

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench, compare

_KERNEL = Launchers("uclip.kernel")
_GAMMA = 0.5
_POST_GAMMA = -1.5
# HP1's hidden size.
_SIZE = 1024
_TOKENS = (32, 256, 8192)
# Of article S4's table of clips around a residual addition.
_ROWS = (32, 128, 2048, 8192)
# Parts of a decode step's projection.
_PARTS = 8
_TURNS = 8


def main() -> None:
    """Write one line for each form, size and implementation."""
    for rows in _ROWS:
        _fused_and_apart(rows, _SIZE)
    for tokens in _TOKENS:
        _norms(tokens, _SIZE)
    _parts(_TOKENS[0], _SIZE)
    for tokens in _TOKENS:
        _head_norm(tokens, heads=8, head_dim=128, width=2048)


def _fused_and_apart(rows: int, size: int) -> None:
    """The same bytes for both: what three kernels write and read again in between is their loss."""
    weights = randn(size), _POST_GAMMA, randn(size), _GAMMA
    inputs = [(randn(rows, size), randn(rows, size), *weights) for _ in range(_TURNS)]
    for name, step in (("one kernel", _KERNEL.add_uclip_norm), ("two kernels and an addition", _apart)):
        bench(f"clip, add, clip  N={rows} H={size}  {name}", step, inputs, moved=4 * 2 * rows * size)


def _apart(y: Tensor, residual: Tensor, post_alpha: Tensor, post_gamma: float, alpha: Tensor, gamma: float) -> object:
    return _KERNEL.uclip_norm(residual + _KERNEL.uclip_norm(y, post_alpha, post_gamma), alpha, gamma)


def _norms(tokens: int, size: int) -> None:
    pairs = [(randn(tokens, size), randn(tokens, size)) for _ in range(_TURNS)]
    alpha, post_alpha = randn(size), randn(size)
    shape, row = f"T={tokens} H={size}", 2 * tokens * size
    gains = torch.full((size,), _GAMMA, device="cuda")
    for name, gamma, post_gamma in ((shape, _GAMMA, _POST_GAMMA), (f"{shape} gains", gains, gains)):
        compare("uclip", "uclip_norm", name, [(x, alpha, gamma) for x, _ in pairs], moved=2 * row)
        inputs = [(*pair, post_alpha, post_gamma, alpha, gamma) for pair in pairs]
        compare("uclip", "add_uclip_norm", name, inputs, moved=4 * row)


def _parts(tokens: int, size: int) -> None:
    weights = randn(size), _POST_GAMMA, randn(size), _GAMMA
    parts = [torch.randn(_PARTS, tokens, size, device="cuda") for _ in range(_TURNS)]
    inputs = [(y, randn(tokens, size), *weights) for y in parts]
    moved = parts[0].nbytes + 3 * 2 * tokens * size
    compare("uclip", "add_uclip_norm", f"T={tokens} H={size} S={_PARTS}", inputs, moved=moved)


def _head_norm(tokens: int, heads: int, head_dim: int, width: int) -> None:
    """HP1's norm of the query heads, a view of the fused projection's output."""
    alpha = randn(head_dim)
    wide = [randn(tokens, width) for _ in range(_TURNS)]
    inputs = [(x[:, : heads * head_dim].view(tokens, heads, head_dim), alpha, _GAMMA) for x in wide]
    shape = f"T={tokens} {heads}x{head_dim}"
    compare("uclip", "uclip_norm", shape, inputs, moved=4 * tokens * heads * head_dim)


if __name__ == "__main__":
    main()
