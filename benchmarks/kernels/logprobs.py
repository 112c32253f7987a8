"""Time of log-probabilities of a decode step: ``python -m benchmarks.kernels.logprobs``.

The bandwidth is that of reading the logits once.
"""

from functools import partial

import torch

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import bench, implementations

# Of GPT-2 and Qwen3.
_VOCABS = (50257, 151936)
_ROWS = (1, 32, 256)
_LIMITS = (0, 1, 5, 20)
_TURNS = 4


def main() -> None:
    """Write one line for each size, number of likeliest tokens and implementation."""
    for vocab in _VOCABS:
        for rows in _ROWS:
            # Rows as long as ``PaddedLinear`` makes them, see ``rosebatch_kernels.linear.torch_linear``.
            logits = [randn(rows, -(-vocab // 64) * 64)[:, :vocab] for _ in range(_TURNS)]
            inputs = [(each, torch.randint(vocab, (rows,), dtype=torch.int32, device="cuda")) for each in logits]
            for limit in _LIMITS:
                for implementation, module in implementations("logprobs").items():
                    name = f"{f'S={rows} V={vocab} likeliest={limit}':<36} {implementation}"
                    bench(name, partial(module.logprob_rows, limit=limit, room=20), inputs, moved=rows * vocab * 2)


if __name__ == "__main__":
    main()
