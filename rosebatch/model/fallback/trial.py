"""A trial run of a network: what its attention layers are, and which of its modules its layers are in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from rosebatch.config.switches import Switches
from rosebatch.model.fallback.attention import NAME, TRIAL, Call, Step, UnservedError, attend, describe, running
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.ops.select import select

# Norms and rotations of a trial run: PyTorch's operators, on every device.
_split_heads = select(Switches(), "cpu").split_heads

# Tokens of a trial run.
TOKENS = 4
# Queries beyond the longest sliding window of any model.
_FAR = 2**18


class Layers(NamedTuple):
    """What a trial run finds.

    Attributes:
        body: the module that makes hidden states of token ids; what follows are logits.
        output: the class of what it returns.
        specs: the attention of each layer, in order.
        modules: that called the attention function, in the same order.
        idle: names of parts of ``body`` that a text does not reach, such as towers.
    """

    body: Module
    output: type
    specs: list[PagedAttentionSpec]
    modules: list[Module]
    idle: list[str]


def find_layers(network: Module) -> Layers:
    """Run a network with masks that are descriptions; afterwards it runs without masks.

    Raises:
        UnservedError: a layer cannot be served, or none calls the attention function.
    """
    names = {module: name for name, module in network.named_modules()}
    specs: list[PagedAttentionSpec] = []
    modules: list[Module] = []
    entered: list[Module] = []
    outputs: list[tuple[type, int]] = []

    def find(call: Call) -> Tensor:
        try:
            specs.append(describe(call, len(specs)))
        except UnservedError as error:
            raise UnservedError(f"{names.get(call.module, 'a layer')} {error}") from None
        modules.append(call.module)
        return attend(specs[-1], call, PerToken(ids[0]))

    def enter(module: Module, *_: Any) -> None:
        if not entered:
            hooks.append(module.register_forward_hook(lambda _, __, out: outputs.append((type(out), len(specs)))))
        entered.append(module)

    hooks = [module.register_forward_pre_hook(enter) for module in names if module is not network]
    ids = torch.arange(TOKENS, device=next(network.parameters()).device)[None]
    try:
        _choose(network, TRIAL)
        with torch.no_grad(), running(Step(find)):
            network(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        place = names[entered[-1]] if entered else "the model"
        reason = "it needs values of tensors" if "meta tensor" in str(error) else " ".join(str(error).split())
        raise UnservedError(f"a trial run without weights fails in or after {place}: {reason}") from error
    finally:
        _choose(network, NAME)
        for hook in hooks:
            hook.remove()
    if not specs:
        raise UnservedError("its attention does not go through transformers' attention interface")
    if [count for _, count in outputs] != [len(specs)]:
        raise UnservedError("its layers and its output projection are not apart")
    reached = set(entered)
    idle = [name for name, part in entered[0].named_children() if reached.isdisjoint(part.modules())]
    return Layers(entered[0], outputs[0][0], specs, modules, idle)


class PerToken:
    """In place of attention: each token depends on itself only, but on all of its q, k and v.

    Args:
        positions: of the tokens, for layers whose spec rotates.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __call__(self, spec: PagedAttentionSpec, qkv: Tensor) -> Tensor:
        """See ``rosebatch.model.contract.Attention``."""
        q, k, v = self.heads(spec, qkv)
        return (q + (k + v).repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)).flatten(1)

    def heads(self, spec: PagedAttentionSpec, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normed and rotated as the spec says."""
        turned = None
        if spec.rotary is not None:
            turned = spec.rotary.cos[self.positions][:, None], spec.rotary.sin[self.positions][:, None]
        q, k, v = _split_heads(qkv, spec.num_heads, spec.num_kv_heads, turned, spec.qk_norm)
        return q, k, v


def describe_mask(q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    """In place of a mask: an empty tensor that carries the window, so that the layers that get it can be distinguished.

    Raises:
        UnservedError: it is neither causal nor a sliding window.
    """
    keys = torch.arange(_FAR + 1)
    windows = []
    for query in (_FAR - 1, _FAR):
        try:
            seen = torch.as_tensor(mask_function(0, 0, torch.tensor(query), keys)).expand(keys.shape)
        except RuntimeError:
            raise UnservedError("its masks depend on the input") from None
        windows.append(int(seen.sum()))
        if bool(seen[query + 1 :].any()) or not bool(seen[query + 1 - windows[-1] : query + 1].all()):
            raise UnservedError("its masks are neither causal nor sliding windows")
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    if windows == [_FAR, _FAR + 1]:
        mask.rosebatch_window = 0  # type: ignore[attr-defined]
    elif windows[0] == windows[1]:
        mask.rosebatch_window = windows[0]  # type: ignore[attr-defined]
    else:
        raise UnservedError("its masks are neither causal nor sliding windows")
    return mask


def _choose(network: Module, name: str) -> None:
    """Have all parts of a network call the attention function of this name."""
    for module in network.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = name
