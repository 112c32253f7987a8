"""From a .gguf file to a transformers folder. Weights are dequantized, but MXFP4 of gpt-oss: that has its own form."""

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
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.core.plain import dtype_name
from rosebatch.core.words import counted
from rosebatch.host.model_files import refusal, refused, require_file, shown
from rosebatch.model.family import EACH, GGUF, integers
from rosebatch.model.gguf.metadata import Metadata, Reader
from rosebatch.model.gguf.tokenizer import GGUFTokenizer, read_tokenizer
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.hf.generation_config import UNSERVED_OF_GGUF
from rosebatch.model.registry import ARCHITECTURES

# Part of the cache key: raise it when the conversion changes.
CONVERTER_VERSION = 8

_SHARD_BYTES = 2 << 30
_MXFP4, _BLOCK_BYTES = gguf.GGMLQuantizationType.MXFP4, 16
# What states and the choice of experts are made with: they are read in fp32 whatever the dtype of a run.
_FP32 = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
_INTEGER = integers()


class _Class(NamedTuple):
    """One of transformers' classes, in a form of GGUF files."""

    name: str
    model_type: str
    form: GGUF


_CLASSES = [_Class(name, a.model_type, form) for name, a in ARCHITECTURES.items() for form in a.gguf]


class _Described(NamedTuple):
    """What a file says before its weights are read.

    Attributes:
        config: of transformers.
        names: GGUF's names of tensors -> transformers' names.
        packed: those of transformers' names whose tensors stay in MXFP4.
    """

    form: GGUF
    config: dict[str, Any]
    names: dict[str, str]
    packed: frozenset[str]
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
        OSError: the folder cannot be written.
    """
    with refused(path, "not a readable GGUF file"):
        found = _describe(path, dtype)
    _write_json(folder / "config.json", found.config)
    _write_json(folder / "generation_config.json", _generation_config(found.fields, found.tokenizer.end_ids))
    _write_weights(_tensors(path, found, dtype), folder)
    found.tokenizer.save(folder)


def _describe(path: Path, dtype: torch.dtype, *, quiet: bool = False) -> _Described:
    """All mistakes are those of the GGUF file: found before weights are written, they are reported under its name."""
    require_file(path)
    reader = Reader(path)
    fields = Metadata(path, reader)
    if fields.get("split.count", 1) > 1:
        raise refusal(path, "one of several parts: join them with llama-gguf-split --merge")
    found = fields.need("general.architecture", str)
    classes = [each for each in _CLASSES if each.form.architecture == found]
    if not classes:
        raise refusal(path, f"GGUF architecture {shown(found)} is not supported; docs/models.md lists what is")
    model = _Model(found, fields, reader)
    hf_class, model_type, form = _class_of(model, classes)
    if "token_embd.weight" not in model.names:
        # Before the others: its shape is the size of the vocabulary.
        raise refusal(path, "the tensor token_embd.weight is missing")
    blocks, tensors = model.need("block_count"), len(model.names)
    if blocks > tensors:
        has = counted(tensors, "tensor")
        raise refusal(path, f"GGUF metadata '{found}.block_count' is {blocks}, and the file has {has}")
    config = {"architectures": [hf_class], "model_type": model_type, **_shared_config(model)}
    config |= form.config(model)
    config["dtype"] = dtype_name(dtype)
    tokenizer = read_tokenizer(fields, path, form.pieces)
    config["eos_token_id"] = tokenizer.end_ids
    fields.require_understood(found, quiet=quiet)
    parse_model_config(config, str(path))
    names = _tensor_names(form, config, model.need("block_count") - model.drafts)
    _require_tensors(path, model, names)
    packed = _packed(form, reader, names)
    if packed:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return _Described(form, config, names, packed, fields, tokenizer, reader)


def _class_of(model: "_Model", classes: Sequence[_Class]) -> _Class:
    """The first whose condition the file meets, or else the one without."""
    (other,) = (each for each in classes if each.form.when is None)
    return next((each for each in classes if each.form.when and each.form.when(model)), other)


class _Model:
    """See ``GGUFModel``."""

    def __init__(self, architecture: str, fields: Metadata, reader: gguf.GGUFReader) -> None:
        self._architecture = architecture
        self.fields = fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = set(self._tensors)
        self.used: set[str] = set()
        self.drafts = 0

    def need(self, key: str, kind: Any = _INTEGER) -> Any:
        return self.fields.need(f"{self._architecture}.{key}", kind)

    def get(self, key: str, default: Any = None, kind: Any = None) -> Any:
        return self.fields.get(f"{self._architecture}.{key}", default, kind)

    def require(self, key: str, *neutral: Any) -> None:
        self.fields.require(f"{self._architecture}.{key}", *neutral)

    def without_drafts(self) -> int:
        blocks = self.need("block_count")
        self.drafts = self.get("nextn_predict_layers", 0, integers(below=max(1, blocks)))
        layers = int(blocks - self.drafts)
        numbers = {name: re.match(r"blk\.(\d+)\.", name) for name in self.names}
        self.used.update(name for name, number in numbers.items() if number and int(number[1]) >= layers)
        return layers

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
        "bos_token_id": model.fields.get("tokenizer.ggml.bos_token_id", kind=_INTEGER),
        # Defaults of some classes are beyond a small vocabulary.
        "pad_token_id": model.fields.get("tokenizer.ggml.padding_token_id", kind=_INTEGER),
    }


def _generation_config(fields: Metadata, end_ids: Sequence[int]) -> dict[str, Any]:
    """End tokens, and what the authors recommend for sampling."""
    names = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p"}
    given = {name: fields.get(f"general.sampling.{key}", kind=float) for name, key in names.items()}
    given["top_k"] = fields.get("general.sampling.top_k", kind=int)
    # A run tells of them.
    given |= {name: fields.get(f"general.sampling.{name}", kind=float) for name in UNSERVED_OF_GGUF}
    return {"eos_token_id": end_ids, **{name: value for name, value in given.items() if value is not None}}


def _tensor_names(form: GGUF, config: Mapping[str, Any], layers: int) -> dict[str, str]:
    """GGUF's names of all tensors that a model of this config has -> transformers' names."""
    biases, absent = form.biases(config), form.absent(config)
    outside = [("", name, "", other) for name, other in form.names.items()]
    inside = [
        (f"blk.{layer}.", name, f"{form.layers}.{layer}.", other)
        for (name, other), layer in product(form.layer_names.items(), range(layers))
        if name not in absent and f"blk.{layer}.{name}" not in absent
    ]
    found: dict[str, str] = {}
    for prefix, name, other_prefix, other in outside + inside:
        if "." in name or name in form.bare:
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


def _tensors(path: Path, found: _Described, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under transformers' name, in MXFP4 or dequantized in fp32 and rounded to ``dtype`` once.

    Raises:
        UserError: the file is broken.
    """
    parts = _parts_of(found.names)
    tensors = {tensor.name: tensor for tensor in found.reader.tensors}
    for name in dict.fromkeys(found.names[tensor] for tensor in tensors if tensor in found.names):
        with refused(path, "not a readable GGUF file"):
            own = [tensors[part] for part in parts[name]]
            if name in found.packed:
                yield from _packed_tensors(found.form, name, own)
            else:
                yield from _values(found, name, own, dtype)


