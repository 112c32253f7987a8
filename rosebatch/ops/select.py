"""Which implementation of each operator a run uses: switches choose kernels here, at load.

A ``Linear`` may still go by the number of rows it gets.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rosebatch.config.run import Sampler
from rosebatch.config.switches import Switches
from rosebatch.ops import fp8, int4, packed
from rosebatch.ops.layout import Layout
from rosebatch.ops.ops import ACTIVATIONS, Experts, Gain, Linear, Ops, Partial, RoutedExperts
from rosebatch.ops.weight import Weight
from rosebatch_kernels.common.device import Device, device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.experts import reference as experts
from rosebatch_kernels.experts.torch_experts import TorchExperts
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.linear import torch_linear as linear
from rosebatch_kernels.linear.each_head import ApartHeads, BatchedHeads
from rosebatch_kernels.linear.joined import JoinedLinear
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack
from rosebatch_kernels.mlp import reference as mlp
from rosebatch_kernels.norm import reference as norm
from rosebatch_kernels.uclip import reference as uclip


def select(
    switches: Switches, device: str = "cpu", sampler: Sampler = "rosebatch", input_group: int | None = None
) -> Ops:
    """The operators of a run.

    Args:
        switches: all of them.
        device: ``cpu`` or ``cuda``.
        sampler: others than rosebatch's need ``cuda``.
        input_group: columns of an input that share a scale where it is multiplied in fp8, 0 for all: norms leave them
            so. None if weights are in other forms.
    """
    ops = _cuda_ops(switches, input_group) if device == "cuda" else _cpu_ops(switches)
    if sampler == "rosebatch":
        return ops
    from rosebatch_kernels.sampling import flashinfer

    return replace(ops, sample=flashinfer.sample, sample_filtered=flashinfer.sample_filtered)


def keeps(layout: Layout, switches: Switches, device: str, dtype: torch.dtype) -> bool:
    """Whether products with matrices of this layout read them as they are stored; else they are decoded at load.

    Args:
        layout: of the numbers; matrices of odd sizes may be decoded all the same.
        switches, device, dtype: of the run.
    """
    if device != "cuda" or not switches.quantized_linear or layout.of_experts:
        return False
    whole = fp8.BLOCK, fp8.BLOCK
    if layout.is_fp8:
        is_served = fp8.has_fp8_product(whole, dtype, device_of(torch.device(device)))
        return is_served and layout.block in fp8.BLOCKS
    rows, columns = layout.block
    is_served = not layout.floats and layout.bits <= 4 and int4.has_int4_product(whole, dtype)
    return is_served and rows == 1 and columns % min(int4.GROUPS) == 0


def has_invariant_products(dtype: torch.dtype) -> bool:
    """Whether products on this CPU can give a row the same bits beside any others: PyTorch's own, in fp16, do not."""
    return can_pack(torch.empty(0, 0, dtype=dtype))


def keeps_experts(layout: Layout, switches: Switches, device: str, dtype: torch.dtype) -> bool:
    """Whether products with routed experts read this layout as it is stored; arguments as of ``keeps``."""
    if device != "cuda" or not switches.quantized_linear or not packed.can_decode(device_of(torch.device(device))):
        return False
    rows, columns = layout.block
    if layout.is_fp8:
        return columns % packed.piece_of("e4m3") == 0
    if layout.floats:
        # Scales of 32 are powers of two, as the kernel has them.
        return (rows, columns) == (1, packed.piece_of("e2m1"))
    return layout.bits <= 4 and columns % packed.piece_of("int4") == 0


def _cpu_ops(switches: Switches) -> Ops:
    def product(dense: Tensor, bias: Tensor | None) -> Linear:
        if can_pack(dense):
            return PackedLinear(dense, bias, invariant=switches.batch_invariant)
        return linear.TorchLinear(dense, bias)

    def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
        return weight.linear(bias, None) or product(weight.dense(), bias)

    def make_experts(layer: Experts) -> RoutedExperts:
        def products(weight: Weight, bias: Tensor | None) -> list[Linear]:
            matrices = weight.dense().unbind()
            biases = [None] * len(matrices) if bias is None else bias.unbind()
            return [product(each, own) for each, own in zip(matrices, biases, strict=True)]

        gate_up, down = products(layer.gate_up, layer.gate_up_bias), products(layer.down, layer.down_bias)
        mixture = TorchExperts([*gate_up], [*down], layer.activation)
        route = partial(experts.route, k=layer.k, normalize=layer.normalize, choice=layer.choice)

        def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Partial:
            return Partial(mixture(x, *route(logits), shared))

        return run

    return Ops(
        linear=make_linear,
        head=lambda weight: make_linear(weight, None),
        experts=make_experts,
        each_head=lambda weight: ApartHeads([product(own, None) for own in weight]),
    )


