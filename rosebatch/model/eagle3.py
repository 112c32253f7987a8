"""Heads of EAGLE-3: a decoder layer that guesses what a model says next, from the states between the model's layers.

Source: arXiv 2503.01840. Names of tensors and fields are those of its published heads, and of SGLang and vLLM.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.core.errors import UserError
from rosebatch.host.model_files import reachable, read_json, refusal, shown
from rosebatch.model.contract import OpenModel
from rosebatch.model.dry_load import HEADERS, NO_PRODUCTS
from rosebatch.model.hf.config import parse_model_config, require_config
from rosebatch.model.hub import find_snapshot, parse_hub_id
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.rope import Rotary, rope_tables
from rosebatch.model.sublayers import MLP, load_gated_mlp, load_linear
from rosebatch.model.weight_files import has_weight_files
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.ops import Linear, Ops

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# The way out for heads that are published so.
_PICKLED = "docs/speculation.md says how pytorch_model.bin becomes model.safetensors"
# Layers of the model whose states a head takes.
_LAYERS = 3
# Other forms of heads, and options that change what one computes.
_NOT_SERVED = ("quantization_config", "sliding_window", "norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")


@dataclass(frozen=True, slots=True)
class Eagle3:
    """A head that can be loaded.

    Attributes:
        folder: of ``config.json`` and weights.
        shape: of its layer, with the vocabulary of the model.
        target_size: of the model's hidden states.
        layers: of the model, counted from 0: the head takes the states before each of them.
        draft_vocab_size: tokens that it may guess.
        fc_bias: whether the first product has one.
        norms_residual: whether the layer's residual is normed too (``norm_before_residual``).
    """

    folder: Path
    shape: ModelConfig
    target_size: int
    layers: tuple[int, ...]
    draft_vocab_size: int
    fc_bias: bool
    norms_residual: bool

    @property
    def planes(self) -> tuple[Planes, ...]:
        """What is kept of each token: K and V, and what ``Eagle3Head.combine`` made of the model's states."""
        return Planes(self.shape.num_kv_heads, self.shape.head_dim, 2), Planes(1, self.shape.hidden_size)

    @property
    def num_weights(self) -> int:
        """Numbers in its weights; before there are any, without a table of embeddings of its own."""
        if has_weight_files(self.folder):
            weights = SafetensorsWeights(self.folder, torch.float32, HEADERS)
            return sum(math.prod(weights.shape(name) or ()) for name in weights.names())
        return self.draft_weights + self.shape.hidden_size * _LAYERS * self.target_size

    @property
    def draft_weights(self) -> int:
        """Numbers in the matrices that a draft is multiplied with."""
        c = self.shape
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return c.hidden_size * (2 * (q + 2 * kv) + q + 3 * c.intermediate_size + self.draft_vocab_size)

    def build(self, target: OpenModel, ops: Ops, dtype: torch.dtype, device: torch.device) -> "Eagle3Head":
        """Load the head of a model that is loaded, whose embedding and output projection it may share.

        Raises:
            UserError: a weight is missing, has the wrong shape, or no place.
        """
        with torch.inference_mode():
            return Eagle3Head(self, target, ops, SafetensorsWeights(self.folder, dtype, device))

    def require_loadable(self) -> None:
        """Check what can be known of the weights without reading them.

        Raises:
            UserError: as ``build``.
        """
        self.build(_Unloaded(self), NO_PRODUCTS, torch.float32, HEADERS)


