"""Mixtures of experts: a router, the experts that it chooses for each token, and one for all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config.model import ModelConfig
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.forms import changed, is_stored, load_matrix, load_weight, rounded
from rosebatch.model.quantization.joined import joined
from rosebatch.model.sublayers import columns, load_linear
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import EXPERT_GATES, GATES, Choice, Experts, Linear, Ops, Partial, RoutedExperts
from rosebatch.ops.weight import Weight

# The router's rows are filled up to a multiple of this: cuBLAS is slow where results' rows begin at odd addresses.
_ROUTER_ROWS = 8


class ExpertNames(NamedTuple):
    """Names of a layer's tensors: the router, an expert's three matrices after ``expert.NUMBER``, a shared expert.

    With ``whole``, the matrices of all experts in one tensor have a name that begins with ``expert``, too. ``factors``
    are on the weights of what the router chose, one of each expert. ``bias`` is the correction of sigmoids, beside the
    router.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    whole: bool = False
    factors: str | None = None
    bias: str = "gate.e_score_correction_bias"


# The names that transformers 5 has in memory: the matrices of all experts in one tensor.
_WHOLE = ExpertNames()


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP whose result the routed experts add to theirs."""

    ops: Ops
    kind: str
    gate_up: Linear
    down: Linear

    def __call__(self, normed: Tensor, gate: Tensor | None) -> Tensor:
        """``[T, H] -> [T, H]``; ``gate [T, 1]`` before its sigmoid, or None."""
        out = self.down(self.ops.gated(self.kind, self.gate_up, normed, self.down))
        return out if gate is None else self.ops.sigmoid_mul(out, gate)


@dataclass(frozen=True, slots=True)
class ExpertsMLP:
    """Routed experts, and perhaps a shared one, in place of an MLP.

    Attributes:
        router: its first rows are the experts' logits, the next one the shared expert's gate.
        num_experts: E.
        routed, shared: the products.
        has_gate: whether the shared expert has one.
        wide: whether the router's product is in fp32.
    """

    router: Linear
    num_experts: int
    routed: RoutedExperts
    shared: SharedExpert | None = None
    has_gate: bool = False
    wide: bool = False

    def __call__(self, normed: Tensor, of_router: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.MLP``; ``of_router [T, H]`` is what the router reads, if not the same."""
        of_router = normed if of_router is None else of_router
        logits = self.router(of_router.float() if self.wide else of_router)
        shared = None
        if self.shared is not None:
            gate = logits[:, self.num_experts : self.num_experts + 1] if self.has_gate else None
            shared = self.shared(normed, gate)
        return self.routed(normed, logits[:, : self.num_experts], shared)


def load_experts(
    config: ModelConfig, ops: Ops, weights: WeightSource, prefix: str, names: ExpertNames = _WHOLE
) -> ExpertsMLP:
    """The experts of the layer whose names begin with ``prefix``, each expert apart or all in one tensor."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None, "the layer has experts"
    inner, own = experts.expert_size, ops.shard.of(experts.expert_size)
    shape = experts.num_experts, hidden
    wide = torch.float32 if experts.wide_router else None
    name = f"{prefix}{names.router}"
    name = name if is_stored(weights, f"{name}.weight", shape) else f"{prefix}{_WHOLE.router}"
    bias = None
    if experts.sigmoid:
        beside = name.rpartition(".")[0]
        bias = weights.get(f"{beside}.{names.bias}", shape[:1], dtype=torch.float32, fill=0.0)
    factors = None
    if names.factors is not None:
        factors = weights.get(f"{prefix}{names.factors}", shape[:1], dtype=torch.float32, fill=1.0)
    gate_up = load_matrices(weights, prefix, names, (names.gate, names.up), "gate_up_proj", config, (inner, hidden))
    down = load_matrices(weights, prefix, names, (names.down,), "down_proj", config, (hidden, inner))
    routed = Experts(
        gate_up=gate_up.rows(columns((inner, own), (inner, own))),
        down=down.columns(own),
        activation=EXPERT_GATES[config.activation],
        k=experts.experts_per_token,
        normalize=experts.normalize,
        choice=Choice(
            experts.sigmoid,
            bias,
            experts.groups,
            experts.kept_groups,
            experts.weight_scale,
            factors,
            experts.sum_eps,
        ),
    )
    router = load_weight(weights, f"{name}.weight", shape, dtype=wide)
    if experts.shared_gate:
        router = joined([router, load_weight(weights, f"{prefix}mlp.shared_expert_gate.weight", (1, hidden))])
    return ExpertsMLP(
        router=make_router(ops, router),
        num_experts=experts.num_experts,
        routed=ops.experts(routed),
        shared=_load_shared(config, ops, weights, f"{prefix}{names.shared}.") if experts.shared_size else None,
        has_gate=experts.shared_gate,
        wide=experts.wide_router,
    )


def make_router(ops: Ops, weight: Weight, bias: Tensor | None = None) -> Linear:
    """The product with ``weight [E, H]``; further columns of its result have no meaning."""
    dense = weight.dense()
    missing = -len(dense) % _ROUTER_ROWS
    bias = None if bias is None else functional.pad(bias, (0, missing))
    return ops.linear(DenseWeight.of(functional.pad(dense, (0, 0, 0, missing))), bias)


def _load_shared(config: ModelConfig, ops: Ops, weights: WeightSource, own: str) -> SharedExpert:
    """The expert whose names begin with ``own``."""
    assert config.experts is not None
    size, hidden = config.experts.shared_size, config.hidden_size
    inner = ops.shard.of(size)
    gate_up_names, gate_up_own = [f"{own}gate_proj", f"{own}up_proj"], columns((size, inner), (size, inner))
    gate_up = load_linear(ops, weights, gate_up_names, (size, size), hidden, bias=False, own=gate_up_own)
    down = load_linear(ops, weights, [f"{own}down_proj"], (hidden,), size, bias=False, inputs=inner)
    return SharedExpert(ops, GATES[config.activation], gate_up, down)


def load_matrices(
    weights: WeightSource,
    prefix: str,
    names: ExpertNames,
    parts: Sequence[str],
    whole: str,
    config: ModelConfig,
    shape: tuple[int, int],
) -> Weight:
    """One matrix of all experts ``[E, rows, columns]``: ``parts`` of this ``shape``, one below the other.

    Random ones are a single tensor.
    """
    assert config.experts is not None
    (rows, width), count = shape, config.experts.num_experts
    of_all = (count, len(parts) * rows, width)
    name = f"{prefix}{names.expert if names.whole else _WHOLE.expert}.{whole}"
    if not is_stored(weights, f"{prefix}{names.expert}.0.{parts[0]}.weight", shape):
        # Qwen3-VL's files have them turned.
        turned = weights.shape(name) == (count, width, len(parts) * rows) != of_all
        return load_matrix(weights, name, of_all, transposed=turned)
    # An adapter changes them in one tensor, as transformers has them in memory, or each.
    change = weights.change(name, of_all)
    load = load_matrix if change is None else partial(load_weight, dtype=torch.float32)
    matrices = []
    for expert in range(count):
        own = f"{prefix}{names.expert}.{expert}."
        matrices.append(joined([load(weights, f"{own}{part}.weight", shape) for part in parts]))
    every = matrices[0].stack(matrices[1:])
    return every if change is None else rounded(weights, changed(change, every, weights.dtype))