def _cuda_ops(switches: Switches, input_group: int | None) -> Ops:
    """Triton kernels where a switch is on. They are imported here, so that a run on a CPU need not load Triton."""
    from rosebatch_kernels.gated_delta.gated_norm import gated_norm
    from rosebatch_kernels.kv_cache import kernel as kv_cache_kernel
    from rosebatch_kernels.linear.fixed_heads import FixedHeads
    from rosebatch_kernels.linear.streamed import StreamedHead, StreamedLinear, can_stream
    from rosebatch_kernels.logits import kernel as logits_kernel
    from rosebatch_kernels.mamba2.gate_norm import gate_norm

    device = device_of(torch.device("cuda"))
    group = input_group if switches.quantized_linear and device.has_e4m3 else None

    def own_product(weight: Weight, bias: Tensor | None) -> Linear | None:
        found = weight.linear(bias, device) if switches.quantized_linear else None
        return found.in_one_order() if found is not None and switches.batch_invariant else found

    cache_sizes = kv_cache_kernel.SIZES.of(device)

    def streamed(weight: Tensor) -> bool:
        return switches.streamed_linear and can_stream(weight, device)

    def fastest(dense: Tensor, bias: Tensor | None) -> Linear:
        if not streamed(dense):
            return linear.TorchLinear(dense, bias)
        return StreamedLinear(dense, bias, device, invariant=switches.batch_invariant)

    def fastest_head(dense: Tensor, _: Tensor | None) -> Callable[[Tensor], Tensor]:
        return StreamedHead(dense, device) if streamed(dense) else linear.PaddedLinear(dense)

    product = _where_invariant(fastest, device) if switches.batch_invariant else fastest
    head_product = _where_invariant(fastest_head, device) if switches.batch_invariant else fastest_head

    def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
        parts = weight.parts()
        sizes = [part.shape[0] for part in parts]
        each = list(zip(parts, [None] * len(parts) if bias is None else bias.split(sizes), strict=True))
        found = [own_product(*part) for part in each]
        if not any(found):
            return product(weight.dense(), bias)
        linears = [own or product(part.dense(), part_bias) for own, (part, part_bias) in zip(found, each, strict=True)]
        return linears[0] if len(linears) == 1 else JoinedLinear(linears, sizes, bias)

    return Ops(
        linear=make_linear,
        head=lambda weight: own_product(weight, None) or head_product(weight.dense(), None),
        experts=partial(_expert_kernels, device, switches),
        each_head=partial(FixedHeads, device=device) if switches.batch_invariant else BatchedHeads,
        kv_append=partial(kv_cache_kernel.append, sizes=cache_sizes) if switches.batched_kv_append else kv_cache.append,
        copy_blocks=partial(kv_cache_kernel.copy_blocks, sizes=cache_sizes),
        gated_norm=partial(gated_norm, device=device),
        gate_norm=partial(gate_norm, device=device),
        scale_and_cap_=sized(logits_kernel, "scale_and_cap_", device),
        **_mlp_ops(switches, device),
        **_norm_ops(switches, device, group),
        **_clip_ops(switches, device),
    )


def _where_invariant(
    fastest: Callable[[Tensor, Tensor | None], Any], device: Device
) -> Callable[[Tensor, Tensor | None], Any]:
    """The fastest products, or ours of fixed tiles for weights where the bits of those go by the number of rows."""
    from rosebatch_kernels.linear.invariant import FixedLinear, differing_rows

    differs: dict[Hashable, bool] = {}

    def product(dense: Tensor, bias: Tensor | None) -> Any:
        kind = dense.shape, dense.dtype, bias is None
        if kind not in differs:
            rows = differing_rows(fastest, dense, bias)
            if dense.is_cuda:
                # What the trial took is not the KV cache's to leave out.
                torch.cuda.empty_cache()
            differs[kind] = rows is not None
        return FixedLinear(dense, bias, device) if differs[kind] else fastest(dense, bias)

    return product


