"""A network of transformers' that calls our attention: how it is built and run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rosebatch.model.contract import ImageRows
from rosebatch.model.fallback.attention import NAME, UnservedError, attending, running
from rosebatch.model.fallback.attention import register as register_attention
from rosebatch.model.fallback.experts import register as register_experts
from rosebatch.model.fallback.trial import Layers, PerToken, describe_mask, find_layers
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec

_SERVED_TYPES = {"full_attention", "sliding_attention", "attention"}


def build_network(config: Any, dtype: torch.dtype, device: torch.device) -> Module:
    """The causal language model of a transformers config with random weights; on ``meta`` without any.

    Raises:
        UnservedError: transformers has none for this config.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnservedError("it has an encoder")
    kind = network_class(config)
    with torch.device(device):
        network = kind._from_config(config, dtype=dtype, **our_functions())
    return require_decoder(network)


def network_class(config: Any) -> Any:
    """transformers' class of a causal language model, or of one that sees.

    Raises:
        UnservedError: transformers has none for this config.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    for known in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    text = config.get_text_config(decoder=True)
    part = "" if text is config else f" with a text part of type {text.model_type}"
    raise UnservedError(f"transformers has no causal language model of type {config.model_type}{part}")


def our_functions() -> dict[str, str]:
    """Make our functions known to transformers; returns the options that choose them for a network."""
    register_attention(describe_mask)
    register_experts()
    return {"attn_implementation": NAME, "experts_implementation": NAME}


def require_decoder(network: Any) -> Module:
    """The network, unless it is more than a decoder.

    Raises:
        UnservedError: it is.
    """
    if getattr(network.config, "is_encoder_decoder", False):
        raise UnservedError("it has an encoder")
    for module in network.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It would read token ids on the host.
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    decoder: Module = network.eval().requires_grad_(False)
    return decoder


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


def require_agreement(text_config: Any, specs: Sequence[PagedAttentionSpec], max_model_len: int) -> None:
    """Refuse models whose masks have no window though the cache of transformers goes by one.

    Raises:
        UnservedError: so it is; transformers' own tokens then depend on where the prompt ends.
    """
    window = getattr(text_config, "sliding_window", None)
    by_layer = getattr(text_config, "layer_types", None) is not None or any(spec.window for spec in specs)
    if window and window < max_model_len and not by_layer:
        raise UnservedError(f"its config has a window of {window}, its masks have none")


def fix_rope(network: Any, max_model_len: int) -> None:
    """Keep rotary frequencies as they are; to change some, transformers would read positions on the host.

    The kind ``dynamic`` changes them past the model's own length only.

    Raises:
        UnservedError: sequences may be longer than that.
    """
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "longrope" and max_model_len > (limit := _trained_length(module.config)):
                raise UnservedError(f"rotary positions of type {kind} change: give --max-model-len {limit} or less")
        if kinds is not None:
            module.rope_type = "default" if not isinstance(kinds, dict) else dict.fromkeys(kinds, "default")


def _trained_length(config: Any) -> int:
    length: int = config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return length


class Decoder:
    """A network whose layers and output projection run apart.

    Raises:
        UnservedError: a layer cannot be served.

    Attributes:
        layers: see ``find_layers``.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.layers = find_layers(network)

    def some_ids(self, count: int, device: torch.device) -> Tensor:
        """Ids ``[count]`` for a trial run; a vocabulary may be smaller."""
        vocab_size: int = self.network.config.get_text_config(decoder=True).vocab_size
        return torch.arange(count, device=device) % vocab_size

    def hidden(self, input_ids: Tensor, positions: Tensor, images: ImageRows | None = None) -> Tensor:
        """Hidden states ``[T, H]`` of ids ``[T]``; vectors of images take the place of embeddings.

        Positions are ``[T]``, or ``[T, 3]`` of time, height and width.
        """
        position_ids = positions[None] if positions.ndim == 1 else positions.t()[:, None]
        with nullcontext() if images is None else self._embedding(images):
            out = self.layers.body(input_ids=input_ids[None], position_ids=position_ids, use_cache=False)
        hidden: Tensor = out[0]
        return hidden[0]

    @contextmanager
    def _embedding(self, images: ImageRows) -> Iterator[None]:
        """Meanwhile, the table of embeddings has these vectors in these rows."""
        (vectors,) = images.vectors

        def put(module: Module, args: Any, embedded: Tensor) -> Tensor:
            return embedded.index_copy(1, images.rows, vectors[None].to(embedded.dtype))

        hook = self.network.get_input_embeddings().register_forward_hook(put)
        try:
            yield
        finally:
            hook.remove()

    def hidden_per_token(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The same with every token by itself, for checks."""
        with torch.no_grad(), running(attending(self.layers.specs, PerToken(positions))):
            return self.hidden(input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of ``hidden [S, H]``: the network computes them with these in place of its layers' own."""
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _in_place_of_body(self.layers, hidden):
            logits: Tensor = self.network(input_ids=ids, use_cache=False).logits
        return logits[0]


@contextmanager
def _in_place_of_body(layers: Layers, hidden: Tensor) -> Iterator[None]:
    out = (hidden[None],) if layers.output is tuple else layers.output(last_hidden_state=hidden[None])
    layers.body.forward = lambda *args, **options: out
    try:
        yield
    finally:
        del layers.body.forward
