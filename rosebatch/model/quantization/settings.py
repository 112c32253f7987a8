"""Where a checkpoint says how it is quantized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rosebatch.host.model_files import read_json, refusal
from rosebatch.model.quantization.formats import form_of
from rosebatch.model.weights import Form

_KEY = "quantization_config"
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
        for key in (_KEY, "compression_config"):
            if each.get(key):
                return each[key]
    for name, method in _FILES.items():
        path = folder / name
        if path.exists():
            found = read_json(path)
            # ModelOpt's file has the fields inside of another one.
            inner = found.get("quantization")
            config = {"quant_method": method, **(inner if isinstance(inner, dict) else found)}
            _form_of(config, path)
            return config
    return None


def read_form(folder: Path) -> Form | None:
    """The form of the matrices in a model folder; None for plain floats.

    Raises:
        UserError: a file is broken, or the form is not served; the message names the field.
    """
    path = folder / "config.json"
    return _form_of(quantization_of(folder, read_json(path)), path)


def _form_of(config: Any, path: Path) -> Form | None:
    try:
        return form_of(config)
    except ValueError as error:
        raise refusal(path, error) from None
