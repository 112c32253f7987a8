"""A network of transformers' that calls our attention: how it is built, run, and what its attention layers are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rosebatch.model.fallback_attention import NAME, Call, UnservedError, answering, describe
from rosebatch.model.fallback_attention import register as register_attention
from rosebatch.model.fallback_experts import register as register_experts
from rosebatch.model.layers import AttentionSpec

# Tokens of a trial run.
_TOKENS = 4
_SERVED_TYPES = {"full_attention", "sliding_attention", "attention"}
# Kinds of rotary positions whose frequencies change with the longest sequence so far.
_CHANGING_ROPE = ("dynamic", "longrope")


def build_network(config: Any, dtype: torch.dtype, device: torch.device) -> Module:
    """The causal language model of a transformers config with random weights; on ``meta`` without any.

    Raises:
        UnservedError: transformers has none for this config.
    """
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, **our_functions())
    return require_decoder(network)


def our_functions() -> dict[str, str]:
    """Make our functions known to transformers; returns the options that choose them for a network."""
    register_attention()
    register_experts()
    return {"attn_implementation": NAME, "experts_implementation": NAME}


def require_decoder(network: Module) -> Module:
    """The network, unless it is more than a decoder.

    Raises:
        UnservedError: it is.
    """
    if getattr(network.config, "is_encoder_decoder", False):
        raise UnservedError("it has an encoder")
    if network.base_model is network:
        raise UnservedError("its layers and its output projection are not apart")
    return network.eval().requires_grad_(False)


def require_layer_types(text_config: Any, max_model_len: int) -> None:
    """Refuse layers that are known from the config not to be served.

    Raises:
        UnservedError: there is one.
    """
    for layer, kind in enumerate(getattr(text_config, "layer_types", None) or ()):
        if kind == "chunked_attention" and max_model_len <= (getattr(text_config, "attention_chunk_size", 0) or 0):
            continue
        if kind not in _SERVED_TYPES:
            raise UnservedError(f"layer {layer} is of type {kind}")


def fix_rope(network: Module, max_model_len: int) -> None:
    """Keep rotary frequencies as they are within the original length; transformers would read positions on the host.

    Raises:
        UnservedError: sequences may be longer than that.
    """
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind is None or not any(name in kind for name in _CHANGING_ROPE):
                continue
            rope = module.config.rope_parameters
            most = rope.get("original_max_position_embeddings") or getattr(module, "original_max_seq_len", 0)
            if max_model_len > most:
                raise UnservedError(f"rotary positions of type {kind} change: give --max-model-len {most} or less")
            module.rope_type = "default" if not isinstance(kinds, dict) else dict.fromkeys(kinds, "default")


def run(network: Module, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Hidden states ``[T, H]`` of ids and positions ``[T]``."""
    out = network.base_model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
    hidden: Tensor = out[0]
    return hidden[0]


def find_attention(network: Module) -> tuple[list[AttentionSpec], list[str]]:
    """What a trial run says of each layer's attention, and the names of the modules.

    Raises:
        UnservedError: a layer cannot be served, or none calls the attention function.
    """
    names = {id(module): name for name, module in network.named_modules()}
    specs: list[AttentionSpec] = []
    found: list[str] = []

    def answer(call: Call) -> Tensor:
        name = names.get(id(call.module), "?")
        try:
            specs.append(describe(call, len(specs)))
        except UnservedError as error:
            raise UnservedError(f"{name} {error}") from None
        found.append(name)
        return per_token(call)

    device = next(network.parameters()).device
    ids = torch.arange(_TOKENS, device=device)
    with torch.no_grad(), answering(answer):
        run(network, ids, ids)
    if not specs:
        raise UnservedError("its attention does not go through transformers' attention interface")
    return specs, found


def per_token(call: Call) -> Tensor:
    """An answer that makes each token depend on itself only, but on all of its q, k and v."""
    q, k, v = call.q, call.k, call.v
    group, channels = q.shape[1] // k.shape[1], v.shape[3]
    out = q[..., :channels] + k[..., :channels].repeat_interleave(group, 1) + v.repeat_interleave(group, 1)
    return out.transpose(1, 2).to(v.dtype)


class Head:
    """The network behind its layers: output projection, and what it does to logits.

    The network itself computes it, with the hidden states in place of its layers.
    """

    def __init__(self, network: Module) -> None:
        self.network = network

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of ``hidden [S, H]``."""
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _in_place_of_layers(self.network, hidden):
            logits: Tensor = self.network(input_ids=ids, use_cache=False).logits
        return logits[0]


@contextmanager
def _in_place_of_layers(network: Module, hidden: Tensor) -> Iterator[None]:
    from transformers.modeling_outputs import MoeModelOutputWithPast

    base = network.base_model
    base.forward = lambda *args, **options: MoeModelOutputWithPast(last_hidden_state=hidden[None])
    try:
        yield
    finally:
        del base.forward
