"""Time of the token feedback: ``python -m benchmarks.kernels.feedback``.

A step moves a few kilobytes through one program. So this measures the latency of a launch and of a chain of loads; a
share of the copy bandwidth would say nothing. The reference is not timed: it reads the step on the host, so that no
graph can hold it.
"""

import torch

from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, NUM_FIELDS, POSITION, STOPS

_KERNEL = Launchers("feedback.kernel")
_ROWS = (1, 32, 256, 1024)
# End tokens of GPT-2 and Qwen3, and of Llama-3.1.
_END_TOKENS = (1, 3)
_WINDOW = 32


def main() -> None:
    """Write one line for each number of rows, number of end tokens, and with the columns given."""
    for rows in _ROWS:
        for ends in _END_TOKENS:
            _advance(rows, ends, given=False)
        _advance(rows, 1, given=True)


def _advance(rows: int, ends: int, *, given: bool) -> None:
    """Sequences that never end, so that every call does all of the work."""
    fields = torch.zeros(NUM_FIELDS, rows, dtype=torch.int32, device="cuda")
    fields[NEXT], fields[LIMIT], fields[STOPS] = 1, 2**30, 1
    tokens = torch.randint(1000, (rows,), dtype=torch.int32, device="cuda")
    slots = torch.randperm(rows, device="cuda").int() if given else None
    history = torch.empty(_WINDOW, rows, dtype=torch.int32, device="cuda")
    step = torch.zeros(1, dtype=torch.int32, device="cuda")
    end_tokens = torch.arange(1000, 1000 + ends, dtype=torch.int32, device="cuda")
    name = f"advance  S={rows:<5} {ends} end tokens{', columns given' if given else ''}"
    bench(name, _KERNEL.advance, [(tokens, fields, slots, history, step, end_tokens)])
    assert int(fields[POSITION].min()) > 0


if __name__ == "__main__":
    main()
