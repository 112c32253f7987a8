"""A model with quantized matrices computes what one with their values does."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.config.switches import Switches
from rosebatch.model.dry_load import HEADERS, require_loadable
from rosebatch.model.mixers.gated_delta.mixer import DeltaSpec
from rosebatch.model.mixers.latent_attention.mixer import LatentSpec
from rosebatch.model.mixers.mamba2.mixer import MambaSpec
from rosebatch.model.mixers.short_conv.mixer import ConvSpec
from rosebatch.model.quantization.forms import form_of, load_weight
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.model.weights import Form, SafetensorsWeights, WeightSource
from rosebatch.ops import gated_delta, mamba2, short_conv
from rosebatch.ops.latent_attention import rms_norm
from rosebatch.ops.ops import Ops, pack_chunks
from rosebatch.ops.select import select
from rosebatch.ops.shard import Shard
from rosebatch.ops.tensor_parallel import divide
from rosebatch.ops.weight import Weight
from tests.engine.toy_model import dense_attention
from tests.helpers.threads_group import Meeting, ThreadGroup

CPU = torch.device("cpu")
OPS = select(Switches.resolve({}, "cpu"))
# The name and values of a matrix -> the tensors that a checkpoint has in its place, and their values.
Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


class Recorder(RandomWeights):
    """Keeps every tensor that a model asks for."""

    tensors: dict[str, Tensor]

    def get(self, name: str, shape: tuple[int, ...], **options: Any) -> Tensor:
        """See ``WeightSource``."""
        return self.tensors.setdefault(name, super().get(name, shape, **options))


def write_both(folder: Path, config: ModelConfig, encode: Encode) -> tuple[Path, Path]:
    """Folders ``packed`` and ``dense`` of one random model: in a format, and with the values that it stands for.

    Args:
        folder: gets both.
        config: of the model.
        encode: of each matrix; no tensors leave it plain.
    """
    recorder = Recorder(torch.float32, CPU)
    recorder.tensors = {}
    build_model(config, OPS, recorder)
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in recorder.tensors.items():
        tensors, values = encode(name, tensor) if tensor.ndim > 1 else ({}, tensor)
        packed |= tensors or {name: tensor}
        dense[name] = values.contiguous() if tensors else tensor
    for form, found in {"packed": packed, "dense": dense}.items():
        (folder / form).mkdir()
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / form / "model.safetensors")
    return folder / "packed", folder / "dense"


def load_from(
    folder: Path, config: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Weight:
    """A weight of a folder with this ``quantization_config``, unread."""
    return load_weight(SafetensorsWeights(folder, dtype, CPU, form_of(config)), name, shape)


def require_same_logits(folder: Path, config: ModelConfig, encode: Encode, form: Form, size: int) -> None:
    """Write both, and compare the logits of so many ranks bit by bit. ``check`` reads the headers of each form too."""
    packed, dense = write_both(folder, config, encode)
    headers = SafetensorsWeights(packed, torch.float32, HEADERS, form)
    require_loadable(config, headers)
    assert headers.unread == []
    expected = all_logits(config, SafetensorsWeights(dense, torch.float32, CPU), size)
    out = all_logits(config, SafetensorsWeights(packed, torch.float32, CPU, form), size)
    assert all(torch.equal(each, same) for each, same in zip(out, expected, strict=True))
    assert expected[0].std() > 0.01


def attend_whole(spec: Any, qkv: Tensor, *others: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Attention over one sequence without a cache or positions, or a rule with a state from an empty one."""
    if isinstance(spec, LatentSpec):
        latents, seen = others[0], torch.ones(len(qkv), len(qkv)).tril().bool()
        keys = torch.cat((rms_norm(latents[:, : spec.rank], spec.norm, spec.eps), latents[:, spec.rank :]), 1)
        scores = torch.einsum("qhw,kw->hqk", spec.absorbed(qkv), keys) * spec.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return spec.expand((weights @ keys[:, : spec.rank]).transpose(0, 1))
    states = [torch.zeros(1, *each.shape, dtype=each.dtype or qkv.dtype) for each in spec.states]
    if isinstance(spec, DeltaSpec):
        state = gated_delta.DeltaState(*states)
        return gated_delta.reference.advance(qkv, *others, state, 0, 0, spec.weights)
    if isinstance(spec, MambaSpec):
        return mamba2.reference.advance(qkv, *others, mamba2.MambaState(*states), 0, 0, spec.weights)
    if isinstance(spec, ConvSpec):
        return short_conv.reference.prefill(qkv, *states, pack_chunks([(0, 0, 0, len(qkv))]), spec.weight)
    return dense_attention(replace(spec, rotary=None), qkv)


def all_logits(config: ModelConfig, weights: WeightSource, size: int, whole: Ops = OPS) -> list[Tensor]:
    """The logits of each rank, computed by as many threads with these operators."""
    meeting = Meeting(size)

    def run(rank: int) -> Tensor:
        ops = whole if size == 1 else divide(whole, ThreadGroup(Shard(rank, size), meeting), in_order=True)
        with torch.inference_mode():
            model = build_model(config, ops, weights)
            return model.logits(model.forward(torch.arange(9), torch.arange(9), attend_whole))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
