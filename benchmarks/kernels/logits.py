"""Bandwidth of the changes of logits in a decode step: ``python -m benchmarks.kernels.logits``.

``count_`` moves a few bytes, so its time is the latency of a launch and of a chain of loads. The bytes of ``mask_`` are
those of the masks and of the barred logits, which it only writes.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import bench, compare, implementations

# Of GPT-2 and Qwen3.
_VOCABS = (50257, 151936)
_ROWS = (32, 256)
_TURNS = 8


def main() -> None:
    """Write one line for each operator, size and implementation."""
    for vocab in _VOCABS:
        for rows in _ROWS:
            for biased in (False, True):
                _adjust(rows, vocab, biased)
            _count(rows, vocab)
            _mask(rows, vocab)
            _scale_and_cap(rows, vocab)


def _adjust(rows: int, vocab: int, biased: bool) -> None:
    real = torch.ones(rows, device="cuda")
    whole = torch.ones(rows, dtype=torch.int32, device="cuda")
    penalties = {"presence": real * 0.5, "frequency": real * 0.1, "repetition": real * 1.1}
    inputs = [
        (_logits(rows, vocab), _marks(rows, vocab), torch.randn(rows, vocab, device="cuda") if biased else None, None)
        for _ in range(_TURNS)
    ]
    # Logits in 16 bits; marks, biases and results in 32.
    moved = rows * vocab * (2 + 4 + 4 + 4 * biased)
    for implementation, module in implementations("logits").items():
        step = partial(module.adjust, **penalties, positions=whole, min_positions=whole + 1)
        name = f"{'adjust' + ' with bias' * biased:<16} {f'S={rows} V={vocab}':<24}"
        bench(f"{name} {implementation}", step, inputs, moved=moved)


def _count(rows: int, vocab: int) -> None:
    marks = _marks(rows, vocab)
    tokens = torch.randint(vocab, (_TURNS, rows), dtype=torch.int32, device="cuda")
    inputs = [(marks, turn, None) for turn in tokens]
    # Reads a token, reads and writes a mark.
    compare("logits", "count_", f"S={rows} V={vocab}", inputs, moved=rows * 3 * 4)


def _mask(rows: int, vocab: int) -> None:
    """Masks that allow one token in 32, like those of a grammar."""
    inputs = []
    for _ in range(_TURNS):
        bit = torch.randint(32, (rows, -(-vocab // 32)), dtype=torch.int32, device="cuda")
        order = torch.randperm(rows, device="cuda")
        inputs.append((_logits(rows, vocab), torch.ones_like(bit) << bit, order))
    compare("logits", "mask_", f"S={rows} V={vocab}", inputs, moved=rows * vocab * 2 + rows * vocab // 8)


def _scale_and_cap(rows: int, vocab: int) -> None:
    """Gemma 2's cap."""
    inputs = [(_logits(rows, vocab), 1.0, 30.0) for _ in range(_TURNS)]
    compare("logits", "scale_and_cap_", f"S={rows} V={vocab}", inputs, moved=rows * vocab * 4)


def _logits(rows: int, vocab: int) -> Tensor:
    """Rows as long as ``PaddedLinear`` makes them, see ``rosebatch_kernels.linear.torch_linear``."""
    return randn(rows, -(-vocab // 64) * 64)[:, :vocab]


def _marks(rows: int, vocab: int) -> Tensor:
    """One token in ten was generated: more than in practice, at the same cost."""
    return (torch.rand(rows, vocab, device="cuda") < 0.1).int()


if __name__ == "__main__":
    main()
