"""A head of EAGLE-3 in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rosebatch.host.model_files import refusal, shown
from rosebatch.model.contract import OpenModel
from rosebatch.model.dry_load import HEADERS, NO_PRODUCTS
from rosebatch.model.eagle3.config import LAYERS, Eagle3
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.rope import Rotary, rope_tables
from rosebatch.model.sublayers import MLP, load_gated_mlp, load_linear
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.ops import Linear, Ops


class Eagle3Head:
    """The head in memory. A row is a token and the state before it: what the model left of all tokens in front.

    Args:
        config: of the head.
        target: the model.
        ops: the operators of this run.
        weights: of the head.

    Attributes:
        layers, planes, draft_weights: see ``Eagle3``.
    """

    def __init__(self, config: Eagle3, target: OpenModel, ops: Ops, weights: SafetensorsWeights) -> None:
        c, self._ops, self.layers, self.planes = config.shape, ops, config.layers, config.planes
        self.draft_weights = config.draft_weights
        self._shape, self._norms_residual = c, config.norms_residual
        size, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        layer = "model.midlayer." if any("midlayer." in name for name in weights.names()) else "model.layers.0."

        def norm(name: str) -> Tensor:
            return weights.get(f"{name}.weight", (size,))

        self._embedding = _load_embedding(config, target, weights)
        self._fc = load_linear(ops, weights, ["model.fc"], (size,), LAYERS * config.target_size, bias=config.fc_bias)
        self._embedding_norm, self._hidden_norm = norm(f"{layer}input_layernorm"), norm(f"{layer}hidden_norm")
        names = [f"{layer}self_attn.{each}_proj" for each in "qkv"]
        self._qkv: Linear = load_linear(ops, weights, names, (q, kv, kv), 2 * size, bias=c.qkv_bias)
        self._out: Linear = load_linear(ops, weights, [f"{layer}self_attn.o_proj"], (size,), q, bias=c.out_bias)
        self._mlp_norm, self._norm = norm(f"{layer}post_attention_layernorm"), norm("model.norm")
        names = [f"{layer}mlp.{each}_proj" for each in ("gate", "up")]
        self._mlp: MLP = load_gated_mlp(c, ops, weights, names, f"{layer}mlp.down_proj")
        self._logits = _load_logits(config, target, ops, weights, self._embedding)
        self._token_ids = _load_token_ids(config, weights)
        assert c.rope is not None, "its positions are rotary"
        self._rotary: Rotary = rope_tables(
            c.rope, c.head_dim, c.max_model_len, self._embedding.dtype, self._embedding.device
        )
        if weights.unread:
            raise refusal(config.folder, f"a head for drafts has no place for tensor {shown(weights.unread[0])}")

    def combine(self, states: Tensor) -> Tensor:
        """``[T, H]`` of the model's states ``[T, 3 · target_size]`` of tokens: the states before their next ones."""
        return self._fc(states)

    def project(self, token_ids: Tensor, before: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[T, heads, D]``, k and v ``[T, kv_heads, D]`` of rows.

        Args:
            token_ids: ``[T]`` int64.
            before: ``[T, H]``, the state before each.
            positions: ``[T]`` int64, of the tokens.
        """
        c, ops = self._shape, self._ops
        embedded = ops.rms_norm(ops.embed(token_ids, self._embedding, c.vocab_size), self._embedding_norm, c.norm_eps)
        normed = ops.rms_norm(before, self._hidden_norm, c.norm_eps)
        cos, sin = self._rotary.of_rows(positions)
        qkv = self._qkv(torch.cat((embedded, normed), -1))
        return ops.split_heads(qkv, c.num_heads, c.num_kv_heads, (cos[:, None], sin[:, None]))

    def finish(self, before: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' guesses ``[T]`` int64, tokens of the model, and ``[T, H]``, the states before these.

        Args:
            before: ``[T, H]``, the state before each token.
            attended: ``[T, heads · D]``.
        """
        c, ops = self._shape, self._ops
        if self._norms_residual:
            before = ops.rms_norm(before, self._hidden_norm, c.norm_eps)
        normed, residual = ops.add_rms_norm(ops.project(self._out, attended), before, self._mlp_norm, c.norm_eps)
        normed, hidden = ops.add_rms_norm(self._mlp(normed), residual, self._norm, c.norm_eps)
        guesses = self._logits(normed).argmax(-1)
        return guesses if self._token_ids is None else self._token_ids[guesses], hidden


def build_head(config: Eagle3, target: OpenModel, ops: Ops, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """Load the head of a model that is loaded, whose embedding and output projection it may share.

    Raises:
        UserError: a weight is missing, has the wrong shape, or no place.
    """
    with torch.inference_mode():
        return Eagle3Head(config, target, ops, SafetensorsWeights(config.folder, dtype, device))


def require_head_loadable(config: Eagle3) -> None:
    """Check what can be known of the weights without reading them.

    Raises:
        UserError: as ``build_head``.
    """
    build_head(config, _Unloaded(config), NO_PRODUCTS, torch.float32, HEADERS)


class _Unloaded:
    """A model of which only the sizes are known."""

    def __init__(self, config: Eagle3) -> None:
        self.embedding = torch.empty(config.shape.vocab_size, config.target_size, device=HEADERS)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model``."""
        raise AssertionError("there are no values")

    mixers = ()
    forward: Any = logits


def _load_embedding(config: Eagle3, target: OpenModel, weights: SafetensorsWeights) -> Tensor:
    """The head's own, or the model's: ``[V, H]``."""
    name, size = "model.embed_tokens.weight", config.shape.hidden_size
    if weights.shape(name) is not None:
        return weights.get(name, (config.shape.vocab_size, size))
    _require_size(config, "embed_tokens.weight")
    return target.embedding


def _load_logits(
    config: Eagle3, target: OpenModel, ops: Ops, weights: SafetensorsWeights, embedding: Tensor
) -> Callable[[Tensor], Tensor]:
    """``[T, draft_vocab_size]`` of normed states ``[T, H]``: the head's own product, or the model's."""
    name, shape = "lm_head.weight", config.shape
    if weights.shape(name) is not None:
        return ops.head(DenseWeight.of(weights.get(name, (config.draft_vocab_size, shape.hidden_size))))
    if config.draft_vocab_size != shape.vocab_size:
        count = f"{config.draft_vocab_size} of {shape.vocab_size} tokens"
        raise refusal(config.folder, f"weights have no tensor {name!r}, for {count}")
    if shape.tie_word_embeddings:
        return ops.head(DenseWeight.of(embedding))
    _require_size(config, name)
    return target.logits


def _require_size(config: Eagle3, name: str) -> None:
    size = config.shape.hidden_size
    if size != config.target_size:
        sizes = f"{size} numbers of a state, and that of --model is for {config.target_size}"
        raise refusal(config.folder, f"weights have no tensor {name!r}: the head has {sizes}")


def _load_token_ids(config: Eagle3, weights: SafetensorsWeights) -> Tensor | None:
    """The model's token for each that the head may guess, ``[draft_vocab_size]`` int64; None if they are the same.

    ``d2t`` has the differences, and ``t2d`` says of each token of the model whether it may be guessed.
    """
    count, vocab_size = config.draft_vocab_size, config.shape.vocab_size
    of = f"{count} of {vocab_size} tokens"
    has_ids, has_mask = (weights.shape(each) is not None for each in ("model.d2t", "model.t2d"))
    if not has_ids and count != vocab_size:
        raise refusal(config.folder, f"weights have no tensor 'd2t', for {of}")
    mask = weights.stored("model.t2d", (vocab_size,)).bool() if has_mask else None
    ids = torch.arange(count, device=weights.device)
    if has_ids:
        ids += weights.stored("model.d2t", (count,)).long()
    if not ids.is_meta:
        is_token = (ids >= 0) & (ids < vocab_size)
        drafted = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids[is_token], True)
        if int(drafted.sum()) != count:
            raise refusal(config.folder, f"tensor 'd2t' does not lead to {of}")
        if mask is not None and not torch.equal(mask, drafted):
            raise refusal(config.folder, "tensors 'd2t' and 't2d' disagree about the tokens that are drafted")
    return ids if has_ids else None
