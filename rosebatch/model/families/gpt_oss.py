"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every other layer.

Checkpoints hold an expert's gate and up rows in turn, either as 16-bit matrices ``[E, in, out]`` or in MXFP4, which is
expanded at load.
"""

import torch
from torch import Tensor

from rosebatch.model.experts import ExpertsMLP, make_router
from rosebatch.model.families.llama import Llama
from rosebatch.model.layers import Rotary
from rosebatch.model.mxfp4 import expand
from rosebatch.model.sublayers import SelfAttention, load_attention
from rosebatch.model.weights import WeightSource
from rosebatch.ops import Experts, Weight

# Values that share a scale, and the bytes that hold them.
_BLOCK, _BLOCK_BYTES = 32, 16


class GptOss(Llama):
    """See ``Llama``."""

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> SelfAttention:
        """See ``Llama``."""
        return load_attention(
            self.config,
            self.ops,
            weights,
            index,
            [prefix + name for name in self.qkv_names],
            f"{prefix}self_attn.o_proj",
            rotary=rotary,
            qk_norm=None,
            qkv_order=None,
            sinks=weights.get(f"{prefix}self_attn.sinks", (self.config.num_heads,)),
        )

    def load_experts(self, prefix: str, weights: WeightSource) -> ExpertsMLP:
        """See ``Llama``."""
        config, own = self.config.experts, f"{prefix}mlp."
        assert config is not None
        count, inner, hidden = config.num_experts, config.expert_size, self.config.hidden_size
        routed = Experts(
            gate_up=Weight(_load_matrices(weights, f"{own}experts.gate_up_proj", (count, 2 * inner, hidden), True)),
            down=Weight(_load_matrices(weights, f"{own}experts.down_proj", (count, hidden, inner), False)),
            gate_up_bias=_apart(weights.get(f"{own}experts.gate_up_proj_bias", (count, 2 * inner)), 1),
            down_bias=weights.get(f"{own}experts.down_proj_bias", (count, hidden)),
            activation="clamped_swiglu",
            k=config.experts_per_token,
            normalize=config.normalize,
        )
        router, bias = weights.get(f"{own}router.weight", (count, hidden)), weights.get(f"{own}router.bias", (count,))
        return ExpertsMLP(make_router(self.ops, router, bias), count, self.ops.experts(routed))


def _apart(rows: Tensor, axis: int) -> Tensor:
    """Gate and up, which take turns along this axis, one behind the other."""
    count = rows.shape[axis]
    order = torch.arange(count, device=rows.device).view(-1, 2).t().flatten()
    return rows.index_select(axis, order)


def _load_matrices(weights: WeightSource, name: str, shape: tuple[int, int, int], in_turn: bool) -> Tensor:
    """One matrix of all experts ``[E, out, in]``; expert by expert, for the stored form is another one.

    Args:
        weights: of the model.
        name: of the tensor.
        shape: of the result.
        in_turn: whether gate and up rows take turns.
    """
    count, rows, columns = shape
    if weights.shape(f"{name}_blocks") is None:
        stored = weights.get(name, (count, columns, rows))
        out = stored.new_empty(shape)
        for expert in range(count):
            matrix = stored[expert].t()
            out[expert] = _apart(matrix, 0) if in_turn else matrix
        return out
    groups = columns // _BLOCK
    blocks = weights.get(f"{name}_blocks", (count, rows, groups, _BLOCK_BYTES), dtype=torch.uint8)
    scales = weights.get(f"{name}_scales", (count, rows, groups), dtype=torch.uint8)
    # The dtype of the run is that of the tensors beside it.
    out = blocks.new_empty(shape, dtype=weights.get(f"{name}_bias", (count, rows)).dtype)
    for expert in range(count):
        matrix = expand(blocks[expert], scales[expert], out.dtype)
        out[expert] = _apart(matrix, 0) if in_turn else matrix
    return out
