"""Random numbers of few bits and their scales, packed by Python's integers: nothing of the package is used."""

import re
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from tests.engine.family_models import FAMILIES

# Matrices that no quantizer takes.
PLAIN = ("embed", "lm_head", "norm", "conv1d", "mlp.gate.", "block_sparse_moe.gate.", "router")
# e2m1, by code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# The name of a module and its shape -> the tensors that a checkpoint has in its place, and the values.
EncodeMatrix = Callable[[str, tuple[int, int]], tuple[dict[str, Tensor], Tensor]]
# Experts' names in files, of gate, up and down, by the names of their tensors in one.
_EXPERTS = {
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "gemma4_moe": ("experts", "gate_proj", "up_proj", "down_proj"),
}
_OF_LAYER = re.compile(r"(?:mlp\.)?experts")
DENSE_FAMILIES, MOE_FAMILIES = ["smollm3", "glm4", "phi3", "bamba"], list(_EXPERTS)
# Two join and reorder what one does, and cut it.
RANKS = [pytest.param(1, marks=pytest.mark.thorough), 2]


def model_of(name: str) -> ModelConfig:
    """A tiny model of a family whose matrices have columns for any packing: 32, and rows that make whole words."""
    config = FAMILIES[name]
    experts = config.experts and msgspec.structs.replace(config.experts, expert_size=32)
    full = config.full_heads and msgspec.structs.replace(config.full_heads, head_dim=32)
    return msgspec.structs.replace(config, head_dim=16, intermediate_size=32, experts=experts, full_heads=full)


def encoder(family: str, matrix: EncodeMatrix) -> Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]:
    """See ``Encode``: of each matrix that a quantizer takes, and of each expert's."""

    def encode(name: str, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if any(part in name for part in PLAIN):
            return {}, values
        if values.ndim == 2:
            return matrix(name.removesuffix(".weight"), (values.shape[0], values.shape[1]))
        prefix, gate, up, down = _EXPERTS[family]
        layer, parts = _OF_LAYER.split(name)[0], [gate, up] if "gate_up" in name else [down]
        tensors, experts, shape = {}, [], (values.shape[1] // len(parts), values.shape[2])
        for expert in range(len(values)):
            each = [matrix(f"{layer}{prefix}.{expert}.{part}", shape) for part in parts]
            tensors |= {key: tensor for found, _ in each for key, tensor in found.items()}
            experts.append(torch.cat([own for _, own in each]))
        return tensors, torch.stack(experts)

    return encode


def seeded(name: str) -> torch.Generator:
    """The same numbers for a name, and others for another."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def codes_of(name: str, shape: tuple[int, ...], bits: int) -> Tensor:
    """Random codes, int64."""
    return torch.randint(1 << bits, shape, generator=seeded(name))


def scales_of(name: str, shape: tuple[int, ...], bits: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random scales, which make values of about 0.1."""
    return ((torch.rand(shape, generator=seeded(f"scales of {name}")) + 0.1) / (2 << bits)).to(dtype)


def spread(grid: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Each block's own for every element of a matrix; blocks are cut off at the ends."""
    rows, columns = shape
    return grid.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def packed(fields: Tensor, bits: int, word_bits: int = 32) -> Tensor:
    """Rows of fields, the first in the lowest bits of the first word."""
    words = []
    for row in fields.tolist():
        number = sum(field << place * bits for place, field in enumerate(row))
        count = -(-len(row) * bits // word_bits)
        words.append([number >> (i * word_bits) & ((1 << word_bits) - 1) for i in range(count)])
    found = np.array(words, {8: np.uint8, 32: np.uint32}[word_bits])
    return torch.from_numpy(found if word_bits == 8 else found.view(np.int32))


def exponents(name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Powers of two of 32 columns each: as bytes, and of every element."""
    found = torch.randint(118, 123, (shape[0], -(-shape[1] // 32)), generator=seeded(f"scale {name}"))
    return found.to(torch.uint8), spread(2.0 ** (found - 127), shape, (1, 32))


def mxfp8(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """See ``EncodeMatrix``: compressed-tensors and ModelOpt have the same tensors."""
    stored, scale = exponents(name, shape)
    numbers = torch.randn(shape, generator=seeded(name)).to(torch.float8_e4m3fn)
    return {f"{name}.weight": numbers, f"{name}.weight_scale": stored}, numbers.float() * scale