def find_eagle3(name: str, target: ModelConfig, *, quiet: bool, weights: bool) -> Eagle3:
    """The head of ``--speculative-model``: a folder, or a Hugging Face id that is downloaded once.

    Args:
        name: of the folder or id.
        target: the model's shape.
        quiet: no download progress on stderr.
        weights: whether they are downloaded.

    Raises:
        UserError: it is missing, or see ``read_eagle3``.
    """
    with reachable(name):
        hub_model, path = parse_hub_id(name), Path(name).expanduser()
        if hub_model is not None:
            try:
                path = find_snapshot(hub_model, weights=weights, tokenizer=False, quiet=quiet)
            except UserError as error:
                raise UserError(f"--speculative-model {error}; {_PICKLED}") from None
        if not path.is_dir():
            kinds = "give a folder or a Hugging Face id (ORG/NAME)"
            raise UserError(f"--speculative-model {name}: no such folder; {kinds}")
    if (path / "pytorch_model.bin").exists() and not has_weight_files(path):
        raise refusal(path, f"pytorch_model.bin is not read, for it may run code; {_PICKLED}")
    return read_eagle3(path, target)


def read_eagle3(folder: Path, target: ModelConfig) -> Eagle3:
    """The head in a folder, for a model of this shape.

    Raises:
        UserError: ``config.json`` is missing or broken, of another kind of head, or of a head for another model.
    """
    path = require_config(folder)
    values = read_json(path)
    named = values.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in _ARCHITECTURES:
        kinds = " and ".join(_ARCHITECTURES)
        raise refusal(path, f"a head for drafts is one of EAGLE-3, architectures {kinds}; this one has {shown(named)}")
    for name in _NOT_SERVED:
        if value := values.get(name):
            raise refusal(path, f"{name} {shown(value)} is not supported in a head for drafts")
    if (count := values.get("num_hidden_layers", 1)) != 1:
        raise refusal(path, f"a head for drafts has one layer, num_hidden_layers is {shown(count)}")
    shape = parse_model_config({**values, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, str(path))
    if shape.rope is None or shape.rope.scaling == "longrope":
        raise refusal(path, "rope_type 'longrope' is not supported in a head for drafts")
    if shape.vocab_size != target.vocab_size:
        raise refusal(path, f"of a model with {shape.vocab_size} tokens, and --model has {target.vocab_size}")
    target_size = _number(values, "target_hidden_size", shape.hidden_size, path)
    if target_size != target.hidden_size:
        raise refusal(path, f"of a model with hidden size {target_size}, and that of --model is {target.hidden_size}")
    drafted = _number(values, "draft_vocab_size", shape.vocab_size, path)
    if drafted > shape.vocab_size:
        raise refusal(path, f"draft_vocab_size {drafted} is more than vocab_size {shape.vocab_size}")
    return Eagle3(
        folder,
        msgspec.structs.replace(shape, max_model_len=target.max_model_len),
        target_size,
        _layers(values, target.num_layers, path),
        drafted,
        fc_bias=bool(values.get("bias", False)),
        norms_residual=bool(values.get("norm_before_residual", False)),
    )


def _number(values: Mapping[str, Any], name: str, default: int, path: Path) -> int:
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise refusal(path, f"{name} must be a whole number > 0, got {shown(value)}")
    return value


def _layers(values: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Of the model: a low one, a middle one and a high one, unless the head names others.

    vLLM's field has the layers whose inputs are taken, and SGLang's, inside of ``eagle_config``, those whose outputs
    are: the inputs of the next ones.
    """
    name, inner = "eagle_aux_hidden_state_layer_ids", values.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise refusal(path, "eagle_config is no object")
    if inner.get("use_aux_hidden_state", True) is not True:
        raise refusal(path, "use_aux_hidden_state must be true: a head of EAGLE-3 takes the states of three layers")
    found = values.get(name) or [each + 1 if type(each) is int else each for each in inner.get(name) or []]
    layers = found or [2, num_layers // 2, num_layers - 3]
    whole = isinstance(layers, list) and all(type(each) is int and 0 <= each < num_layers for each in layers)
    if not whole or len(layers) != _LAYERS or sorted({*layers}) != layers:
        raise refusal(path, f"takes the states before layers {shown(layers)} of a model that has {num_layers}")
    return tuple(layers)


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
        self._fc = load_linear(ops, weights, ["model.fc"], (size,), _LAYERS * config.target_size, bias=config.fc_bias)
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
