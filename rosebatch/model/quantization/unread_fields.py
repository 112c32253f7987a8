"""Fields of a ``quantization_config`` that no form reads, and that are not known to change nothing."""

from collections.abc import Callable, Mapping
from typing import Any

# How a checkpoint was made, how activations and the KV cache are quantized, what tensors say themselves.
_OF_NO_WEIGHT = {
    *("quant_method", "method", "activation_scheme", "scale_fmt", "kv_cache_scheme", "kv_cache_quant_algo", "producer"),
    *("quantization_status", "global_compression_ratio", "version", "quantizer", "meta", "uuid", "backend"),
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "batch_size", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "pad_token_id", "cache_block_outputs"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "lm_head"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "do_fuse"),
    *("fuse_max_seq_len", "modules_to_fuse", "modules_to_not_convert", "load_in_4bit", "load_in_8bit"),
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
    *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    *("llm_int8_skip_modules", "llm_int8_threshold", "group_size", "config_groups", "quantized_layers", "dequantize"),
}
# The same in objects of the config.
_OF_NO_WEIGHT_INSIDE = _OF_NO_WEIGHT | {
    *("targets", "format", "input_activations", "output_activations"),
    *("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype"),
}


class _Recorded(dict[str, Any]):
    """Keeps the names that are asked for, in the objects inside too."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: _Recorded(each) if isinstance(each, dict) else each for name, each in values.items()})
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """See ``dict``."""
        self.names.add(name)
        return super().get(name, default)

    def unread(self, known: set[str]) -> list[str]:
        """Names with a value that nobody asked for, those of an object after its own name."""
        given = {name for name, value in self.items() if value not in (None, False, [], {})}
        found = [*(given - self.names - known)]
        # An object is read if one of its fields is; another one is what its name says.
        inside = [(name, each) for name, each in self.items() if isinstance(each, _Recorded) and each.names]
        return found + [f"{name}.{inner}" for name, each in inside for inner in each.unread(_OF_NO_WEIGHT_INSIDE)]


def unread_fields(config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]) -> tuple[str, ...]:
    """Names of such fields, if they have a value.

    Args:
        config: ``quantization_config``.
        read: what a form makes of it.
    """
    recorded = _Recorded(config)
    read(recorded)
    return tuple(sorted(recorded.unread(_OF_NO_WEIGHT)))
