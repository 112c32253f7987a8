"""Which implementation of each operator a run uses: switches choose kernels here, at load.

``rosebatch.engine.load`` picks the runner that calls them. An operator may still go by the shape of what it gets:
``StreamedLinear`` goes by the number of rows.

Models know no kernels: they take the types of operators' arguments from here.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config import Sampler
from rosebatch.share import WHOLE, Share
from rosebatch.toggles import Toggles
from rosebatch_kernels.common.exchange import Exchange as Exchange
from rosebatch_kernels.common.head_norms import Gain as Gain
from rosebatch_kernels.common.head_norms import HeadLayerNorm as HeadLayerNorm
from rosebatch_kernels.common.head_norms import HeadNorm as HeadNorm
from rosebatch_kernels.common.head_norms import HeadRMSNorm as HeadRMSNorm
from rosebatch_kernels.common.head_norms import HeadUClip as HeadUClip
from rosebatch_kernels.common.head_norms import QKNorm as QKNorm
from rosebatch_kernels.common.head_norms import WholeRMSNorm as WholeRMSNorm
from rosebatch_kernels.experts import reference as experts
from rosebatch_kernels.experts.torch_experts import TorchExperts
from rosebatch_kernels.gated_delta import reference as gated_delta
from rosebatch_kernels.gated_delta.layout import DeltaState as DeltaState
from rosebatch_kernels.gated_delta.layout import DeltaWeights as DeltaWeights
from rosebatch_kernels.gated_delta.layout import PackedChunks as PackedChunks
from rosebatch_kernels.gated_delta.layout import pack_chunks as pack_chunks
from rosebatch_kernels.hp1 import torch_gathered as hp1
from rosebatch_kernels.hp1.gate import Gate as Gate
from rosebatch_kernels.hp1.gate import mean_taps as mean_taps
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.linear import torch_linear as linear
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack
from rosebatch_kernels.logits import reference as logits
from rosebatch_kernels.mlp import reference as mlp
from rosebatch_kernels.norm import reference as norm
from rosebatch_kernels.paged_attention import torch_gathered as paged_attention
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


class Weight(NamedTuple):
    """A matrix as a checkpoint holds it.

    Attributes:
        tensor: ``[out, in]``.
        scale: what a quantized tensor is multiplied with, broadcast to ``[out, in]``; None for the values themselves.
    """

    tensor: Tensor
    scale: Tensor | None = None

    def dense(self) -> Tensor:
        """The values ``[out, in]``, for operators that know no scale; in the scale's dtype if there is one."""
        return self.tensor if self.scale is None else self.tensor.to(self.scale.dtype) * self.scale


class Pending(NamedTuple):
    """What a sub-layer contributes to the residual, left to the norm that follows.

    Attributes:
        value: ``[T, H]``, or ``[S, T, H]`` fp32, parts to be summed.
        bias: ``[H]``, to be added as well.
        exchange: if the value is this rank's part of a sum over ranks.
        projection: a product that the norm's operator computes as well; ``value [T, in]`` is its input then.
    """

    value: Tensor
    bias: Tensor | None = None
    exchange: Exchange | None = None
    projection: "Linear | None" = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experts:
    """The routed experts of a layer: gated MLPs, of which each token goes through ``k``.

    Attributes:
        gate_up: ``[E, 2 · I, H]``, the gate's rows first.
        down: ``[E, H, I]``.
        gate_up_bias: ``[E, 2 · I]``, or None.
        down_bias: ``[E, H]``, or None.
        activation: ``clamped_swiglu``, or a value of ``EXPERT_GATES``.
        k: experts of a token.
        normalize: whether the weights of a token's experts sum to 1; see ``rosebatch_kernels.experts.reference``.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str
    k: int
    normalize: bool


class RoutedExperts(Protocol):
    """The products of a layer's experts."""

    def __call__(self, x: Tensor, logits: Tensor, shared: Tensor | None) -> Pending:
        """The weighted sum of each token's experts, and of what all tokens share.

        Args:
            x: ``[T, H]``.
            logits: of the router, ``[T, E]``, rows at any stride.
            shared: ``[T, H]``, or None.
        """
        ...