def _expert_kernels(device: Device, switches: Switches, layer: Experts) -> RoutedExperts:
    """Without a wait for the host: a step's graph holds them. The norm's kernel adds up the parts.

    With ``quantized_linear``, weights stay as they are if the kernel decodes their format.
    """
    from rosebatch_kernels.experts import kernel
    from rosebatch_kernels.experts.router import route
    from rosebatch_kernels.experts.sizes import SIZES

    biases = layer.gate_up_bias, layer.down_bias
    both, keeps = (layer.gate_up, layer.down), switches.quantized_linear and packed.can_decode(device)
    gate_up, down = ((weight.experts() if keeps else None) or weight.dense() for weight in both)
    choose = partial(route, k=layer.k, normalize=layer.normalize, choice=layer.choice, device=device)
    sizes = SIZES.of(device).invariant() if switches.batch_invariant else SIZES.of(device)
    parts = partial(kernel.parts, sizes=sizes, device=device)

    def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Partial:
        ids, weights = choose(logits)
        return Partial(parts(x, ids, weights, gate_up, down, *biases, layer.activation, shared))

    return run


def _mlp_ops(switches: Switches, device: Device) -> dict[str, Any]:
    """What follows the first product of an MLP: fused kernels, or PyTorch's operators."""
    if not switches.fused_mlp:
        return {}
    from rosebatch_kernels.mlp import kernel as mlp_kernel

    activations = {kind: sized(mlp_kernel, f"bias_{kind}_", device) for kind in ("gelu_erf", "gelu_tanh", "relu")}
    gates: dict[str, Callable[[Tensor], Tensor]] = {kind: sized(mlp_kernel, kind, device) for kind in mlp.GATED}
    fp8_gate: Callable[..., Tensor] | None = None
    if device.has_e4m3:
        from rosebatch_kernels.fp8 import quantize

        fp8_gate = sized(quantize, "gated", device)

    def activated(name: str, up: Linear, x: Tensor) -> Tensor:
        kind = ACTIVATIONS[name]
        if up.activates(x, kind):
            return up.activated(x, kind)
        out: Tensor = activations[kind](up.product(x), up.bias)
        return out

    def gated(kind: str, gate_up: Linear, x: Tensor, down: Linear) -> Tensor:
        if gate_up.activates(x, kind):
            return gate_up.activated(x, kind)
        if fp8_gate is None or down.input_group is None:
            return gates[kind](gate_up(x))
        return fp8_gate(gate_up(x), kind, down.input_group)

    return {"activated": activated, "gated": gated, "sigmoid_mul": sized(mlp_kernel, "sigmoid_mul", device)}


def whole_product(projection: Linear, x: Tensor) -> Partial:
    """The product, whose bias is left to the norm."""
    return Partial(projection.product(x), projection.bias)


def parts_or_product(projection: Linear, x: Tensor) -> Partial:
    """The product in parts if that is faster: the kernel of the norm sums them up."""
    if projection.divides(x):
        return Partial(projection.parts(x), projection.bias)
    return whole_product(projection, x)


def _product_for_norm(projection: Linear, x: Tensor) -> Partial:
    """The same, or without its scales if that is faster: the kernel of the norm applies them."""
    if projection.divides(x) or not projection.has_scales(x):
        return parts_or_product(projection, x)
    product, scales = projection.unscaled(x)
    return Partial(product, projection.bias, scales=scales)


def _biased_or_parts(projection: Linear, x: Tensor) -> Partial:
    """The same, but a bias is added by the product."""
    return _product_for_norm(projection, x) if projection.bias is None else Partial(projection(x))


def _in_place_or_parts(projection: Linear, x: Tensor) -> Partial:
    """The same, but a product that is fastest when added to the residual in place is left to the norm."""
    return Partial(x, projection=projection) if projection.adds_in_place(x) else _product_for_norm(projection, x)


def _multiplied(partial: Partial) -> Partial:
    """With the product computed, if it was left to the norm."""
    return partial if partial.projection is None else whole_product(partial.projection, partial.value)


