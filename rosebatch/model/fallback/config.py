"""From transformers' config of any decoder to ModelConfig, by a trial run without weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module

from rosebatch.config.model import ModelConfig, scaled_length
from rosebatch.config.toml_file import convert
from rosebatch.core.plain import dtype_name
from rosebatch.host.model_files import read_json, refusal, shown
from rosebatch.host.pretrained import load_pretrained_config
from rosebatch.model.fallback.attention import NAME, UnservedError
from rosebatch.model.fallback.network import Decoder, build_network, fix_rope, require_agreement, require_layer_types
from rosebatch.model.fallback.trial import TOKENS
from rosebatch.model.hf.config import generation_end_tokens, is_native, require_config
from rosebatch.model.hf.fields import run_dtype
from rosebatch.model.quantization.folder_config import quantization_of

# In transformers' names of classes without an output projection.
_OTHER_TASKS = ("Classification", "Reward", "Answering", "MaskedLM", "Choice")
_META = torch.device("meta")
# Where configs say how long a sequence may be, and how many experts a token has.
_LENGTHS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_ctx", "max_seq_len")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def read_any_config(folder: Path, max_model_len: int | None) -> tuple[Any, ModelConfig]:
    """transformers' config of a folder and the shape of its model, of any architecture that can be served.

    Args:
        folder: with config.json; the end tokens in generation_config.json win.
        max_model_len: the most tokens of prompt and completion together, if that is not the model's own.

    Raises:
        UserError: a file is broken, or the model cannot be served.
    """
    path = require_config(folder)
    values = read_json(path)
    if quantization_of(folder, values):
        way = "leave out --model-impl transformers" if is_native(folder) else "take the model's 16-bit weights"
        what = "transformers' own code runs this model, which takes 16-bit weights alone"
        raise refusal(path, f"quantization_config: {what}: {way}")
    try:
        config = load_pretrained_config(folder)
    except Exception as error:
        raise refusal(path, _unread(values, error)) from None
    return config, describe_config(config, str(path), max_model_len, generation_end_tokens(folder))


def _unread(values: Mapping[str, Any], error: Exception) -> str:
    from transformers import CONFIG_MAPPING, __version__

    kind = values.get("model_type")
    if not isinstance(kind, str):
        return "'model_type' is missing; docs/models.md lists the models that rosebatch has"
    if kind not in CONFIG_MAPPING:
        return f"neither rosebatch nor transformers {__version__} has models of type {shown(kind)}"
    return f"transformers cannot read it: {error}"


def config_of_values(values: Mapping[str, Any], source: str) -> tuple[Any, ModelConfig]:
    """The same for the values of a config.json."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**values)
    return config, describe_config(config, source, None, None)


def describe_config(config: Any, source: str, max_model_len: int | None, eos: Any) -> ModelConfig:
    """The shape of the model that a transformers config describes; ``eos`` are end tokens that win over its own.

    Raises:
        UserError: it cannot be served; the message starts with ``source`` and says which layer and why.
    """
    name = _architecture(config)
    if (task := _other_task(name)) is not None:
        told = f"it has a head for {task} in place of an output projection; docs/classes.md lists the heads served"
        raise refusal(source, f"{name} is not supported: {told}")
    try:
        values = _fields(config, name, max_model_len)
        text = config.get_text_config(decoder=True)
        eos = eos if eos is not None else getattr(text, "eos_token_id", None) or getattr(config, "eos_token_id", None)
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    except Exception as error:
        raise refusal(source, f"{name} is not supported: {error_text(error)}") from None
    values["eos_token_ids"] = [] if eos is None else eos if isinstance(eos, list) else [eos]
    values["dtype"] = run_dtype(dtype_name(dtype))
    return convert(values, ModelConfig, source)


def _fields(config: Any, name: str, max_model_len: int | None) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    length = _first(text, _LENGTHS)
    require_layer_types(text, max_model_len or length or 0)
    network = build_network(config, torch.bfloat16, _META)
    fix_rope(network, max_model_len or length or 0)
    decoder = Decoder(network)
    specs = decoder.layers.specs
    if length is None:
        raise UnservedError("its config has no max_position_embeddings")
    require_agreement(text, specs, max_model_len or length)
    layer_weights, active_weights = _count_weights(network, text)
    planes = [[tuple(each) for each in spec.planes] for spec in specs]
    return {
        "family": "transformers",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_layers": len(specs),
        **dict(zip(("num_heads", "num_kv_heads", "head_dim"), max(spec.heads for spec in specs), strict=True)),
        "intermediate_size": _widest(decoder, text),
        "sliding_windows": [spec.window for spec in specs],
        "max_model_len": max(length, min(max_model_len or 0, _scaled_length(text, length))),
        "norm_eps": 1e-6,
        "activation": "",
        "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
        "transformers": {
            "architecture": name,
            "layer_weights": layer_weights,
            "active_weights": active_weights,
            "kv_planes": planes,
        },
    }


def error_text(error: Exception) -> str:
    """Why a network cannot be served: its refusal, or what its code raised."""
    if isinstance(error, UnservedError):
        return str(error)
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "its attention does not go through transformers' attention interface"
    return f"a trial run fails: {type(error).__name__}: {' '.join(str(error).split())}"


def _architecture(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if isinstance(named, list) and named else type(config).__name__.removesuffix("Config")


def _other_task(name: str) -> str | None:
    """What a class of transformers is for, if that is no text: it has no output projection."""
    task = name.rpartition("For")[2]
    return task if any(word in task for word in _OTHER_TASKS) else None


def _first(config: Any, names: Sequence[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _scaled_length(config: Any, length: int) -> int:
    rope = getattr(config, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    trained = rope.get("original_max_position_embeddings") or length
    return scaled_length(length, rope.get("rope_type"), rope.get("factor") or 1, trained)


def _count_weights(network: Any, text: Any) -> tuple[int, int]:
    """Elements of the layers' matrices, and of those that a token is multiplied with."""
    decoder = network.get_decoder() if hasattr(network, "get_decoder") else network.base_model
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, Embedding)}
    head = network.get_output_embeddings()
    tables |= {id(head.weight)} if head is not None else set()
    matrices = [(n, p.numel()) for n, p in decoder.named_parameters() if p.ndim > 1 and id(p) not in tables]
    every = sum(count for _, count in matrices)
    of_experts = sum(count for name, count in matrices if ".experts." in name)
    share = min(1.0, (_first(text, _TOP_K) or 1) / (_first(text, _EXPERTS) or 1))
    return every, every - of_experts + int(of_experts * share)


def _widest(decoder: Decoder, text: Any) -> int:
    """Most elements a token has in any tensor between modules."""
    of_expert: int = getattr(text, "moe_intermediate_size", None) or text.hidden_size
    widths = [(_first(text, _TOP_K) or 0) * of_expert]

    def look(module: Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            widths.append(out.numel() // TOKENS)

    hooks = [module.register_forward_hook(look) for module in decoder.layers.body.modules()]
    ids = torch.arange(TOKENS, device=_META)
    decoder.hidden_per_token(ids, ids)
    for hook in hooks:
        hook.remove()
    return max(widths)
