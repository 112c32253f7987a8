"""A head of EAGLE-3 in a folder: found, and its ``config.json`` read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.core.errors import UserError
from rosebatch.host.model_files import reachable, read_json, refusal, shown
from rosebatch.model.dry_load import HEADERS
from rosebatch.model.hf.config import parse_model_config, require_config
from rosebatch.model.hub import find_snapshot, parse_hub_id
from rosebatch.model.weight_files import has_weight_files
from rosebatch.model.weights import SafetensorsWeights

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# The way out for heads that are published so.
_PICKLED = "docs/speculation.md says how pytorch_model.bin becomes model.safetensors"
# Layers of the model whose states a head takes.
LAYERS = 3
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
        return self.draft_weights + self.shape.hidden_size * LAYERS * self.target_size

    @property
    def draft_weights(self) -> int:
        """Numbers in the matrices that a draft is multiplied with."""
        c = self.shape
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return c.hidden_size * (2 * (q + 2 * kv) + q + 3 * c.intermediate_size + self.draft_vocab_size)


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


def require_no_head(folder: Path) -> None:
    """Check that a folder does not hold a head in place of a model.

    Raises:
        UserError: it does.
    """
    path = folder / "config.json"
    named = read_json(path).get("architectures") if path.exists() else None
    if isinstance(named, list) and named[:1] and named[0] in _ARCHITECTURES:
        instead = f"give its model to --model, and --speculative-model {folder}"
        raise refusal(path, f"the folder holds a head for drafts alone: {instead}")


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
        raise refusal(path, f"a head for a model with {shape.vocab_size} tokens, and --model has {target.vocab_size}")
    target_size = _number(values, "target_hidden_size", shape.hidden_size, path)
    if target_size != target.hidden_size:
        sizes = f"hidden size {target_size}, and that of --model is {target.hidden_size}"
        raise refusal(path, f"a head for a model with {sizes}")
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
    if not whole or len(layers) != LAYERS or sorted({*layers}) != layers:
        raise refusal(path, f"takes the states before layers {shown(layers)} of a model that has {num_layers}")
    return tuple(layers)
