"""PyTorch reference of a mixture of experts. Each token goes through k of E MLPs; their results are summed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.cpu_activations import gelu_tanh, silu

# Clamped SwiGLU of gpt-oss: the slope of its logistic and the bound of its inputs.
SLOPE, LIMIT = 1.702, 7.0


class Choice(NamedTuple):
    """How a router chooses, beside the largest logits, and weighs what it chose.

    Attributes:
        sigmoid: whether scores are sigmoids of the logits (DeepSeek V3, arXiv 2412.19437), or shares of a softmax.
        bias: ``[E]`` fp32, added to the scores for the choice alone; None for none.
        groups: neighbouring experts are in so many groups, of one size.
        kept: so many groups are kept, and experts are chosen of these: the groups with the largest score of an expert
            (DeepSeek V2, arXiv 2405.04434), with ``sigmoid`` the largest sum of the two best.
        scale: factor on the weights.
        factors: ``[E]`` fp32, a further one of each expert (Gemma 4); None for none.
        sum_eps: added to a sum of sigmoids before the weights are divided by it.
    """

    sigmoid: bool = False
    bias: Tensor | None = None
    groups: int = 1
    kept: int = 1
    scale: float = 1.0
    factors: Tensor | None = None
    sum_eps: float = 1e-20


LARGEST = Choice()


def route(logits: Tensor, k: int, *, normalize: bool, choice: Choice = LARGEST) -> tuple[Tensor, Tensor]:
    """The k experts of each token, largest logit first; of equal logits, the lowest id first.

    Args:
        logits: ``[T, E]``, a bias of the router included.
        k: experts of a token.
        normalize: whether the weights are a softmax over the chosen experts (their sum is 1: Mixtral, gpt-oss,
            ``norm_topk_prob``), or the chosen experts' share of a softmax over all (Qwen2-MoE). Of sigmoids, whether
            they are divided by their sum.
        choice: what is chosen instead of the largest logits.

    Returns:
        Ids ``[T, k]`` int32 and weights ``[T, k]`` fp32.
    """
    wide = logits.float()
    # By exp: unlike PyTorch's sigmoid, it gives the same bits at any place in a tensor.
    scores = 1 / (1 + torch.exp(-wide)) if choice.sigmoid else wide
    ranks = scores if choice.bias is None else scores + choice.bias
    if choice.groups > 1:
        grouped = ranks.unflatten(1, (choice.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1) if choice.sigmoid else grouped.amax(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : choice.kept]
        others = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        ranks = grouped.masked_fill(others[..., None], float("-inf")).flatten(1)
    ids = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if not choice.sigmoid:
        weights = wide.gather(1, ids).softmax(-1) if normalize else wide.softmax(-1).gather(1, ids)
    else:
        weights = scores.gather(1, ids)
        if normalize:
            # One after the other: a sum's order might go by the number of tokens.
            weights = weights / (weights.cumsum(1)[:, -1:] + choice.sum_eps)
    if choice.factors is not None:
        weights = weights * choice.factors[ids]
    return ids.int(), weights.contiguous() if choice.scale == 1 else weights * choice.scale


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs (token, slot) of ``ids [T, k]``, numbered ``token · k + slot``, ordered by expert, then by number.

    Returns:
        Pair numbers ``[T · k]`` int32, and each expert's first place in them ``[E]`` int32.
    """
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=num_experts)
    return flat.argsort(stable=True).int(), (counts.cumsum(0) - counts).int()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``."""
    return silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu_tanh(gate) · up``."""
    return gelu_tanh(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: ``g · logistic(SLOPE · g) · (u + 1)``, where g is at most ``LIMIT`` and u within ``±LIMIT``.

    By exp: unlike PyTorch's sigmoid, it gives the same bits at any place in a tensor.
    """
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate / (1 + torch.exp(gate * -SLOPE)))


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "clamped_swiglu": clamped_swiglu,
}


def relu2(x: Tensor) -> Tensor:
    """``relu(x) ** 2``, of experts without a gate."""
    return functional.relu(x).square_()


def activated(name: str, inner: Tensor) -> Tensor:
    """``[n, I]`` of an expert's first product: ``[n, 2 · I]``, the gate first, or ``[n, I]`` with ``relu2``."""
    return relu2(inner) if name == "relu2" else GATED[name](*inner.chunk(2, -1))


def parts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu_mul",
    shared: Tensor | None = None,
) -> Tensor:
    """The weighted result of each token's experts, ``[k, T, H]`` fp32, which the reader adds up.

    Args:
        x: ``[T, H]``.
        ids, weights: ``[T, k]``, from ``route``.
        gate_up: ``[E, 2 · I, H]``, the gate's rows first; ``[E, I, H]`` with ``relu2``.
        down: ``[E, H, I]``.
        gate_up_bias: ``[E, 2 · I]``, or ``[E, I]``.
        down_bias: ``[E, H]``.
        activation: a name of ``GATED``, or ``relu2``.
        shared: ``[T, H]``, a last part: what all tokens share.
    """
    last = ids.shape[1]
    out = torch.empty(last + (shared is not None), *x.shape, dtype=torch.float32, device=x.device)
    if shared is not None:
        out[last] = shared
    for expert in ids.unique().tolist():
        tokens, slots = torch.where(ids == expert)
        inner = functional.linear(x[tokens], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        hidden = activated(activation, inner)
        result = functional.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        out[slots, tokens] = result.float() * weights[tokens, slots, None]
    return out


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``parts [k, T, H]`` in their order: ``[T, H]``."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)
