"""Time of the sampling kernel in each mode: ``python -m benchmarks.kernels.sampling``.

The bandwidth is that of reading the logits once. Every call has the same logits, so they lie in the cache if they fit,
as in a decode step that has just written them.

If FlashInfer is installed, its sampler follows on the same logits, with its fastest function for the mode. It takes
fp32 in rows without gaps, so the conversion is part of its time.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench, report
from rosebatch_kernels.common.timing import median_us

_KERNEL = Launchers("sampling.kernel")
# Of GPT-2 and Qwen3. The first gives unaligned rows; most cases give them a stride of 50264.
_VOCABS = (50257, 151936)
_ROWS = (32, 256)
# Temperature, top-k and top-p.
_MODES = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
    "top-p 0.9": (1.0, 0, 0.9),
}


def main() -> None:
    """Write one line for each vocabulary, number of rows, dtype and mode."""
    for vocab in _VOCABS:
        for rows in _ROWS:
            for dtype in (torch.float16, torch.bfloat16):
                for name, mode in _MODES.items():
                    _bench(name, _zipf(rows, vocab, 1.5, dtype), *mode)
            # The slow path: the filter keeps thousands of tokens, far more than in most steps of a model.
            _bench("top-p 0.9 of flat logits", _zipf(rows, vocab, 1.0, dtype), 1.0, 0, 0.9)
            if vocab % 8:
                _bench("temperature, rows unaligned", _zipf(rows, vocab, 1.5, dtype).contiguous(), 1.0, 0, 1.0)


def _bench(name: str, logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    rows, vocab = logits.shape
    real, whole = torch.zeros(rows, device="cuda"), torch.zeros(rows, dtype=torch.int32, device="cuda")
    seeds = torch.randint(-(2**31), 2**31, (rows, 2), device="cuda").int()
    arguments = (logits, real + temperature, whole + top_k, real + top_p, real, seeds, whole)
    shape = f"S={rows} V={vocab} {str(logits.dtype).removeprefix('torch.')}"
    moved = logits.itemsize * rows * vocab
    ours = bench(f"{shape:<28} {name}", _KERNEL.sample_rows, [arguments], moved=moved)
    if temperature and find_spec("flashinfer"):
        seed = whole[:1].long()
        theirs = median_us(lambda: _sample_theirs(logits, top_k, top_p, seed))
        report(f"{shape:<28} FlashInfer, {theirs / ours:.2f} of our time", theirs, moved=moved)


def _sample_theirs(logits: Tensor, top_k: int, top_p: float, seed: Tensor) -> Tensor:
    """Tokens ``[S]`` int32 at temperature 1; ``seed [1]`` int64 is on the device, as a graph requires."""
    from flashinfer import sampling

    numbers = logits.float().contiguous()
    tokens: Tensor
    if top_k:
        tokens = sampling.top_k_top_p_sampling_from_logits(numbers, top_k, top_p, seed=seed, offset=seed)
    elif top_p < 1:
        tokens = sampling.top_p_sampling_from_probs(sampling.softmax(numbers), top_p, seed=seed, offset=seed)
    else:
        tokens = sampling.sampling_from_logits(numbers, seed=seed, offset=seed)
    return tokens


def _zipf(rows: int, vocab: int, exponent: float, dtype: torch.dtype) -> Tensor:
    """Logits of probabilities that fall with a power of the rank, roughly like those of language models."""
    ranks = torch.rand(rows, vocab, device="cuda").argsort(-1) + 1
    aligned = torch.empty(rows, -(-vocab // 8) * 8, dtype=dtype, device="cuda")
    return aligned[:, :vocab].copy_(-exponent * ranks.log())


if __name__ == "__main__":
    main()
