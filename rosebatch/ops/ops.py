"""The operators that models are made of, and the types of their arguments: models import no kernels.

By default each operator is PyTorch's. ``rosebatch.ops.select`` chooses others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional

from rosebatch.ops.shard import WHOLE, Shard
from rosebatch.ops.weight import Weight
from rosebatch_kernels.common.all_reduce import AllReduce as AllReduce
from rosebatch_kernels.common.chunks import PackedChunks as PackedChunks
from rosebatch_kernels.common.chunks import pack_chunks as pack_chunks
from rosebatch_kernels.common.head_norms import Gain as Gain
from rosebatch_kernels.common.head_norms import HeadLayerNorm as HeadLayerNorm
from rosebatch_kernels.common.head_norms import HeadNorm as HeadNorm
from rosebatch_kernels.common.head_norms import HeadRMSNorm as HeadRMSNorm
from rosebatch_kernels.common.head_norms import HeadUClip as HeadUClip
from rosebatch_kernels.common.head_norms import QKNorm as QKNorm
from rosebatch_kernels.common.head_norms import ValueRMSNorm as ValueRMSNorm
from rosebatch_kernels.common.head_norms import WholeRMSNorm as WholeRMSNorm
from rosebatch_kernels.common.shared_keys import Pieces as Pieces
from rosebatch_kernels.common.shared_keys import SharedKeys as SharedKeys
from rosebatch_kernels.experts.reference import LARGEST as LARGEST
from rosebatch_kernels.experts.reference import Choice as Choice
from rosebatch_kernels.gated_delta import reference as gated_delta
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.linear.each_head import HeadProducts as HeadProducts
from rosebatch_kernels.linear.interface import Linear as Linear
from rosebatch_kernels.linear.interface import Scales as Scales
from rosebatch_kernels.linear.scaled import ScaledLinear as ScaledLinear
from rosebatch_kernels.logits import reference as logits
from rosebatch_kernels.logprobs import reference as logprobs
from rosebatch_kernels.mamba2 import reference as mamba2
from rosebatch_kernels.mlp import reference as mlp
from rosebatch_kernels.norm import reference as norm
from rosebatch_kernels.qkv import torch_heads as qkv
from rosebatch_kernels.sampling import torch_sampling as sampling
from rosebatch_kernels.uclip import reference as uclip

# transformers' names, as a model's config.json has them -> the kernels' names.
ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# The same for the gate of an MLP.
GATES = {
    "silu": "silu_mul",
    "relu": "relu_mul",
    "gelu": "gelu_erf_mul",
    "gelu_new": "gelu_tanh_mul",
    "gelu_pytorch_tanh": "gelu_tanh_mul",
}
# The same for the gate of routed experts.
EXPERT_GATES = {"silu": "silu_mul", "gelu_new": "gelu_mul", "gelu_pytorch_tanh": "gelu_mul"}
# Query heads, K/V heads, head size.
Heads = tuple[int, int, int]


class Partial(NamedTuple):
    """What a sub-layer contributes to the residual, left to the norm that follows.

    Attributes:
        value: ``[T, H]``, or ``[S, T, H]`` fp32, parts to be summed.
        bias: ``[H]``, to be added as well.
        all_reduce: if the value is this rank's part of a sum over ranks.
        projection: a product that the norm's operator computes as well; ``value [T, in]`` is its input then.
        scales: factors of the value.
    """

    value: Tensor
    bias: Tensor | None = None
    all_reduce: AllReduce | None = None
    projection: Linear | None = None
    scales: Scales | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experts:
    """The routed experts of a layer: MLPs, of which each token goes through ``k``.

    Attributes:
        gate_up: ``[E, 2 · I, H]``, the gate's rows first; ``[E, I, H]`` with ``relu2``, which has no gate.
        down: ``[E, H, I]``.
        gate_up_bias: ``[E, 2 · I]``, or None.
        down_bias: ``[E, H]``, or None.
        activation: ``clamped_swiglu``, ``relu2``, or a value of ``EXPERT_GATES``.
        k: experts of a token.
        normalize: whether the weights of a token's experts sum to 1; see ``rosebatch_kernels.experts.reference``.
        choice: how they are chosen.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str
    k: int
    normalize: bool
    choice: Choice = LARGEST


class RoutedExperts(Protocol):
    """The products of a layer's experts."""

    def __call__(self, x: Tensor, logits: Tensor, shared: Tensor | None) -> Partial:
        """The weighted sum of each token's experts, and of what all tokens share.

        Args:
            x: ``[T, H]``.
            logits: of the router, ``[T, E]``, rows at any stride.
            shared: ``[T, H]``, or None.
        """
        ...


def _not_divided(*_: Any) -> Any:
    raise AssertionError("one process holds the whole model")


