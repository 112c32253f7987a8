"""Bandwidth of the norms at decode and prefill sizes: ``python -m benchmarks.kernels.norm``."""

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import compare

_EPS = 1e-5
# Hidden sizes of GPT-2, Qwen3-0.6B, Gemma-3-4B and Llama-3.1-8B.
_SIZES = (768, 1024, 2560, 4096)
_TOKENS = (32, 256, 8192)
_TURNS = 8


def main() -> None:
    """Write one line for each norm, size and implementation."""
    for size in _SIZES:
        for tokens in _TOKENS:
            _norms(tokens, size)
    for tokens in _TOKENS:
        _head_norm(tokens, heads=16, head_dim=128, width=4096)


def _norms(tokens: int, size: int) -> None:
    pairs = [(randn(tokens, size), randn(tokens, size)) for _ in range(_TURNS)]
    weight, bias, x_bias = randn(size), randn(size), randn(size)
    shape, row = f"T={tokens} H={size}", 2 * tokens * size
    compare("norm", "layer_norm", shape, [(x, weight, bias, _EPS) for x, _ in pairs], moved=2 * row)
    inputs = [(*pair, weight, bias, _EPS, x_bias) for pair in pairs]
    compare("norm", "add_layer_norm", shape, inputs, moved=4 * row)
    compare("norm", "rms_norm", shape, [(x, weight, _EPS) for x, _ in pairs], moved=2 * row)
    compare("norm", "add_rms_norm", shape, [(*pair, weight, _EPS) for pair in pairs], moved=4 * row)
    post = weight.float(), weight.float()
    compare("norm", "add_post_norm", shape, [(*pair, *post, _EPS) for pair in pairs], moved=4 * row)
    compare("norm", "add", shape, pairs, moved=3 * row)


def _head_norm(tokens: int, heads: int, head_dim: int, width: int) -> None:
    """Qwen3's norm of the query heads, a view of the fused projection's output."""
    weight = randn(head_dim)
    wide = [randn(tokens, width) for _ in range(_TURNS)]
    inputs = [(x[:, : heads * head_dim].view(tokens, heads, head_dim), weight, _EPS) for x in wide]
    shape = f"T={tokens} {heads}x{head_dim}"
    compare("norm", "rms_norm", shape, inputs, moved=4 * tokens * heads * head_dim)


if __name__ == "__main__":
    main()
