"""Parts of transformers' networks that our operators can compute: found by name, believed by their numbers.

A part is tried on the input that the module got in a trial run. It counts only if it returns what the module returned.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.ops.ops import GATES, HeadRMSNorm, Linear, Ops, QKNorm, WholeRMSNorm

# Most relative difference to what a module returned, by dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_QK_NORMS = ("q_norm", "k_norm")
_EPS = ("variance_epsilon", "eps", "epsilon")


class Norm(NamedTuple):
    """An RMSNorm: its weight ``[H]``, in fp32 where one is added to it."""

    weight: Tensor
    eps: float


class GatedMLP(NamedTuple):
    """``down(activation(gate(x)) · up(x))``; ``kind`` as ``Ops.gated`` has it."""

    kind: str
    gate_up: Linear
    down: Linear


class Seen(NamedTuple):
    """What a module got and returned in a trial run."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Any


def agrees(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return found.shape == expected.shape and _error(found, expected) <= _TOLERANCE[expected.dtype]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def fused(linears: Sequence[Module], ops: Ops) -> Linear | None:
    """Several projections of one input as a single product, which then holds their weights; None for other modules."""
    plain = [module for module in linears if type(module) is nn.Linear]
    if len(plain) < len(linears) or len({(m.in_features, m.weight.dtype, m.bias is None) for m in plain}) != 1:
        return None
    weight, sizes = plain[0].weight, [module.out_features for module in plain]
    if len(plain) > 1:
        weight = nn.Parameter(torch.cat([module.weight for module in plain]), requires_grad=False)
        for module, part in zip(plain, weight.split(sizes), strict=True):
            # The same memory: nothing is held twice.
            module.weight = nn.Parameter(part, requires_grad=False)
    bias = None if plain[0].bias is None else torch.cat([module.bias for module in plain])
    return ops.linear(DenseWeight.of(weight.detach()), bias)


def find_norm(module: Module, seen: Seen | None, ops: Ops) -> Norm | None:
    """The RMSNorm that a module computes, if it is one."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    if seen is None or eps is None or not isinstance(weight, Tensor) or weight.ndim != 1 or len(seen.args) != 1:
        return None
    (x,) = seen.args
    if not isinstance(x, Tensor) or x.shape[-1] != len(weight) or list(module.parameters(recurse=False)) != [weight]:
        return None
    # As Llama has it, with an fp32 weight that rounds once, and as Gemma has it.
    for each in (weight.detach(), weight.detach().float(), 1 + weight.detach().float()):
        if agrees(rms_norm(Norm(each, eps), x, ops), seen.out):
            return Norm(each, eps)
    return None


def rms_norm(norm: Norm, x: Tensor, ops: Ops) -> Tensor:
    """Of ``x [..., H]``."""
    return ops.rms_norm(x.reshape(-1, x.shape[-1]), norm.weight, norm.eps).view(x.shape)


def find_gated_mlp(module: Module, seen: Seen | None, ops: Ops) -> GatedMLP | None:
    """The gated MLP that a module computes, if it is one."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if seen is None or not isinstance(seen.out, Tensor) or any(type(part) is not nn.Linear for part in parts):
        return None
    gate, up, down = (part for part in parts if part is not None)
    (x,) = seen.args
    outs = {kind: down(_ACTIVATIONS[kind](gate(x)) * up(x)) for kind in dict.fromkeys(GATES.values())}
    likely = [kind for kind, out in outs.items() if agrees(out, seen.out)]
    if not likely:
        return None
    # The two forms of GELU may differ by less than rounding; the module's own gives the same bits.
    kind = min(likely, key=lambda kind: _error(outs[kind], seen.out))
    gate_up, last = fused([gate, up], ops), fused([down], ops)
    return None if gate_up is None or last is None else GatedMLP(kind, gate_up, last)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": nn.functional.silu,
    "relu_mul": nn.functional.relu,
    "gelu_erf_mul": nn.functional.gelu,
    "gelu_tanh_mul": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def find_qk_norm(module: Module, seen: dict[Module, Seen], head_dim: int, ops: Ops) -> QKNorm | None:
    """How an attention module may normalise q and k; None for not at all."""
    norms = [find_norm(each, seen.get(each), ops) for name, each in module.named_children() if name in _QK_NORMS]
    q, k = norms if len(norms) == 2 else (None, None)
    if q is None or k is None or q.eps != k.eps:
        return None
    kind = HeadRMSNorm if len(q.weight) == head_dim else WholeRMSNorm
    return kind(q.weight, k.weight, q.eps)
