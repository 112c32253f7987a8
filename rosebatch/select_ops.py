"""Which implementation of each operator a run uses: switches choose kernels here, at load.

An operator may still go by the shape of what it gets: ``StreamedLinear`` goes by the number of rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from rosebatch.config import Sampler
from rosebatch.ops import ACTIVATIONS, Experts, Gain, Linear, Ops, Pending, RoutedExperts, Weight
from rosebatch.toggles import Toggles
from rosebatch_kernels.experts import reference as experts
from rosebatch_kernels.experts.torch_experts import TorchExperts
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.linear import torch_linear as linear
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack
from rosebatch_kernels.mlp import reference as mlp
from rosebatch_kernels.norm import reference as norm
from rosebatch_kernels.uclip import reference as uclip


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
    from rosebatch_kernels.linear.streamed import StreamedHead, StreamedLinear, can_stream
    from rosebatch_kernels.logits import kernel as logits_kernel

    def streamed(weight: Tensor) -> bool:
        return toggles.streamed_linear and can_stream(weight)

    def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
        dense = weight.dense()
        return StreamedLinear(dense, bias) if streamed(dense) else linear.Linear(dense, bias)

    def make_head(weight: Weight) -> linear.PaddedLinear:
        dense = weight.dense()
        return StreamedHead(dense) if streamed(dense) else linear.PaddedLinear(dense)

    return Ops(
        linear=make_linear,
        head=make_head,
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
    return lambda projection, x: unbiased(projection, x) if projection.bias is None else Pending(projection(x))


def _project(toggles: Toggles) -> Callable[[Linear, Tensor], Pending]:
    """The last product of a sub-layer where the norm is a kernel, which adds up parts."""
    if not toggles.fused_mlp:
        return _biased_or_parts()
    from rosebatch_kernels.linear.streamed import StreamedLinear

    at_once = parts_or_product()

    def project(projection: Linear, x: Tensor) -> Pending:
        if isinstance(projection, StreamedLinear) and projection.adds_in_place(x):
            return Pending(x, projection=projection)
        return at_once(projection, x)

    return project


def _multiplied(pending: Pending) -> Pending:
    """With the product computed, if it was left to the norm."""
    return pending if pending.projection is None else _product(pending.projection, pending.value)


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
            overwrite: bool = False,
        ) -> tuple[Tensor, Tensor]:
            product: Any = pending.projection
            if product is not None and overwrite and scale == 1.0:
                total = product.add_(pending.value, residual)
                return kernel.rms_norm(total, weight, eps), total
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
            return norm.add_layer_norm(pending.value, residual, weight, bias, eps)
        total = mlp_kernel.bias_residual_(residual, pending.value, pending.bias)
        return norm.layer_norm(total, weight, bias, eps), total

    def add_bias_then_rms_norm(
        pending: Pending,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        scale: float = 1.0,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if pending.bias is None or scale != 1.0:
            return norm.add_rms_norm(pending.value, residual, weight, eps, pending.bias, scale)
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
