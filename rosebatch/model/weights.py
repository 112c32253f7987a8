"""The tensors of a model: from the safetensors files of a folder, or random."""

import json
import re
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rosebatch.errors import UserError

# Standard deviation of random weights.
DEVIATION = 0.02

_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")


class WeightSource(Protocol):
    """Tensors by transformers' names."""

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """The tensor, on the run's device.

        Args:
            name, shape: of the tensor.
            dtype: of the result; None for the dtype of the run.
            fill: the value of every element if the weights are random; None for random numbers.

        Raises:
            UserError: the tensor is missing, unreadable or has another shape.
        """
        ...


class SafetensorsWeights:
    """The tensors of a model folder, in one ``.safetensors`` file or several.

    Raises:
        UserError: a file is missing or broken.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: unreadable weights ({error})") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """See ``WeightSource``.

        Checkpoints of a bare transformer lack the first part of each name. A table of learned positions may have more
        rows than ``shape``: a lower ``--max-model-len`` uses the first ones.
        """
        if name not in self._files:
            name = name.partition(".")[2] if name.partition(".")[2] in self._files else name
        if name not in self._files:
            raise UserError(f"{self.folder}: weights have no tensor {name!r}")
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder}: tensor {name!r} is unreadable ({error})") from None
        if name.endswith("wpe.weight") and tensor.ndim == len(shape):
            tensor = tensor[: shape[0]]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{self.folder}: tensor {name!r} has shape {tuple(tensor.shape)}, config says {shape}")
        return tensor.to(self.device, dtype or self.dtype)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder.

    These are the files in the index; without an index ``model.safetensors``, or else every ``.safetensors`` file.

    Raises:
        UserError: there are none, some are missing, or the index is unreadable.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: unreadable index ({error!r})") from None
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise UserError(f"{folder}: {len(missing)} weight files are missing, the first is {missing[0]}")
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    files = sorted(path for path in folder.glob("*.safetensors") if path.exists())
    if not files:
        raise UserError(f"{folder}: no .safetensors weights in this folder")
    totals = [int(match[1]) for path in files if (match := _SHARD.fullmatch(path.name))]
    if totals and len(totals) < totals[0]:
        raise UserError(f"{folder}: {totals[0] - len(totals)} of {totals[0]} weight files are missing")
    return files


class RandomWeights:
    """Random tensors, for benchmarks and kernel work. The same name and seed give the same numbers."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self.seed = seed

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """See ``WeightSource``; random numbers have a normal distribution with deviation ``DEVIATION``."""
        if fill is not None:
            return torch.full(shape, fill, dtype=dtype or self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        tensor = torch.empty(shape, dtype=torch.float32, device=self.device)
        return tensor.normal_(0.0, DEVIATION, generator=generator).to(dtype or self.dtype)
