"""Adapters as PEFT saves them. All numbers are small multiples of powers of two: sums of them have no rounding."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model.quantization.numbers import seeded

RANK, ALPHA = 2, 4.0
SCALE = ALPHA / RANK


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """A folder with these tensors, whose names lack PEFT's prefix, and fields of its config beside the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": RANK, "lora_alpha": ALPHA, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def numbers(name: str, *shape: int) -> Tensor:
    """Multiples of 1/8 below 1, always the same for a name."""
    return torch.randint(-7, 8, shape, generator=seeded(name)) / 8


def pair(module: str, out: int, width: int, rank: int = RANK) -> tuple[dict[str, Tensor], Tensor]:
    """A and B of a linear, and what they add to its weight ``[out, in]``."""
    a, b = numbers(f"{module} a", rank, width), numbers(f"{module} b", out, rank)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, ALPHA / rank * b @ a


def embedding_pair(module: str, size: int, hidden: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same of an embedding ``[V, H]``."""
    a, b = numbers(f"{module} a", RANK, size), numbers(f"{module} b", hidden, RANK)
    return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}, SCALE * (b @ a).T


def experts_pair(module: str, count: int, out: int, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same of a parameter of experts ``[E, out, in]``: each has its own A and B."""
    a, b = numbers(f"{module} a", count, RANK, width), numbers(f"{module} b", count, out, RANK)
    # Of B, PEFT has the experts' columns of the first rank, then those of the second.
    columns = torch.stack([b[expert, :, rank] for rank in range(RANK) for expert in range(count)], 1)
    tensors = {f"{module}.lora_A.weight": a.flatten(0, 1), f"{module}.lora_B.weight": columns}
    return tensors, SCALE * b @ a
