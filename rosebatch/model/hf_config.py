"""From transformers' config.json to ModelConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rosebatch.config import MOST_LAYERS, MOST_SIZE, ModelConfig, convert
from rosebatch.host.model_files import read_json, refusal, shown
from rosebatch.ops import ACTIVATIONS

# The defaults of transformers' config classes, for fields that config.json leaves out.
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"eos_token_id": 50256},
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3ForCausalLM": {**_QWEN_DEFAULTS, "head_dim": 128},
    # A format of our own: transformers has no such class.
    "HP1ForCausalLM": {},
}
ARCHITECTURES = tuple(_DEFAULTS)
# Sizes that others are computed of.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_BY_MODEL_TYPE = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "hp1": "HP1ForCausalLM",
}


_LAYER_TYPES = ("sliding_attention", "full_attention")


def read_model_config(folder: Path) -> ModelConfig:
    """The shape of the model in a folder, from config.json. The end tokens in generation_config.json win.

    Raises:
        UserError: a file is missing or broken, or rosebatch does not support the architecture or one of its options.
    """
    path = folder / "config.json"
    if not path.exists():
        raise refusal(path, "no such file; a model folder holds config.json and .safetensors weights")
    values = read_json(path)
    generation = folder / "generation_config.json"
    if generation.exists():
        values = {**values, **{k: v for k, v in read_json(generation).items() if k == "eos_token_id"}}
    return parse_model_config(values, str(path))


def is_native(folder: Path) -> bool:
    """Whether rosebatch has the architecture that config.json names, or there is no readable config.json."""
    path = folder / "config.json"
    return not path.exists() or _named_architecture(read_json(path)) in ARCHITECTURES


def parse_model_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Like ``read_model_config``, but from parsed JSON. Errors start with ``source``."""
    architecture = _architecture(values, source)
    if values.get("quantization_config"):
        raise refusal(source, "quantized checkpoints are not supported: use the 16-bit weights of the model")
    values = {**_DEFAULTS[architecture], **values}
    try:
        fields = _fields(architecture, values)
    except KeyError as error:
        raise refusal(source, f"{error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise refusal(source, error) from None
    eos = values.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    return convert({**fields, "eos_token_ids": eos_ids, "dtype": dtype}, ModelConfig, source)


def _named_architecture(values: Mapping[str, Any]) -> Any:
    named = values.get("architectures") or [None]
    first = named[0] if isinstance(named, list) else named
    return first or _BY_MODEL_TYPE.get(str(values.get("model_type"))) or values.get("model_type")


def _architecture(values: Mapping[str, Any], source: str) -> str:
    architecture = _named_architecture(values)
    if architecture not in ARCHITECTURES:
        name = shown(architecture).strip("'")
        raise refusal(source, f"{name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return str(architecture)


def _fields(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if architecture == "GPT2LMHeadModel":
        return _gpt2(values)
    return _hp1(values) if architecture == "HP1ForCausalLM" else _llama(architecture, values)


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    hidden, layers, heads = (_size(values, name) for name in ("n_embd", "n_layer", "n_head"))
    head_dim = hidden // heads
    scale = head_dim**-0.5 if values.get("scale_attn_weights", True) else 1.0
    by_layer = values.get("scale_attn_by_inverse_layer_idx", False)
    return {
        "family": "gpt2",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "max_model_len": values.get("n_positions", 1024),
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "activation": _supported("activation_function", values.get("activation_function", "gelu_new"), ACTIVATIONS),
        "tie_word_embeddings": values.get("tie_word_embeddings", True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "attention_scales": [scale / (i + 1 if by_layer else 1) for i in range(layers)],
    }


def _llama(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    hidden, layers, heads = (_size(values, name) for name in _SIZES)
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = values.get("attention_bias", False) and architecture in (
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    )
    return {
        "family": "llama",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "intermediate_size": values["intermediate_size"],
        "max_model_len": values["max_position_embeddings"],
        "norm_eps": values["rms_norm_eps"],
        "activation": _supported("hidden_act", values.get("hidden_act", "silu"), ("silu",)),
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
        "qkv_bias": qwen2 or attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": values.get("mlp_bias", False) and architecture == "LlamaForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "sliding_windows": _sliding_windows(architecture, values),
        "rope": _rope(values),
    }


def _hp1(values: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if values.get(name):
            raise ValueError(f"{name} is not supported")
    hidden, layers, heads = (_size(values, name) for name in _SIZES)
    return {
        "family": "hp1",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "intermediate_size": values["intermediate_size"],
        "max_model_len": values["max_position_embeddings"],
        "activation": _supported("hidden_act", values.get("hidden_act", "relu"), ("relu",)),
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
        "rope": _rope(values),
        "hp1": {name: values[name] for name in ("fir_k", "relu_pre", "clip_min", "clip_max") if name in values},
    }


def _sliding_windows(architecture: str, values: Mapping[str, Any]) -> list[int]:
    layers, window = values["num_hidden_layers"], values.get("sliding_window")
    if architecture == "MistralForCausalLM" and window:
        return [window] * layers
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and values.get("use_sliding_window") and window:
        first = values.get("max_window_layers", 28)
        default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        kinds = [_supported("layer_types", kind, _LAYER_TYPES) for kind in values.get("layer_types") or default]
        return [window * (kind == "sliding_attention") for kind in kinds]
    return []


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes one dict; transformers 4 wrote base and scaling separately.
    stored = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(stored, dict):
        raise ValueError(f"the scaling of rotary positions is no object: {shown(stored)}")
    kind = stored.get("rope_type") or stored.get("type") or "default"
    rope = {
        "theta": stored.get("rope_theta") or values.get("rope_theta") or 10000.0,
        "scaling": _supported("rope_type", kind, ("default", "linear", "llama3")),
    }
    if stored.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind != "default":
        rope["factor"] = stored["factor"]
    if kind == "llama3":
        original = stored.get("original_max_position_embeddings") or values["max_position_embeddings"]
        rope |= {name: stored[name] for name in ("low_freq_factor", "high_freq_factor")}
        rope["original_max_position_embeddings"] = original
    return rope


def _supported(option: str, value: Any, supported: Any) -> Any:
    if value not in supported:
        raise ValueError(f"{option} {shown(value)} is not supported; supported are {', '.join(supported)}")
    return value


def _size(values: Mapping[str, Any], name: str) -> int:
    """A size, checked before anything is computed of it."""
    value = values[name]
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}")
    most = MOST_LAYERS if "layer" in name else MOST_SIZE
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be in [1, {most}], got {shown(value)}")
    return value