def _embed(ids: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
    return functional.embedding(ids, rows)


def _whole(projection: Linear, x: Tensor) -> Partial:
    return Partial(projection(x))


def _activated(name: str, up: Linear, x: Tensor) -> Tensor:
    return mlp.ACTIVATIONS[ACTIVATIONS[name]](up(x))


def _gated(kind: str, gate_up: Linear, x: Tensor, down: Linear) -> Tensor:
    return mlp.GATED[kind](gate_up(x))


def _of_partial(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Takes a ``Partial``: ``operator`` takes its tensor, the residual, the options, its bias, and what is named."""

    def added(partial: Partial, residual: Tensor, *options: Any, **named: Any) -> Any:
        return operator(partial.value, residual, *options, partial.bias, **named)

    return added


_add = _of_partial(norm.add)
_add_layer_norm = _of_partial(norm.add_layer_norm)
_add_post_norm = _of_partial(norm.add_post_norm)


def _add_rms_norm(
    partial: Partial, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    return norm.add_rms_norm(partial.value, residual, weight, eps, partial.bias, scale)


def _add_uclip_norm(
    partial: Partial, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
) -> tuple[Tensor, Tensor]:
    assert partial.bias is None, "clips come after products without a bias"
    return uclip.add_uclip_norm(partial.value, residual, post_alpha, post_gamma, alpha, gamma)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of a run; each reference documents shapes and dtypes.

    ``linear`` and ``head`` make a product with a weight, and a bias if there is one. ``project`` applies the last
    product of a sub-layer. It leaves what they can do to the operators whose names begin with ``add``;
    ``project_to_clip`` does so for ``add_uclip_norm``. With ``overwrite``, ``add_rms_norm`` may add to the residual in
    place. ``activated`` and ``gated`` apply the product whose result is activated; ``gated`` takes the values of
    ``GATES``, and the one product that reads its result. ``experts`` prepares the routed experts of a layer.
    ``each_head`` makes products of heads with matrices ``[heads, out, in]``. ``embed`` looks ids up in the table of
    embeddings. Where several processes hold the model, ``shard`` is this one's. ``gather`` puts their logits together,
    and ``whole_norm`` norms the heads of all after a product. ``fuses_all_reduce``: whether the operators whose names
    begin with ``add``, but not ``add_uclip_norm``, can sum over ranks.
    """

    linear: Callable[[Weight, Tensor | None], Linear]
    head: Callable[[Weight], Callable[[Tensor], Tensor]]
    experts: Callable[[Experts], RoutedExperts]
    each_head: Callable[[Tensor], HeadProducts]
    shard: Shard = WHOLE
    embed: Callable[[Tensor, Tensor, int], Tensor] = _embed
    gather: Callable[[Tensor, int], Tensor] = _not_divided
    whole_norm: Callable[[Linear, WholeRMSNorm], Linear] = _not_divided
    fuses_all_reduce: bool = False
    project: Callable[[Linear, Tensor], Partial] = _whole
    project_to_clip: Callable[[Linear, Tensor], Partial] = _whole
    add: Callable[[Partial, Tensor], Tensor] = _add
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = norm.layer_norm
    add_layer_norm: Callable[[Partial, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]] = _add_layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _add_rms_norm
    add_post_norm: Callable[..., tuple[Tensor, Tensor]] = _add_post_norm
    uclip_norm: Callable[[Tensor, Tensor, Gain], Tensor] = uclip.uclip_norm
    add_uclip_norm: Callable[[Partial, Tensor, Tensor, Gain, Tensor, Gain], tuple[Tensor, Tensor]] = _add_uclip_norm
    activated: Callable[[str, Linear, Tensor], Tensor] = _activated
    gated: Callable[[str, Linear, Tensor, Linear], Tensor] = _gated
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = qkv.split_heads
    kv_append: Callable[..., None] = kv_cache.append
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] = kv_cache.copy_blocks
    gated_norm: Callable[..., Tensor] = gated_delta.gated_norm
    gate_norm: Callable[[Tensor, Tensor, Tensor | None, int, float], Tensor] = mamba2.gate_norm
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor] = mlp.sigmoid_mul
    adjust: Callable[..., Tensor] = logits.adjust
    mask_: Callable[[Tensor, Tensor, Tensor], None] = logits.mask_
    logprob_rows: Callable[[Tensor, Tensor, int, int], Tensor] = logprobs.logprob_rows
    scale_and_cap_: Callable[[Tensor, float, float], Tensor] = logits.scale_and_cap_
    greedy: Callable[[Tensor], Tensor] = sampling.greedy
    sample: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.sample
    sample_filtered: Callable[..., Tensor] = sampling.sample_filtered
