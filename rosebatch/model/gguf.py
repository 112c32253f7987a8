"""From a .gguf file to a transformers folder with dequantized weights."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.core.plain import dtype_name
from rosebatch.host.model_files import refusal, refused, require_file, shown
from rosebatch.model.family import EACH, GGUF
from rosebatch.model.gguf_metadata import Metadata, Reader
from rosebatch.model.gguf_tokenizer import GGUFTokenizer, read_tokenizer
from rosebatch.model.hf_config import parse_model_config
from rosebatch.model.registry import ARCHITECTURES

# Part of the cache key: raise it when the conversion changes.
CONVERTER_VERSION = 6

_SHARD_BYTES = 2 << 30

# By GGUF's names, and whether there are experts: Mixtral has Llama's name.
_ARCHITECTURES = {(a.gguf.architecture, a.experts): (name, a, a.gguf) for name, a in ARCHITECTURES.items() if a.gguf}


class _Described(NamedTuple):
    """What a file says before its weights are read.

    Attributes:
        config: of transformers.
        names: GGUF's names of tensors -> transformers' names.
    """

    form: GGUF
    config: dict[str, Any]
    names: dict[str, str]
    fields: Metadata
    tokenizer: GGUFTokenizer
    reader: Reader


def read_shape(path: Path, dtype: torch.dtype) -> ModelConfig:
    """The shape of the model that ``convert`` would make.

    Raises:
        UserError: as ``convert``.
    """
    with refused(path, "not a readable GGUF file"):
        return parse_model_config(_describe(path, dtype, quiet=True).config, str(path))


def convert(path: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write config.json, safetensors weights and the tokenizer of a .gguf file into ``folder``.

    Raises:
        UserError: the file is broken, or its architecture or tokenizer is not supported.
    """
    with refused(path, "not a readable GGUF file"):
        found = _describe(path, dtype)
        _write_json(folder / "config.json", found.config)
        _write_json(folder / "generation_config.json", _generation_config(found.fields, found.tokenizer.end_ids))
        _write_weights(_tensors(found.form, found.config, found.reader, found.names, dtype), folder)
        found.tokenizer.save(folder)


def _describe(path: Path, dtype: torch.dtype, *, quiet: bool = False) -> _Described:
    """All mistakes are those of the GGUF file: found before weights are written, they are reported under its name."""
    require_file(path)
    reader = Reader(path)
    fields = Metadata(path, reader)
    if fields.get("split.count", 1) > 1:
        raise refusal(path, "one of several parts: join them with llama-gguf-split --merge")
    found = str(fields.need("general.architecture"))
    if not any(found == name for name, _ in _ARCHITECTURES):
        raise refusal(path, f"GGUF architecture {shown(found)} is not supported; docs/models.md lists what is")
    # Where no experts are served, the count stays unread, and is refused by its name.
    experts = (found, True) in _ARCHITECTURES and (
        (found, False) not in _ARCHITECTURES or fields.get(f"{found}.expert_count", 0) > 0
    )
    hf_class, architecture, form = _ARCHITECTURES[found, experts]
    model = _Model(found, fields, reader)
    config = {"architectures": [hf_class], "model_type": architecture.model_type, **_shared_config(model)}
    config |= form.config(model)
    config["dtype"] = dtype_name(dtype)
    tokenizer = read_tokenizer(fields, path, form.pieces)
    config["eos_token_id"] = tokenizer.end_ids
    fields.require_understood(found, quiet=quiet)
    parse_model_config(config, str(path))
    names = _tensor_names(form, config, model.need("block_count"))
    _require_tensors(path, model, names)
    return _Described(form, config, names, fields, tokenizer, reader)


class _Model:
    """See ``GGUFModel``."""

    def __init__(self, architecture: str, fields: Metadata, reader: gguf.GGUFReader) -> None:
        self._architecture = architecture
        self.fields = fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = set(self._tensors)
        self.used: set[str] = set()

    def need(self, key: str) -> Any:
        return self.fields.need(f"{self._architecture}.{key}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self._architecture}.{key}", default)

    def require(self, key: str, *neutral: Any) -> None:
        self.fields.require(f"{self._architecture}.{key}", *neutral)

    def values(self, name: str) -> NDArray[np.float32] | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        self.used.add(name)
        found: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return found

    def vocab_size(self) -> int:
        return int(self._tensors["token_embd.weight"].shape[1])


def _shared_config(model: _Model) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size(),
        "tie_word_embeddings": "output.weight" not in model.names,
        "bos_token_id": model.fields.get("tokenizer.ggml.bos_token_id"),
        # Defaults of some classes are beyond a small vocabulary.
        "pad_token_id": model.fields.get("tokenizer.ggml.padding_token_id"),
    }


def _generation_config(fields: Metadata, end_ids: Sequence[int]) -> dict[str, Any]:
    """End tokens, and what the authors recommend for sampling."""
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    given = {name: fields.get(f"general.sampling.{key}") for name, key in names.items()}
    return {"eos_token_id": end_ids, **{name: value for name, value in given.items() if value is not None}}


def _tensor_names(form: GGUF, config: Mapping[str, Any], layers: int) -> dict[str, str]:
    """GGUF's names of all tensors that a model of this config has -> transformers' names."""
    biases, absent = form.biases(config), form.absent(config)
    outside = [("", name, "", other) for name, other in form.names.items()]
    inside = [
        (f"blk.{layer}.", name, f"{form.layers}.{layer}.", other)
        for (name, other), layer in product(form.layer_names.items(), range(layers))
        if name not in absent
    ]
    found: dict[str, str] = {}
    for prefix, name, other_prefix, other in outside + inside:
        if "." in name:
            found[prefix + name] = other_prefix + other
            continue
        for kind in ("weight", "bias") if name in biases else ("weight",):
            found[f"{prefix}{name}.{kind}"] = f"{other_prefix}{other}.{kind}"
    if config["tie_word_embeddings"]:
        del found["output.weight"]
    return found


def _require_tensors(path: Path, model: _Model, names: Mapping[str, str]) -> None:
    """Check that the file has the tensors of its model, and no others."""
    if missing := sorted(names.keys() - model.names):
        raise refusal(path, f"the tensor {missing[0]} is missing")
    others = sorted(model.names - names.keys() - model.used)
    # Frequencies that llama.cpp computes itself.
    if others := [name for name in others if not re.fullmatch(r"blk\.\d+\.attn_rot_embd(\.weight)?", name)]:
        raise refusal(path, f"the tensor {shown(others[0])} is not supported")


def _tensors(
    form: GGUF, config: dict[str, Any], reader: gguf.GGUFReader, names: Mapping[str, str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under transformers' name, dequantized in fp32 and rounded to ``dtype`` once."""
    parts: dict[str, list[str]] = {}
    for part, whole in names.items():
        parts.setdefault(whole, []).append(part)
    waiting: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if name := names.get(tensor.name):
            values = form.values(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), config)
            if EACH in name:
                # transformers has a tensor of each expert.
                for number, own in enumerate(values):
                    yield name.replace(EACH, str(number)), _rounded(own, dtype)
                continue
            waiting[tensor.name] = _rounded(values, dtype)
            if all(part in waiting for part in parts[name]):
                found = [waiting.pop(part) for part in parts[name]]
                yield name, form.join(found) if len(found) > 1 else found[0]


def _rounded(values: NDArray[np.float32], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)


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
