"""The sampling defaults of a model, from its generation_config.json."""

from pathlib import Path
from typing import Any, get_type_hints

from rosebatch.config.toml_file import convert
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.host.model_files import read_json, refusal

# Our names; all but the last are transformers' names too.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_FIELDS = {name: name for name in (*_SAMPLED, "repetition_penalty")} | {"max_new_tokens": "max_tokens"}

# What llama.cpp samples by besides, by the names of GGUF's ``general.sampling``. Its penalty is for the last 64 tokens.
UNSERVED_OF_GGUF: dict[str, tuple[Any, ...]] = {"penalty_repeat": (1,), "mirostat": (0,), "xtc_probability": (0,)}
# What transformers samples by besides, with the values that change nothing. Beams are not sampling.
_NOT_SERVED: dict[str, tuple[Any, ...]] = UNSERVED_OF_GGUF | {
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "suppress_tokens"), ([], {})),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), ([],)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams", "top_h", "typical_p"), (1,)),
    "num_return_sequences": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("penalty_alpha", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("dola_layers", "exponential_decay_length_penalty", "stop_strings", "watermarking_config"), ([],)),
}


def unserved_defaults(folder: Path) -> list[str]:
    """Names in a model's generation_config.json that ask for sampling that is not served.

    Raises:
        UserError: the file is unreadable.
    """
    path = folder / "generation_config.json"
    stored = read_json(path) if path.exists() else {}
    return [name for name, neutral in _NOT_SERVED.items() if stored.get(name) not in (None, *neutral)]


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
    theirs = {ours: name for name, ours in _FIELDS.items()}
    typed = {name: convert(value, types[name], f"{path}: {theirs[name]}") for name, value in found.items()}
    try:
        SamplingParams(**typed)
    except ValueError as error:
        raise refusal(path, str(error).replace("max_tokens", theirs["max_tokens"])) from None
    return typed
