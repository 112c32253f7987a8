"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every other layer.

Checkpoints hold an expert's gate and up rows in turn, either as 16-bit matrices ``[E, in, out]`` or in MXFP4, which is
expanded at load.
"""

import torch
from torch import Tensor

from rosebatch.model.experts import ExpertsMLP, make_router
from rosebatch.model.families.llama import Llama
from rosebatch.model.mixers.softmax.sublayer import SelfAttention, load_attention
from rosebatch.model.mxfp4 import expand
from rosebatch.model.rope import Rotary
from rosebatch.model.weights import Take, WeightSource
from rosebatch.ops.ops import Experts, Weight

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
            sinks=self._load_sinks(prefix, weights),
        )

    def _load_sinks(self, prefix: str, weights: WeightSource) -> Tensor:
        heads = self.ops.shard.of(self.config.num_heads)
        sinks = weights.get(f"{prefix}self_attn.sinks", (self.config.num_heads,))
        return sinks[heads.start : heads.stop].contiguous()

    def load_experts(self, prefix: str, weights: WeightSource) -> ExpertsMLP:
        """See ``Llama``."""
        config, own = self.config.experts, f"{prefix}mlp."
        assert config is not None
        count, inner, hidden = config.num_experts, config.expert_size, self.config.hidden_size
        part = self.ops.shard.of(inner)
        both = range(2 * part.start, 2 * part.stop)
        gate_up = _load_matrices(
            weights, f"{own}experts.gate_up_proj", (count, 2 * inner, hidden), in_turn=True, own=both
        )
        gate_up_bias = weights.get(f"{own}experts.gate_up_proj_bias", (count, 2 * inner))[:, both.start : both.stop]
        down = _load_matrices(weights, f"{own}experts.down_proj", (count, hidden, inner), in_turn=False, own=part)
        down_bias = weights.get(f"{own}experts.down_proj_bias", (count, hidden))
        if self.ops.shard.rank > 0:
            # The sum over all processes has it once.
            down_bias = torch.zeros_like(down_bias)
        routed = Experts(
            gate_up=Weight(gate_up),
            down=Weight(down),
            gate_up_bias=_apart(gate_up_bias, 1),
            down_bias=down_bias,
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


def _load_matrices(
    weights: WeightSource,
    name: str,
    shape: tuple[int, int, int],
    *,
    in_turn: bool,
    own: range,
) -> Tensor:
    """One matrix of all experts ``[E, out, in]``; expert by expert, for the stored form is another one.

    Args:
        weights: of the model.
        name: of the tensor.
        shape: of the whole matrices.
        in_turn: whether gate and up rows take turns.
        own: what is read: the rows if they take turns, else the columns.
    """
    count, rows, columns = shape
    size = count, *((len(own), columns) if in_turn else (rows, len(own)))
    if weights.shape(f"{name}_blocks") is None:
        take = Take.of(2, own, rows) if in_turn else Take.of(1, own, columns)
        stored = weights.get(name, (count, columns, rows), take=take)
        out = stored.new_empty(size)
        for expert in range(count):
            matrix = stored[expert].t()
            out[expert] = _apart(matrix, 0) if in_turn else matrix
        return out
    groups = columns // _BLOCK
    # Of columns, all blocks that they touch.
    touched = range(own.start // _BLOCK, -(-own.stop // _BLOCK))
    take = Take.of(1, own, rows) if in_turn else Take.of(2, touched, groups)
    blocks = weights.get(f"{name}_blocks", (count, rows, groups, _BLOCK_BYTES), dtype=torch.uint8, take=take)
    scales = weights.get(f"{name}_scales", (count, rows, groups), dtype=torch.uint8, take=take)
    # The dtype of the run is that of the tensors beside it.
    out = blocks.new_empty(size, dtype=weights.get(f"{name}_bias", (count, rows)).dtype)
    first = 0 if in_turn else own.start - touched.start * _BLOCK
    for expert in range(count):
        matrix = expand(blocks[expert], scales[expert], out.dtype)
        out[expert] = _apart(matrix, 0) if in_turn else matrix[:, first : first + len(own)]
    return out