def _norm_ops(switches: Switches, device: Device, group: int | None) -> dict[str, Any]:
    """LayerNorm and RMSNorm, and how a sub-layer's result reaches them.

    With ``group``, norms leave the fp8 form of their results; see ``rosebatch_kernels.fp8.carried``.
    With both ``fused_norm`` and ``fused_mlp``, the norm's kernel adds a bias; with ``fused_mlp`` alone, one of the
    MLP's does; else the product.
    """
    if switches.fused_norm:
        from rosebatch_kernels.norm import kernel

        def norm_kernel(name: str) -> Callable[..., Any]:
            operator = sized(kernel, name, device)
            return operator if group is None else partial(operator, group=group)

        rms_norm, add_norm = norm_kernel("rms_norm"), norm_kernel("add_rms_norm")

        def of_partial(operator: Callable[..., Any]) -> Callable[..., Any]:

            # Options stand between the residual and the bias.
            def added(partial: Partial, residual: Tensor, *options: Any, **named: Any) -> Any:
                partial = _multiplied(partial)
                each = partial.value, residual, *options, partial.bias, partial.all_reduce
                return operator(*each, scales=partial.scales, **named)

            return added

        def add_rms_norm(
            partial: Partial, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, overwrite: bool = False
        ) -> tuple[Tensor, Tensor]:
            product = partial.projection
            if product is not None and overwrite and scale == 1.0:
                total = product.add_(partial.value, residual)
                return rms_norm(total, weight, eps), total
            partial = _multiplied(partial)
            each = partial.value, residual, weight, eps, partial.bias, scale, partial.all_reduce
            out: tuple[Tensor, Tensor] = add_norm(*each, scales=partial.scales)
            return out

        return {
            "fuses_all_reduce": True,
            "project": _in_place_or_parts if switches.fused_mlp else _biased_or_parts,
            "layer_norm": norm_kernel("layer_norm"),
            "rms_norm": rms_norm,
            "add_rms_norm": add_rms_norm,
            "add": of_partial(sized(kernel, "add", device)),
            **{name: of_partial(norm_kernel(name)) for name in ("add_layer_norm", "add_post_norm")},
        }
    if not switches.fused_mlp:
        return {}
    from rosebatch_kernels.mlp import kernel as mlp_kernel

    bias_residual_ = sized(mlp_kernel, "bias_residual_", device)

    def add_bias_then_layer_norm(
        partial: Partial, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if partial.bias is None:
            return norm.add_layer_norm(partial.value, residual, weight, bias, eps)
        total = bias_residual_(residual, partial.value, partial.bias)
        return norm.layer_norm(total, weight, bias, eps), total

    def add_bias_then_rms_norm(
        partial: Partial, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        if partial.bias is None or scale != 1.0:
            return norm.add_rms_norm(partial.value, residual, weight, eps, partial.bias, scale)
        total = bias_residual_(residual, partial.value, partial.bias)
        return norm.rms_norm(total, weight, eps), total

    return {
        "project": whole_product,
        "add_layer_norm": add_bias_then_layer_norm,
        "add_rms_norm": add_bias_then_rms_norm,
    }


def _clip_ops(switches: Switches, device: Device) -> dict[str, Any]:
    """Clips in place of norms: two and the addition in one kernel, or apart; PyTorch without ``fused_norm``."""
    uclip_norm, add_uclip_norm = uclip.uclip_norm, uclip.add_uclip_norm
    if switches.fused_norm:
        from rosebatch_kernels.uclip import kernel

        uclip_norm, add_uclip_norm = (sized(kernel, name, device) for name in ("uclip_norm", "add_uclip_norm"))

    def apart(
        partial: Partial, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
    ) -> tuple[Tensor, Tensor]:
        total = residual + uclip_norm(partial.value, post_alpha, post_gamma)
        return uclip_norm(total, alpha, gamma), total

    def fused(partial: Partial, residual: Tensor, *norms: Any) -> Any:
        return add_uclip_norm(partial.value, residual, *norms)

    in_parts = switches.fused_norm and switches.fused_peri_norm
    return {
        "uclip_norm": uclip_norm,
        "project_to_clip": parts_or_product if in_parts else whole_product,
        "add_uclip_norm": fused if switches.fused_peri_norm else apart,
    }
