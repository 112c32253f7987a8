"""Where a model's tensors come from: the safetensors files of a folder, or random numbers."""

import json
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rosebatch.errors import UserError

# Of random weights.
DEVIATION = 0.02


class WeightSource(Protocol):
    """Tensors by transformers' names."""

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """The tensor, on the run's device.

        Args:
            name, shape: of the tensor.
            dtype: None for the run's.
            fill: what all of it is where weights are random; None for random numbers.

        Raises:
            UserError: it is missing, unreadable or has another shape.
        """
        ...


class SafetensorsWeights:
    """The tensors of a model folder: one ``.safetensors`` file or several.

    Raises:
        UserError: there is no such file, or one is broken.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                handle = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: unreadable weights ({error})") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """See ``WeightSource``. A checkpoint of the bare transformer lacks the first part of each name."""
        if name not in self._files:
            name = name.partition(".")[2] if name.partition(".")[2] in self._files else name
        if name not in self._files:
            raise UserError(f"{self.folder}: weights have no tensor {name!r}")
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder}: tensor {name!r} is unreadable ({error})") from None
        if tuple(tensor.shape) != shape:
            raise UserError(f"{self.folder}: tensor {name!r} has shape {tuple(tensor.shape)}, config says {shape}")
        return tensor.to(self.device, dtype or self.dtype)


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names; without one ``model.safetensors``, or whatever there is."""
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
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no .safetensors weights in this folder")
    return files


class RandomWeights:
    """Tensors made of random numbers, the same for the same name and seed: for benches and kernel work."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self.seed = seed

    def get(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, fill: float | None = None
    ) -> Tensor:
        """See ``WeightSource``; random numbers are normal with a deviation of ``DEVIATION``."""
        if fill is not None:
            return torch.full(shape, fill, dtype=dtype or self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        tensor = torch.empty(shape, dtype=torch.float32, device=self.device)
        return tensor.normal_(0.0, DEVIATION, generator=generator).to(dtype or self.dtype)
