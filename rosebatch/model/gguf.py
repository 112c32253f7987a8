"""From a .gguf file to a transformers folder with dequantized weights."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rosebatch.host.model_files import refusal, refused, require_file, shown
from rosebatch.model.gguf_tokenizer import write_tokenizer
from rosebatch.model.hf_config import parse_model_config

# Part of the cache key: raise it when the conversion changes.
CONVERTER_VERSION = 4

_SHARD_BYTES = 2 << 30

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
}
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def convert(path: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write config.json, safetensors weights and the tokenizer of a .gguf file into ``folder``.

    Raises:
        UserError: the file is broken, or its architecture or tokenizer is not supported.
    """
    require_file(path)
    with refused(path, "not a readable GGUF file"):
        reader = _Reader(path)
        fields = _Fields(path, reader)
        if fields.get("split.count", 1) > 1:
            raise refusal(path, "one of several parts: join them with llama-gguf-split --merge")
        architecture = fields.text("general.architecture")
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise refusal(path, f"GGUF architecture {shown(architecture)} is not supported; supported are {known}")
        config = _config(architecture, fields, reader, {tensor.name for tensor in reader.tensors})
        config["dtype"] = str(dtype).removeprefix("torch.")
        # Its mistakes are those of the GGUF file: found here, they are told under its name.
        parse_model_config(config, str(path))
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
        _write_weights(_tensors(architecture, config, reader, dtype), folder)
        write_tokenizer(fields.get, path, folder)


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The library reads nothing where a file has ended, for as many times as the file says."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        found = super()._get(offset, dtype, count, *args, **kwargs)
        if len(found) < count:
            raise ValueError("the file ends too early")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY and int(self._get(orig_offs + 4, np.uint64)[0]) > len(self.data):
            raise ValueError("an array is longer than the file")
        return super()._get_field_parts(orig_offs, raw_type)


class _Fields:
    """The metadata of a file. Fields are read on demand, because the token lists are long."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self._path = path
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def text(self, key: str) -> str:
        return str(self.need(key))

    def need(self, key: str) -> Any:
        if key not in self._fields:
            raise refusal(self._path, f"GGUF metadata {key!r} is missing")
        return self.get(key)


def _config(architecture: str, fields: _Fields, reader: gguf.GGUFReader, names: set[str]) -> dict[str, Any]:
    hf_class, model_type = _ARCHITECTURES[architecture]
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")

    def need(key: str) -> Any:
        return fields.need(f"{architecture}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    shared = {
        "architectures": [hf_class],
        "model_type": model_type,
        "vocab_size": int(embedding.shape[1]),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(fields),
    }
    if architecture == "gpt2":
        return shared | {
            "n_positions": need("context_length"),
            "n_embd": need("embedding_length"),
            "n_layer": need("block_count"),
            "n_head": need("attention.head_count"),
            "n_inner": need("feed_forward_length"),
            "layer_norm_epsilon": need("attention.layer_norm_epsilon"),
        }
    heads, hidden = need("attention.head_count"), need("embedding_length")
    return shared | {
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in names,
        "rope_parameters": _rope(get, reader, names),
    }


def _eos_ids(fields: _Fields) -> list[int]:
    ids = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return list(dict.fromkeys(i for i in ids if i is not None))


def _rope(get: Callable[..., Any], reader: gguf.GGUFReader, names: set[str]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in names:
        # The RoPE scaling of Llama 3, stored as one divisor for each channel pair. The largest is the factor.
        divisors = next(t for t in reader.tensors if t.name == "rope_freqs.weight").data
        return rope | {
            "rope_type": "llama3",
            "factor": float(np.max(divisors)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0)}
        if trained := get("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = trained
    return rope


def _tensors(
    architecture: str, config: dict[str, Any], reader: gguf.GGUFReader, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under transformers' name, dequantized in fp32 and rounded to ``dtype`` once."""
    for tensor in reader.tensors:
        name = _hf_name(architecture, tensor.name)
        if name is None:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if architecture == "llama" and (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            values = _half_split(values, heads)
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        yield name, torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)


def _hf_name(architecture: str, name: str) -> str | None:
    """transformers' name of a GGUF tensor; None if transformers does not store the tensor."""
    names = _GPT2_NAMES if architecture == "gpt2" else _LLAMA_NAMES
    layers = "transformer.h" if architecture == "gpt2" else "model.layers"
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return None
    prefix = f"{layers}.{match[1]}." if match[1] else ""
    return f"{prefix}{names[match[2]]}.{match[3]}"


def _half_split(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of q or k: GGUF interleaves the channels for RoPE, transformers stores two halves."""
    shape = values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Save in shards. Only one shard is in memory at a time."""
    shard: dict[str, Tensor] = {}
    size, index = 0, 1
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            save_file(shard, folder / f"model-{index:05}.safetensors", {"format": "pt"})
            shard, size, index = {}, 0, index + 1
        shard[name] = tensor
        size += tensor.nbytes
    save_file(
        shard,
        folder / ("model.safetensors" if index == 1 else f"model-{index:05}.safetensors"),
        {"format": "pt"},
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