class Linear(Protocol):
    """A matrix product with a weight, ``x [T, in] -> [T, out]``."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, if there is one."""
        ...

    def product(self, x: Tensor) -> Tensor:
        """The product alone."""
        ...


def _not_divided(*_: Any) -> Any:
    raise AssertionError("one process holds the whole model")


def _embed(ids: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
    return functional.embedding(ids, rows)


def _whole(projection: Linear, x: Tensor) -> Pending:
    return Pending(projection(x))


def _activated(name: str, up: Linear, x: Tensor) -> Tensor:
    return mlp.ACTIVATIONS[ACTIVATIONS[name]](up(x))


def _gated(kind: str, gate_up: Linear, x: Tensor) -> Tensor:
    return mlp.GATED[kind](gate_up(x))


def _add_layer_norm(
    pending: Pending, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return norm.add_layer_norm(pending.value, residual, weight, bias, eps, pending.bias)


def _add_rms_norm(
    pending: Pending, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, into: Linear | None = None
) -> tuple[Tensor, Tensor]:
    return norm.add_rms_norm(pending.value, residual, weight, eps, pending.bias, scale)


def _add_post_norm(
    pending: Pending, residual: Tensor, post_weight: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return norm.add_post_norm(pending.value, residual, post_weight, weight, eps, pending.bias)


def _add(pending: Pending, residual: Tensor) -> Tensor:
    return norm.add(pending.value, residual, pending.bias)


def _add_uclip_norm(
    pending: Pending, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
) -> tuple[Tensor, Tensor]:
    assert pending.bias is None, "HP1 has no biases"
    return uclip.add_uclip_norm(pending.value, residual, post_alpha, post_gamma, alpha, gamma)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of a run; each reference documents shapes and dtypes.

    ``linear`` and ``head`` make a product with a weight, and a bias if there is one. ``project`` applies the last
    product of a sub-layer and leaves to the operators whose names begin with ``add`` what these can do on the way;
    ``project_to_clip`` does so for ``add_uclip_norm``. ``add_rms_norm`` may be told ``into`` which product alone the
    normed rows go: they are then what this product takes, and perhaps no tensor. ``activated`` and ``gated`` apply the
    product whose result is activated; ``gated`` takes the values of ``GATES``. ``experts`` prepares the routed experts
    of a layer. ``embed`` looks ids up in the table of embeddings. Where several processes hold the model, ``share`` is
    this one's, ``gather`` puts their logits together, and ``whole_norm`` applies a norm over the heads of all behind a
    product. ``exchanges`` says whether the operators whose names begin with ``add``, but not ``add_uclip_norm``, can
    sum over ranks.
    """

    linear: Callable[[Weight, Tensor | None], Linear]
    head: Callable[[Weight], Callable[[Tensor], Tensor]]
    experts: Callable[[Experts], RoutedExperts]
    share: Share = WHOLE
    embed: Callable[[Tensor, Tensor, int], Tensor] = _embed
    gather: Callable[[Tensor, int], Tensor] = _not_divided
    whole_norm: Callable[[Linear, WholeRMSNorm], Linear] = _not_divided
    exchanges: bool = False
    project: Callable[[Linear, Tensor], Pending] = _whole
    project_to_clip: Callable[[Linear, Tensor], Pending] = _whole
    add: Callable[[Pending, Tensor], Tensor] = _add
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = norm.layer_norm
    add_layer_norm: Callable[[Pending, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]] = _add_layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    add_rms_norm: Callable[..., tuple[Any, Tensor]] = _add_rms_norm
    add_post_norm: Callable[[Pending, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]] = _add_post_norm
    uclip_norm: Callable[[Tensor, Tensor, Gain], Tensor] = uclip.uclip_norm
    add_uclip_norm: Callable[[Pending, Tensor, Tensor, Gain, Tensor, Gain], tuple[Tensor, Tensor]] = _add_uclip_norm
    activated: Callable[[str, Linear, Tensor], Tensor] = _activated
    gated: Callable[[str, Linear, Tensor], Tensor] = _gated
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = qkv.split_heads
    kv_append: Callable[[Tensor, Tensor, Tensor, Tensor], None] = kv_cache.append
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] = kv_cache.copy_blocks
    gathered_decode: Callable[..., Tensor] = paged_attention.decode
    gathered_prefill: Callable[..., Tensor] = paged_attention.prefill
    gathered_gated_decode: Callable[[Tensor, Tensor, Tensor, Tensor, float, Gate], Tensor] = hp1.decode
    gathered_gated_prefill: Callable[[Tensor, Tensor, Tensor, Tensor, float, Gate], Tensor] = hp1.prefill
    delta_rule: Callable[..., Tensor] = gated_delta.prefill
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gated_delta.gated_norm
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor] = mlp.sigmoid_mul
    adjust: Callable[..., Tensor] = logits.adjust
    mask_: Callable[[Tensor, Tensor, Tensor], None] = logits.mask_
    scale_and_cap_: Callable[[Tensor, float, float], Tensor] = logits.scale_and_cap_
    greedy: Callable[[Tensor], Tensor] = sampling.greedy
    sample: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.sample
    sample_filtered: Callable[..., Tensor] = sampling.sample_filtered


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The kernels that only the Triton runner calls; each of them documents shapes and dtypes.

    Attributes:
        prefill_shared: where chunks share tiles.
        gated_decode, gated_prefill: those of HP1 attention.
        tile_rows: most query tokens of a tile of either prefill.
        decode_appends: whether both decode kernels write the new K and V to the cache.
        decode_rotates: whether they also norm and rotate q and k; only if they append.
        prepare: norms, rotates and appends in one; None to do so by the operators of ``Ops``.
        norms_apart: whether neither ``prepare`` nor an operator of ``Ops`` applies this norm.
        delta_decode: convolution and gated delta rule of a decode step.
        norm_heads: applies it before those: takes a projection, query heads, K/V heads and the norm, and returns the
            projection, the same or a new one.
        sample_rows: from logits to tokens inside a graph; None to sample by the operators of ``Ops``, outside.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    prefill_shared: Callable[..., Tensor]
    gated_decode: Callable[..., Tensor]
    gated_prefill: Callable[..., Tensor]
    tile_rows: int
    decode_appends: bool
    decode_rotates: bool
    prepare: Callable[..., None] | None
    norms_apart: Callable[[QKNorm], bool]
    delta_decode: Callable[..., Tensor]
    norm_heads: Callable[[Tensor, int, int, QKNorm], Tensor]
    sample_rows: Callable[..., Tensor] | None
    adjust: Callable[..., Tensor]
    mask_: Callable[[Tensor, Tensor, Tensor], None]
    count_: Callable[[Tensor, Tensor, Tensor | None], None]
    advance: Callable[..., None]


def device_ops(max_num_seqs: int, heads: Collection[Heads], toggles: Toggles, device: torch.device) -> DeviceOps:
    """The kernels for a model whose layers have these heads, with the memory that they keep between calls."""
    from rosebatch_kernels.common import splits
    from rosebatch_kernels.feedback import kernel as feedback
    from rosebatch_kernels.gated_delta import decode as delta_decode
    from rosebatch_kernels.hp1 import decode as hp1_decode
    from rosebatch_kernels.hp1 import prefill as hp1_prefill
    from rosebatch_kernels.logits import kernel as logits_kernel
    from rosebatch_kernels.paged_attention import decode, prefill, prefill_shared
    from rosebatch_kernels.qkv import kernel as qkv_kernel
    from rosebatch_kernels.sampling import kernel as sampling_kernel

    def with_workspaces(
        kernel: Callable[..., Tensor], num_splits: Callable[[int, int], int], *, shares: bool
    ) -> Callable[..., Tensor]:
        """One workspace for all layers with the same heads: layers run one after the other."""
        spaces = {
            each: splits.DecodeWorkspace(
                max_num_seqs, *each, device, num_splits if toggles.split_keys else None, shares=shares
            )
            for each in set(heads)
        }

        def run(qkv: Tensor, cache: Tensor, *args: Any, num_heads: int, **options: Any) -> Tensor:
            workspace = spaces[num_heads, cache.shape[2], cache.shape[4]]
            return kernel(
                qkv, cache, *args, workspace=workspace, num_heads=num_heads, append=toggles.fused_kv_append, **options
            )

        return run

    def norms_apart(norm: QKNorm) -> bool:
        """``prepare`` norms each head by itself. Without it, the operator that splits heads applies every norm."""
        return toggles.fused_rotary and not (toggles.fused_qk_norm and isinstance(norm, HeadNorm))

    shares = toggles.shared_prefix_attention
    gated_decode = partial(hp1_decode.decode, sparse=toggles.sparse_values)
    return DeviceOps(
        decode=with_workspaces(decode.decode, splits.num_splits, shares=shares),
        prefill=prefill.prefill,
        prefill_shared=prefill_shared.prefill_shared,
        gated_decode=with_workspaces(gated_decode, hp1_decode.num_splits, shares=shares),
        gated_prefill=hp1_prefill.prefill,
        tile_rows=prefill.TILE_ROWS,
        decode_appends=toggles.fused_kv_append,
        decode_rotates=toggles.fused_kv_append and toggles.fused_rotary,
        prepare=qkv_kernel.prepare if toggles.fused_rotary else None,
        norms_apart=norms_apart,
        norm_heads=_norm_heads,
        delta_decode=delta_decode.decode,
        sample_rows=sampling_kernel.sample_rows if toggles.fused_sampler else None,
        adjust=logits_kernel.adjust,
        mask_=logits_kernel.mask_,
        count_=logits_kernel.count_,
        advance=feedback.advance,
    )


def _norm_heads(projection: Tensor, num_heads: int, kv_heads: int, norm: QKNorm) -> Tensor:
    from rosebatch_kernels.norm.kernel import rms_norm
    from rosebatch_kernels.qkv.kernel import whole_rms_norm_
    from rosebatch_kernels.uclip.kernel import uclip_norm

    if isinstance(norm, WholeRMSNorm):
        whole_rms_norm_(projection, *norm)
        return projection
    heads = projection.unflatten(1, (num_heads + 2 * kv_heads, -1))
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if isinstance(norm, HeadUClip):
        q, k = uclip_norm(q, norm.q_alpha, norm.q_gamma), uclip_norm(k, norm.k_alpha, norm.k_gamma)
    elif isinstance(norm, HeadLayerNorm):
        q, k = qkv.normed_heads(q, k, norm)
    else:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    return torch.cat((q, k, v), 1).flatten(1)


def select(toggles: Toggles, device: str = "cpu", sampler: Sampler = "rosebatch") -> Ops:
    """The operators that these switches ask for on ``cpu`` or ``cuda``; other samplers need ``cuda``."""
    ops = _cuda_ops(toggles) if device == "cuda" else _cpu_ops(toggles)
    if sampler == "rosebatch":
        return ops
    from rosebatch_kernels.sampling import flashinfer

    return replace(ops, sample=flashinfer.sample, sample_filtered=flashinfer.sample_filtered)


def _cpu_ops(toggles: Toggles) -> Ops:
    def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
        dense = weight.dense()
        if can_pack(dense):
            return PackedLinear(dense, bias, invariant=toggles.batch_invariant)
        return linear.Linear(dense, bias)

    def make_experts(layer: Experts) -> RoutedExperts:
        def products(weight: Weight, bias: Tensor | None) -> list[Linear]:
            biases = [None] * len(weight.tensor) if bias is None else bias.unbind()
            matrices = weight.dense().unbind()
            return [make_linear(Weight(each), own) for each, own in zip(matrices, biases, strict=True)]

        gate_up, down = products(layer.gate_up, layer.gate_up_bias), products(layer.down, layer.down_bias)
        mixture = TorchExperts([*gate_up], [*down], layer.activation)
        k, normalize = layer.k, layer.normalize

        def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Pending:
            return Pending(mixture(x, *experts.route(logits, k, normalize=normalize), shared))

        return run

    return Ops(linear=make_linear, head=lambda weight: make_linear(weight, None), experts=make_experts)


def _cuda_ops(toggles: Toggles) -> Ops:
    """Triton kernels where a switch is on. They are imported here, so that a run on a CPU need not load Triton."""
    from rosebatch_kernels.gated_delta.gated_norm import gated_norm
    from rosebatch_kernels.gated_delta.prefill import prefill as delta_prefill
    from rosebatch_kernels.kv_cache import kernel as kv_cache_kernel
    from rosebatch_kernels.linear.streamed import StreamedLinear, can_stream
    from rosebatch_kernels.logits import kernel as logits_kernel

    def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
        dense = weight.dense()
        streamed = toggles.streamed_linear and can_stream(dense)
        return StreamedLinear(dense, bias) if streamed else linear.Linear(dense, bias)

    return Ops(
        linear=make_linear,
        head=lambda weight: linear.PaddedLinear(weight.dense()),
        experts=_expert_kernels,
        kv_append=kv_cache_kernel.append if toggles.batched_kv_append else kv_cache.append,
        copy_blocks=kv_cache_kernel.copy_blocks,
        delta_rule=delta_prefill,
        gated_norm=gated_norm,
        scale_and_cap_=logits_kernel.scale_and_cap_,
        **_mlp_ops(toggles),
        **_norm_ops(toggles),
        **_clip_ops(toggles),
    )


def _expert_kernels(layer: Experts) -> RoutedExperts:
    """Without a wait for the host: a step's graph holds them. The norm's kernel adds up the parts."""
    from rosebatch_kernels.experts import kernel
    from rosebatch_kernels.experts.router import route

    biases = layer.gate_up_bias, layer.down_bias
    matrices = layer.gate_up.dense(), layer.down.dense()
    k, normalize, activation = layer.k, layer.normalize, layer.activation

    def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Pending:
        ids, weights = route(logits, k, normalize=normalize)
        return Pending(kernel.parts(x, ids, weights, *matrices, *biases, activation, shared))

    return run


def _mlp_ops(toggles: Toggles) -> dict[str, Any]:
    """What follows the first product of an MLP: fused kernels, or PyTorch's operators."""
    if not toggles.fused_mlp:
        return {}
    from rosebatch_kernels.linear.streamed import StreamedLinear
    from rosebatch_kernels.mlp import kernel as mlp_kernel

    activations = {
        "gelu_erf": mlp_kernel.bias_gelu_erf_,
        "gelu_tanh": mlp_kernel.bias_gelu_tanh_,
        "relu": mlp_kernel.bias_relu_,
    }
    gates: dict[str, Callable[[Tensor], Tensor]] = {kind: getattr(mlp_kernel, kind) for kind in mlp.GATED}

    def activated(name: str, up: Linear, x: Tensor) -> Tensor:
        kind = ACTIVATIONS[name]
        if isinstance(up, StreamedLinear) and up.activates(x, kind):
            return up.activated(x, kind)
        return activations[kind](up.product(x), up.bias)

    def gated(kind: str, gate_up: Linear, x: Tensor) -> Tensor:
        if isinstance(gate_up, StreamedLinear) and gate_up.activates(x, kind):
            return gate_up.activated(x, kind)
        return gates[kind](gate_up(x))

    return {"activated": activated, "gated": gated, "sigmoid_mul": mlp_kernel.sigmoid_mul}


def _product(projection: Linear, x: Tensor) -> Pending:
    return Pending(projection.product(x), projection.bias)


def parts_or_product() -> Callable[[Linear, Tensor], Pending]:
    """The product in parts if that is faster: the kernel of the norm sums them up."""
    from rosebatch_kernels.linear.streamed import StreamedLinear

    def project(projection: Linear, x: Tensor) -> Pending:
        if isinstance(projection, StreamedLinear) and projection.divides(x):
            return Pending(projection.parts(x), projection.bias)
        return _product(projection, x)

    return project


def _biased_or_parts() -> Callable[[Linear, Tensor], Pending]:
    """The same, but a bias is added by the product."""
    unbiased = parts_or_product()
    return lambda projection, x: unbiased(projection, x) if projection.bias is None else _whole(projection, x)


def _project(toggles: Toggles) -> Callable[[Linear, Tensor], Pending]:
    """The last product of a sub-layer where the norm is a kernel, which adds up parts."""
    if not toggles.fused_mlp:
        return _biased_or_parts()
    at_once = parts_or_product()
    if not (toggles.norm_in_linear and toggles.streamed_linear):
        return at_once
    from rosebatch_kernels.linear.streamed import StreamedLinear

    def project(projection: Linear, x: Tensor) -> Pending:
        if isinstance(projection, StreamedLinear) and projection.adds(x):
            return Pending(x, projection.bias, projection=projection)
        return at_once(projection, x)

    return project


def _multiplied(pending: Pending) -> Pending:
    """With the product computed, if it was left to the norm."""
    return pending if pending.projection is None else parts_or_product()(pending.projection, pending.value)


def _takes_factors(into: Linear | None, x: Tensor) -> bool:
    """Whether this product can apply the norm's factors of as many rows as x has."""
    from rosebatch_kernels.linear.streamed import StreamedLinear

    own = inspect.unwrap(into) if callable(into) else None
    return isinstance(own, StreamedLinear) and own.streams(x)


def _norm_ops(toggles: Toggles) -> dict[str, Any]:
    """LayerNorm and RMSNorm, and how a sub-layer's result reaches them.

    With both ``fused_norm`` and ``fused_mlp``, the norm's kernel adds a bias; with ``fused_mlp`` alone, one of the
    MLP's does; else the product.
    """
    if toggles.fused_norm:
        from rosebatch_kernels.norm import kernel

        def add(pending: Pending, residual: Tensor) -> Tensor:
            pending = _multiplied(pending)
            total: Tensor = kernel.add(pending.value, residual, pending.bias, pending.exchange)
            return total

        def add_layer_norm(
            pending: Pending, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor]:
            pending = _multiplied(pending)
            return kernel.add_layer_norm(pending.value, residual, weight, bias, eps, pending.bias, pending.exchange)

        def add_rms_norm(
            pending: Pending,
            residual: Tensor,
            weight: Tensor,
            eps: float,
            scale: float = 1.0,
            into: Linear | None = None,
        ) -> tuple[Any, Tensor]:
            if pending.projection is not None and _takes_factors(into, pending.value):
                return pending.projection.add(pending.value, residual, weight, eps, scale)  # type: ignore[attr-defined, no-any-return]
            pending = _multiplied(pending)
            return kernel.add_rms_norm(pending.value, residual, weight, eps, pending.bias, scale, pending.exchange)

        def add_post_norm(
            pending: Pending, residual: Tensor, post_weight: Tensor, weight: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor]:
            pending = _multiplied(pending)
            return kernel.add_post_norm(
                pending.value, residual, post_weight, weight, eps, pending.bias, pending.exchange
            )

        return {
            "exchanges": True,
            "project": _project(toggles),
            "add": add,
            "layer_norm": kernel.layer_norm,
            "add_layer_norm": add_layer_norm,
            "rms_norm": kernel.rms_norm,
            "add_rms_norm": add_rms_norm,
            "add_post_norm": add_post_norm,
        }
    if not toggles.fused_mlp:
        return {}
    from rosebatch_kernels.mlp import kernel as mlp_kernel

    def add_bias_then_layer_norm(
        pending: Pending, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if pending.bias is None:
            return _add_layer_norm(pending, residual, weight, bias, eps)
        total = mlp_kernel.bias_residual_(residual, pending.value, pending.bias)
        return norm.layer_norm(total, weight, bias, eps), total

    def add_bias_then_rms_norm(
        pending: Pending, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, into: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        if pending.bias is None or scale != 1.0:
            return _add_rms_norm(pending, residual, weight, eps, scale)
        total = mlp_kernel.bias_residual_(residual, pending.value, pending.bias)
        return norm.rms_norm(total, weight, eps), total

    return {
        "project": _product,
        "add_layer_norm": add_bias_then_layer_norm,
        "add_rms_norm": add_bias_then_rms_norm,
    }


def _clip_ops(toggles: Toggles) -> dict[str, Any]:
    """HP1's clips: both clips and the addition in one kernel, or each by itself, without ``fused_norm`` by PyTorch."""
    clips: Any = uclip
    if toggles.fused_norm:
        from rosebatch_kernels.uclip import kernel as clips

    def apart(
        pending: Pending, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
    ) -> tuple[Tensor, Tensor]:
        total = residual + clips.uclip_norm(pending.value, post_alpha, post_gamma)
        return clips.uclip_norm(total, alpha, gamma), total

    def fused(
        pending: Pending, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = clips.add_uclip_norm(pending.value, residual, post_alpha, post_gamma, alpha, gamma)
        return out

    in_parts = toggles.fused_norm and toggles.fused_peri_norm
    return {
        "uclip_norm": clips.uclip_norm,
        "project_to_clip": parts_or_product() if in_parts else _product,
        "add_uclip_norm": fused if toggles.fused_peri_norm else apart,
    }
