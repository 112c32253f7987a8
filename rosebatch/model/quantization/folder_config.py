"""Where a checkpoint says how it is quantized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rosebatch.host.model_files import read_json, refusal
from rosebatch.model.quantization.forms import form_of

# What quantizers write beside config.json, and the method of a file that names none.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def quantization_of(folder: Path, values: Mapping[str, Any]) -> Any:
    """The ``quantization_config`` of a model folder; None if its weights are plain.

    Args:
        folder: of the model.
        values: of its config.json, which wins over other files.

    Raises:
        UserError: a file is broken.
    """
    text = values.get("text_config")
    for each in (values, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if each.get(key):
                return each[key]
    for name, method in _FILES.items():
        path = folder / name
        if path.exists():
            found = read_json(path)
            # ModelOpt's file has the fields inside of another one.
            inner = found.get("quantization")
            config = {"quant_method": method, **(inner if isinstance(inner, dict) else found)}
            try:
                form_of(config)
            except ValueError as error:
                raise refusal(path, error) from None
            return config
    return None
