"""Attention as transformers' models call it: a function that they find by name, and the layer of a call."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec

# transformers builds no masks for a function that has no mask function of this name.
NAME = "rosebatch"
# The same function; transformers needs its descriptions of masks.
TRIAL = "rosebatch-trial"
# Options of a call that describe the layer, or change nothing here.
_KNOWN = {
    *("scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"),
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict", "labels", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
# The mixing of a run.
Attend = Callable[[PagedAttentionSpec, Tensor], Tensor]
_local = threading.local()


class UnservedError(Exception):
    """What a layer needs and the engine does not have, as the end of a sentence."""


class Call(NamedTuple):
    """One call of the attention function.

    Attributes:
        module: the layer's attention.
        q: ``[1, H, T, D]``, rotated.
        k, v: ``[1, K, T, D]`` and ``[1, K, T, D']``.
        mask: None; in a trial run a description.
        options: the other arguments.
    """

    module: Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    options: dict[str, Any]


def _none_is_fused(qkv: Tensor) -> Tensor:
    raise AssertionError("no layer is fused yet")


class Step(NamedTuple):
    """What answers the layers of one run of a network, in their order.

    Attributes:
        call: the attention of a call, ``[1, T, H, D']``.
        project: the attention ``[T, H · D]`` of a layer whose norms and rotation are in its spec, of ``qkv`` as
            projected.
    """

    call: Callable[[Call], Tensor]
    project: Callable[[Tensor], Tensor] = _none_is_fused


def attending(specs: Iterable[PagedAttentionSpec], attention: Attend) -> Step:
    """A run whose layers have these specs."""
    left = iter(specs)
    return Step(lambda call: attend(next(left), call, attention), lambda qkv: attention(next(left), qkv))


def register(describe_mask: Callable[..., Tensor]) -> None:
    """Make the function known to transformers; ``describe_mask`` makes the masks of trial runs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(TRIAL, _attend)
    AttentionMaskInterface.register(TRIAL, describe_mask)


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Answer the layers of networks that run in this thread."""
    before = getattr(_local, "step", None)
    _local.step = step
    try:
        yield
    finally:
        _local.step = before


def project(qkv: Tensor) -> Tensor:
    """See ``Step.project``: of the run in this thread."""
    out: Tensor = _local.step.project(qkv)
    return out


def _attend(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    return _local.step.call(Call(module, query, key, value, attention_mask, options)), None


def describe(call: Call, layer: int) -> PagedAttentionSpec:
    """The attention of a layer; q and k come normed and rotated.

    Raises:
        UnservedError: it is none that the engine has.
    """
    q, k, v, options = call.q, call.k, call.v, call.options
    unknown = [name for name, value in options.items() if value is not None and name not in _KNOWN]
    if unknown:
        raise UnservedError(f"needs {unknown[0]}")
    window = 0 if call.mask is None else _window(call.mask)
    if window is None:
        raise UnservedError("builds a mask of its own")
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnservedError("is not causal")
    tokens = q.shape[2]
    if len(q) != 1 or k.shape[2] != tokens or v.shape[2] != tokens:
        raise UnservedError("attends to something other than its own input")
    if k.shape[3] != q.shape[3] or v.shape[3] > q.shape[3] or v.shape[1] != k.shape[1] or q.shape[1] % k.shape[1]:
        raise UnservedError(f"has q, k and v of shapes {_heads(q)}, {_heads(k)} and {_heads(v)}")
    head_dim = q.shape[3]
    scale, sinks = options.get("scaling"), options.get("s_aux")
    if sinks is not None and sinks.numel() != q.shape[1]:
        raise UnservedError(f"has sinks of shape {list(sinks.shape)}")
    return PagedAttentionSpec(
        layer=layer,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=window,
        soft_cap=options.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.detach().reshape(-1),
    )


def _window(mask: Tensor) -> int | None:
    """The window of a mask that ``describe_mask`` made; layers that share keys get a slice of it. None for others."""
    found = getattr(mask, "rosebatch_window", None)
    return found if found is not None or mask._base is None else getattr(mask._base, "rosebatch_window", None)


def _heads(x: Tensor) -> list[int]:
    return [x.shape[1], x.shape[3]]


def attend(spec: PagedAttentionSpec, call: Call, attention: Attend) -> Tensor:
    """Answer a call with the engine's attention. Values of fewer channels than keys are padded with zeros."""
    dtype, missing = call.v.dtype, spec.head_dim - call.v.shape[3]
    v = functional.pad(call.v, (0, missing)) if missing else call.v
    tokens = v.shape[2]
    qkv = torch.cat([x[0].transpose(0, 1).to(dtype) for x in (call.q, call.k, v)], 1)
    out = attention(spec, qkv.view(tokens, -1)).view(1, tokens, spec.num_heads, spec.head_dim)
    return out[..., : call.v.shape[3]]
