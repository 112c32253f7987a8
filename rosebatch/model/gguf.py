"""From a .gguf file to a transformers folder with dequantized weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from rosebatch.host.model_files import refusal, refused, require_file, shown
from rosebatch.model.family import GGUF
from rosebatch.model.gguf_tokenizer import write_tokenizer
from rosebatch.model.hf_config import parse_model_config
from rosebatch.model.registry import ARCHITECTURES

# Part of the cache key: raise it when the conversion changes.
CONVERTER_VERSION = 4

_SHARD_BYTES = 2 << 30

# By GGUF's names.
_ARCHITECTURES = {a.gguf.architecture: (name, a, a.gguf) for name, a in ARCHITECTURES.items() if a.gguf}


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
        found = str(fields.need("general.architecture"))
        if found not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise refusal(path, f"GGUF architecture {shown(found)} is not supported; supported are {known}")
        hf_class, architecture, form = _ARCHITECTURES[found]
        model = _Model(found, fields, reader)
        config = {"architectures": [hf_class], "model_type": architecture.model_type, **_shared_config(model)}
        config |= form.config(model)
        config["dtype"] = str(dtype).removeprefix("torch.")
        # Its mistakes are those of the GGUF file: found here, they are reported under its name.
        parse_model_config(config, str(path))
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
        _write_weights(_tensors(form, config, reader, dtype), folder)
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

    def need(self, key: str) -> Any:
        if key not in self._fields:
            raise refusal(self._path, f"GGUF metadata {key!r} is missing")
        return self.get(key)


class _Model:
    """See ``GGUFModel``."""

    def __init__(self, architecture: str, fields: _Fields, reader: gguf.GGUFReader) -> None:
        self._architecture = architecture
        self.fields = fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = set(self._tensors)

    def need(self, key: str) -> Any:
        return self.fields.need(f"{self._architecture}.{key}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self._architecture}.{key}", default)

    def stored(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._tensors[name].data
        return values

    def vocab_size(self) -> int:
        return int(self._tensors["token_embd.weight"].shape[1])


def _shared_config(model: _Model) -> dict[str, Any]:
    tokens = {name: model.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    return {
        "vocab_size": model.vocab_size(),
        "tie_word_embeddings": "output.weight" not in model.names,
        "bos_token_id": tokens["bos"],
        "eos_token_id": list(dict.fromkeys(tokens[name] for name in ("eos", "eot") if tokens[name] is not None)),
    }


def _tensors(
    form: GGUF, config: dict[str, Any], reader: gguf.GGUFReader, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under transformers' name, dequantized in fp32 and rounded to ``dtype`` once."""
    for tensor in reader.tensors:
        name = _hf_name(form, tensor.name)
        if name is None:
            continue
        values = form.values(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), config)
        yield name, torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)


def _hf_name(form: GGUF, name: str) -> str | None:
    """transformers' name of a GGUF tensor; None if transformers does not store the tensor."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in form.names:
        return None
    prefix = f"{form.layers}.{match[1]}." if match[1] else ""
    return f"{prefix}{form.names[match[2]]}.{match[3]}"


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
        shard, folder / ("model.safetensors" if index == 1 else f"model-{index:05}.safetensors"), {"format": "pt"}
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
