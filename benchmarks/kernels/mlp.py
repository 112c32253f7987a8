"""Bandwidth of the MLP epilogues at decode and prefill sizes: ``python -m benchmarks.kernels.mlp``."""

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import compare

_TOKENS = (32, 256, 8192)
_TURNS = 8


def main() -> None:
    """Write one line for each epilogue, size and implementation."""
    for tokens in _TOKENS:
        # Intermediate and hidden size of GPT-2, the model with biases.
        _bias_forms(tokens, intermediate=3072, hidden=768)
        # Intermediate sizes of Qwen3-0.6B and Llama-3.1-8B.
        for size in (3072, 14336):
            inputs = [(randn(tokens, 2 * size),) for _ in range(_TURNS)]
            for operator in ("silu_mul", "relu_mul", "gelu_tanh_mul"):
                compare("mlp", operator, f"T={tokens} I={size}", inputs, moved=6 * tokens * size)


def _bias_forms(tokens: int, intermediate: int, hidden: int) -> None:
    bias = randn(intermediate)
    inputs = [(randn(tokens, intermediate), bias) for _ in range(_TURNS)]
    shape = f"T={tokens} I={intermediate}"
    for operator in ("bias_gelu_tanh_", "bias_gelu_erf_", "bias_relu_"):
        compare("mlp", operator, shape, inputs, moved=4 * tokens * intermediate)
    bias = randn(hidden)
    sums = [(randn(tokens, hidden), randn(tokens, hidden), bias) for _ in range(_TURNS)]
    compare("mlp", "bias_residual_", f"T={tokens} H={hidden}", sums, moved=6 * tokens * hidden)


if __name__ == "__main__":
    main()
