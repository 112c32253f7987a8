"""Which implementation of each operator a run uses: the only place that picks a kernel.

Models, which know no kernels, take the types of operators' arguments from here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.config import Sampler
from rosebatch.toggles import Toggles
from rosebatch_kernels.common.head_norms import HeadUClip as HeadUClip
from rosebatch_kernels.common.head_norms import QKNorm as QKNorm
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

# By transformers' names, as they stand in a model's config.json, those of the kernels.
ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_GATED = {"silu_mul": mlp.silu_mul, "relu_mul": mlp.relu_mul}


class Linear(Protocol):
    """A matrix product with a weight, ``x [T, in] -> [T, out]``."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, if there is one."""
        ...

    def product(self, x: Tensor) -> Tensor:
        """The product alone."""
        ...


def _activated(name: str, up: Linear, x: Tensor) -> Tensor:
    return mlp.ACTIVATIONS[ACTIVATIONS[name]](up(x))


def _gated(kind: str, gate_up: Linear, x: Tensor) -> Tensor:
    return _GATED[kind](gate_up(x))


def _add_layer_norm(
    projection: Linear, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return norm.add_layer_norm(projection(x), residual, weight, bias, eps)


def _add_rms_norm(projection: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return norm.add_rms_norm(projection(x), residual, weight, eps)


def _add_uclip_norm(
    projection: Linear,
    x: Tensor,
    residual: Tensor,
    post_alpha: Tensor,
    post_gamma: float,
    alpha: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    return uclip.add_uclip_norm(projection(x), residual, post_alpha, post_gamma, alpha, gamma)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of a run; shapes and dtypes stand at each reference.

    ``add_layer_norm``, ``add_rms_norm`` and ``add_uclip_norm`` take the projection whose result is added to the
    residual, ``activated`` and ``gated`` the one whose result is activated: which kernel does what of it is theirs to
    decide. ``gated`` is told ``silu_mul`` or ``relu_mul``.
    """

    linear: Callable[[Tensor, Tensor | None], Linear]
    head: Callable[[Tensor], Callable[[Tensor], Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm.layer_norm
    add_layer_norm: Callable[[Linear, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = _add_layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    add_rms_norm: Callable[[Linear, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = _add_rms_norm
    uclip_norm: Callable[[Tensor, Tensor, float], Tensor] = uclip.uclip_norm
    add_uclip_norm: Callable[[Linear, Tensor, Tensor, Tensor, float, Tensor, float], tuple[Tensor, Tensor]] = (
        _add_uclip_norm
    )
    activated: Callable[[str, Linear, Tensor], Tensor] = _activated
    gated: Callable[[str, Linear, Tensor], Tensor] = _gated
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = qkv.split_heads
    kv_append: Callable[[Tensor, Tensor, Tensor, Tensor], None] = kv_cache.append
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] = kv_cache.copy_blocks
    gathered_decode: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = paged_attention.decode
    gathered_prefill: Callable[..., Tensor] = paged_attention.prefill
    gathered_gated_decode: Callable[[Tensor, Tensor, Tensor, Tensor, float, Gate], Tensor] = hp1.decode
    gathered_gated_prefill: Callable[[Tensor, Tensor, Tensor, Tensor, float, Gate], Tensor] = hp1.prefill
    adjust: Callable[..., Tensor] = logits.adjust
    mask_: Callable[[Tensor, Tensor, Tensor], None] = logits.mask_
    greedy: Callable[[Tensor], Tensor] = sampling.greedy
    sample: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.sample
    sample_filtered: Callable[..., Tensor] = sampling.sample_filtered


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The kernels that only a device runner calls; shapes and dtypes stand at each of them.

    ``gated_decode`` and ``gated_prefill`` are those of HP1 attention. ``tile_rows`` is the most query tokens of a tile
    of either prefill.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    gated_decode: Callable[..., Tensor]
    gated_prefill: Callable[..., Tensor]
    prepare: Callable[..., None]
    adjust: Callable[..., Tensor]
    mask_: Callable[[Tensor, Tensor, Tensor], None]
    sample_rows: Callable[..., Tensor]
    count_: Callable[[Tensor, Tensor, Tensor | None], None]
    advance: Callable[..., None]
    tile_rows: int


def device_ops(
    max_num_seqs: int, num_heads: int, kv_heads: int, head_dim: int, device: torch.device, *, split_keys: bool = True
) -> DeviceOps:
    """The kernels for a model with these heads, with the memory that they keep between calls."""
    from rosebatch_kernels.common import splits
    from rosebatch_kernels.feedback import kernel as feedback
    from rosebatch_kernels.hp1 import decode as hp1_decode
    from rosebatch_kernels.hp1 import prefill as hp1_prefill
    from rosebatch_kernels.logits import kernel as logits_kernel
    from rosebatch_kernels.paged_attention import decode, prefill
    from rosebatch_kernels.qkv import kernel as qkv_kernel
    from rosebatch_kernels.sampling import kernel as sampling_kernel

    heads = (max_num_seqs, num_heads, kv_heads, head_dim, device)
    workspace = splits.DecodeWorkspace(*heads, splits.num_splits if split_keys else None)
    gated_workspace = splits.DecodeWorkspace(*heads, hp1_decode.num_splits if split_keys else None)
    return DeviceOps(
        decode=partial(decode.decode, workspace=workspace),
        prefill=prefill.prefill,
        gated_decode=partial(hp1_decode.decode, workspace=gated_workspace),
        gated_prefill=hp1_prefill.prefill,
        prepare=qkv_kernel.prepare,
        adjust=logits_kernel.adjust,
        mask_=logits_kernel.mask_,
        sample_rows=sampling_kernel.sample_rows,
        count_=logits_kernel.count_,
        advance=feedback.advance,
        tile_rows=prefill.TILE_ROWS,
    )


def select(toggles: Toggles, device: str = "cpu", sampler: Sampler = "rosebatch") -> Ops:
    """The operators that serve these toggles on ``cpu`` or ``cuda``; a sampler of others is for ``cuda``."""
    ops = _cuda_ops(toggles) if device == "cuda" else _cpu_ops(toggles)
    if sampler == "rosebatch":
        return ops
    from rosebatch_kernels.sampling import flashinfer

    return replace(ops, sample=flashinfer.sample, sample_filtered=flashinfer.sample_filtered)


def _cpu_ops(toggles: Toggles) -> Ops:
    def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        if can_pack(weight):
            return PackedLinear(weight, bias, invariant=toggles.batch_invariant)
        return linear.Linear(weight, bias)

    return Ops(linear=make_linear, head=lambda weight: make_linear(weight, None))


def _cuda_ops(toggles: Toggles) -> Ops:
    """Triton kernels where a switch is on; they are imported here, so that a run on a CPU need not load Triton."""
    from rosebatch_kernels.kv_cache import kernel as kv_cache_kernel
    from rosebatch_kernels.linear.streamed import StreamedLinear, can_stream
    from rosebatch_kernels.mlp import kernel as mlp_kernel
    from rosebatch_kernels.norm import kernel as norm_kernel
    from rosebatch_kernels.uclip import kernel as uclip_kernel

    norms = norm_kernel if toggles.fused_norm else norm
    clips = uclip_kernel if toggles.fused_norm else uclip

    def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        streamed = toggles.streamed_linear and can_stream(weight)
        return StreamedLinear(weight, bias) if streamed else linear.Linear(weight, bias)

    fused_activations = {
        "gelu_erf": mlp_kernel.bias_gelu_erf_,
        "gelu_tanh": mlp_kernel.bias_gelu_tanh_,
        "relu": mlp_kernel.bias_relu_,
    }

    def activated(name: str, up: Linear, x: Tensor) -> Tensor:
        if not toggles.fused_mlp:
            return _activated(name, up, x)
        kind = ACTIVATIONS[name]
        if isinstance(up, StreamedLinear) and up.activates(x, kind):
            return up.activated(x, kind)
        return fused_activations[kind](up.product(x), up.bias)

    fused_gated = {"silu_mul": mlp_kernel.silu_mul, "relu_mul": mlp_kernel.relu_mul}

    def gated(kind: str, gate_up: Linear, x: Tensor) -> Tensor:
        if not toggles.fused_mlp:
            return _gated(kind, gate_up, x)
        if isinstance(gate_up, StreamedLinear) and gate_up.activates(x, kind):
            return gate_up.activated(x, kind)
        return fused_gated[kind](gate_up(x))

    def parts(projection: Linear, x: Tensor) -> Tensor | None:
        """The product alone in parts, where they are worth having and the norm adds them up."""
        if toggles.fused_norm and isinstance(projection, StreamedLinear) and projection.divides(x):
            return projection.parts(x)
        return None

    def project(projection: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """What is left to add to the residual: the projection's result (None: it is in already) and its bias."""
        bias = projection.bias
        if bias is not None and not toggles.fused_mlp:
            return projection(x), residual, None
        if (divided := parts(projection, x)) is not None:
            return divided, residual, bias
        if bias is None or toggles.fused_norm:
            return projection.product(x), residual, bias
        return None, mlp_kernel.bias_residual_(residual, projection.product(x), bias), None

    def add_layer_norm(
        projection: Linear, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, residual, x_bias = project(projection, x, residual)
        if y is None:
            return norms.layer_norm(residual, weight, bias, eps), residual
        out: tuple[Tensor, Tensor] = norms.add_layer_norm(y, residual, weight, bias, eps, x_bias)
        return out

    def add_rms_norm(
        projection: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, residual, x_bias = project(projection, x, residual)
        if y is None:
            return norms.rms_norm(residual, weight, eps), residual
        out: tuple[Tensor, Tensor] = norms.add_rms_norm(y, residual, weight, eps, x_bias)
        return out

    def add_uclip_norm(
        projection: Linear,
        x: Tensor,
        residual: Tensor,
        post_alpha: Tensor,
        post_gamma: float,
        alpha: Tensor,
        gamma: float,
    ) -> tuple[Tensor, Tensor]:
        assert projection.bias is None, "HP1 has no biases"
        if not toggles.fused_peri_norm:
            total = residual + clips.uclip_norm(projection.product(x), post_alpha, post_gamma)
            return clips.uclip_norm(total, alpha, gamma), total
        y = parts(projection, x)
        y = projection.product(x) if y is None else y
        out: tuple[Tensor, Tensor] = clips.add_uclip_norm(y, residual, post_alpha, post_gamma, alpha, gamma)
        return out

    return Ops(
        linear=make_linear,
        head=linear.PaddedLinear,
        layer_norm=norms.layer_norm,
        add_layer_norm=add_layer_norm,
        rms_norm=norms.rms_norm,
        add_rms_norm=add_rms_norm,
        uclip_norm=clips.uclip_norm,
        add_uclip_norm=add_uclip_norm,
        activated=activated,
        gated=gated,
        kv_append=kv_cache_kernel.append if toggles.batched_kv_append else kv_cache.append,
        copy_blocks=kv_cache_kernel.copy_blocks if toggles.batched_kv_append else kv_cache.copy_blocks,
    )
