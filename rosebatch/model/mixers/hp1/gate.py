"""Loads the gate of HP1 attention."""

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.weights import WeightSource
from rosebatch.ops.hp1 import Gate, mean_taps
from rosebatch.ops.ops import Ops

# For random weights. With 1.4, some 70 % of attention's weights are zero, as in the article's trained model.
_SIGMA = 1.4
# Shapes of one number.
NUMBERS = ((), (1,))


def load_gate(config: ModelConfig, ops: Ops, weights: WeightSource, prefix: str) -> Gate:
    """The gate of this process's heads, in the layer whose names begin with ``prefix``."""
    heads, options = config.num_heads, config.hp1
    assert options is not None, "HP1 has a gate"
    name = f"{prefix}self_attn.taps"
    stored = weights.shape(name)
    if stored is not None:
        shape = (heads, options.fir_k) if len(stored) > 1 else (options.fir_k,)
        taps = weights.get(name, shape, dtype=torch.float32).expand(heads, -1).contiguous()
    else:
        sigma = load_vector(f"{prefix}self_attn.sigma", heads, weights, torch.float32, _SIGMA)
        taps = mean_taps(sigma, options.fir_k)
    gamma = load_vector(f"{prefix}self_attn.gamma", heads, weights, torch.float32, 1.0)
    own = ops.shard.of(heads)
    taps, gamma = taps[own.start : own.stop].contiguous(), gamma[own.start : own.stop].contiguous()
    return Gate(taps, gamma, options.relu_pre, options.clip_min, options.clip_max)


def load_vector(name: str, size: int, weights: WeightSource, dtype: torch.dtype | None, fill: float) -> Tensor:
    """``[size]``: as stored, or the one stored number that often; with random weights all are ``fill``."""
    stored = weights.shape(name)
    shape = stored if stored is not None and stored in NUMBERS else (size,)
    return weights.get(name, shape, dtype=dtype, fill=fill).expand(size).contiguous()