def _values(
    found: _Described, name: str, parts: Sequence[gguf.ReaderTensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    dtype = torch.float32 if name.endswith(_FP32) else dtype

    def values(part: gguf.ReaderTensor) -> NDArray[np.float32]:
        return found.form.values(name, gguf.quants.dequantize(part.data, part.tensor_type), found.config)

    if EACH in name:
        # transformers has a tensor of each expert.
        for number, own in enumerate(values(parts[0])):
            yield name.replace(EACH, str(number)), _rounded(own, dtype)
        return
    rounded = [_rounded(values(part), dtype) for part in parts]
    yield name, found.form.join(rounded) if len(rounded) > 1 else rounded[0]


def _packed(form: GGUF, reader: gguf.GGUFReader, names: Mapping[str, str]) -> frozenset[str]:
    """Transformers' names of matrices that may stay in MXFP4: those of which all parts are in it."""
    if form.mxfp4 is None:
        return frozenset()
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors if tensor.name.endswith(".weight")}
    wholes = _parts_of(names).items()
    return frozenset(whole for whole, parts in wholes if {kinds.get(part) for part in parts} == {_MXFP4})


def _packed_tensors(form: GGUF, name: str, parts: Sequence[gguf.ReaderTensor]) -> Iterator[tuple[str, Tensor]]:
    """Blocks and scales as gpt-oss has them.

    A block of GGUF is its scale, and 16 bytes: the low halves are its first 16 values, the high ones the others.
    Elsewhere, each byte has two neighbours. And 8 is 0 there, not -0.
    """
    assert form.mxfp4 is not None, "it may stay in MXFP4"
    blocks, scales = [], []
    for part in parts:
        found = part.data.reshape(*part.data.shape[:-1], -1, 1 + _BLOCK_BYTES)
        halves = np.concatenate([found[..., 1:] & 15, found[..., 1:] >> 4], -1)
        halves[halves == 8] = 0
        blocks.append(halves[..., ::2] | halves[..., 1::2] << 4)
        scales.append(found[..., 0])
    for kind, each in (("blocks", blocks), ("scales", scales)):
        yield f"{name}_{kind}", torch.from_numpy(np.ascontiguousarray(form.mxfp4(each)))


def _parts_of(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Transformers' names -> GGUF's names of their parts, in the order of ``layer_names``."""
    parts: dict[str, list[str]] = {}
    for part, whole in names.items():
        parts.setdefault(whole, []).append(part)
    return parts


def _rounded(values: NDArray[np.float32], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Save in shards. Only one shard is in memory at a time."""
    shard: dict[str, Tensor] = {}
    size, index = 0, 1
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            _save(shard, folder / f"model-{index:05}.safetensors")
            shard, size, index = {}, 0, index + 1
        shard[name] = tensor
        size += tensor.nbytes
    _save(shard, folder / ("model.safetensors" if index == 1 else f"model-{index:05}.safetensors"))


def _save(shard: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(shard, path, {"format": "pt"})
    except SafetensorError as error:
        # Of a full disk, too.
        raise OSError(str(error)) from None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
