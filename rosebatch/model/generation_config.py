"""The sampling defaults of a model, from its generation_config.json."""

from pathlib import Path
from typing import Any, get_type_hints

from rosebatch.config.toml_file import convert
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.host.model_files import read_json, refusal

# Our names; all but the last are transformers' names too.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_FIELDS = {name: name for name in (*_SAMPLED, "repetition_penalty")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Fields of a row, by the names of ``SamplingParams``, with the values that the model's authors recommend.

    ``do_sample: false`` is temperature 0. Many files leave ``do_sample`` out and still hold a temperature or a filter:
    their authors meant sampling, so those values count, although transformers would ignore them. Sampling without a
    temperature is at 1, as in transformers; its other hidden default, top_k 50, is not applied.

    Args:
        folder: of the model. Without a generation_config.json there are no fields.

    Raises:
        UserError: the file is unreadable, or a value is out of range.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    stored = {name: value for name, value in read_json(path).items() if value is not None}
    found = {ours: stored[name] for name, ours in _FIELDS.items() if name in stored}
    wants_sampling = any(name in found for name in _SAMPLED)
    if convert(stored.get("do_sample", wants_sampling), bool, f"{path}: do_sample"):
        found.setdefault("temperature", 1.0)
    elif "do_sample" in stored:
        found["temperature"] = 0.0
    types = get_type_hints(SamplingParams)
    typed = {name: convert(value, types[name], f"{path}: {name}") for name, value in found.items()}
    try:
        SamplingParams(**typed)
    except ValueError as error:
        raise refusal(path, error) from None
    return typed
