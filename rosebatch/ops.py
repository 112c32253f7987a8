"""Which implementation of each operator a run uses: the only place that picks a kernel."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rosebatch.toggles import Toggles
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.linear.packed import PackedLinear, can_pack
from rosebatch_kernels.linear.reference import Linear
from rosebatch_kernels.mlp import reference as mlp
from rosebatch_kernels.norm import reference as norm
from rosebatch_kernels.paged_attention import reference as paged_attention
from rosebatch_kernels.rope import reference as rope
from rosebatch_kernels.sampling import reference as sampling

# By transformers' names, as they stand in a model's config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": mlp.gelu,
    "gelu_new": mlp.gelu_tanh,
    "gelu_pytorch_tanh": mlp.gelu_tanh,
    "relu": mlp.relu,
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of a run; shapes and dtypes stand at each reference."""

    linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm.layer_norm
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]] = norm.add_layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = norm.add_rms_norm
    silu_mul: Callable[[Tensor], Tensor] = mlp.silu_mul
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rope.rope
    kv_append: Callable[[Tensor, Tensor, Tensor, Tensor], None] = kv_cache.append
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] = kv_cache.copy_blocks
    attention_decode: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = paged_attention.decode
    attention_prefill: Callable[..., Tensor] = paged_attention.prefill
    greedy: Callable[[Tensor], Tensor] = sampling.greedy
    sample: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.sample
    sample_filtered: Callable[..., Tensor] = sampling.sample_filtered


def select(toggles: Toggles) -> Ops:
    """The operators that serve these toggles."""

    def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        if can_pack(weight):
            return PackedLinear(weight, bias, invariant=toggles.batch_invariant)
        return Linear(weight, bias)

    return Ops(linear=linear)
