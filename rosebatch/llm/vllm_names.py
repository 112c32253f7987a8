"""Settings by vLLM's names, for scripts that were written for it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rosebatch.config.run import DTYPES, KV_CACHE_DTYPES
from rosebatch.core.not_served import not_served
from rosebatch.core.plain import dtype_name
from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.io.fields import SAMPLING_FIELDS

# vLLM's names of our switches and settings.
_NAMES = {
    "allowed_local_media_path": "media_root",
    "allowed_media_domains": "media_domains",
    "enable_chunked_prefill": "chunked_prefill",
    "enable_prefix_caching": "prefix_cache",
}
# Its settings that change nothing here, whatever their value.
_IGNORED = {
    "async_scheduling",
    "attention_backend",
    "calculate_kv_scales",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "fully_sharded_loras",
    "guided_decoding_backend",
    "lora_dtype",
    "lora_extra_vocab_size",
    "max_cpu_loras",
    "max_lora_rank",
    "max_seq_len_to_capture",
    "swap_space",
    "trust_remote_code",
    "use_tqdm_on_load",
}
# Its settings and ours that change nothing here, with the values that change nothing beside None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "cpu_offload_gb": (0,),
    "distributed_executor_backend": ("mp", "uni"),
    "enable_lora": (False,),
    "enforce_eager": (False,),
    "pipeline_parallel_size": (1,),
    "ray": (),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "score", "classify", "token_classify", "reward"),
    "code_revision": (),
    "compilation_config": ({},),
    "config_format": ("auto", "hf"),
    "disable_sliding_window": (False,),
    "download_dir": (),
    "enable_expert_parallel": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "hf_overrides": ({},),
    "hf_token": (False,),
    "kv_transfer_config": (),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": tuple(range(MAX_LOGPROBS + 1)),
    "mm_processor_kwargs": ({},),
    "model_loader_extra_config": ({},),
    "num_gpu_blocks_override": (),
    "override_generation_config": ({},),
    "override_pooler_config": (),
    "pooler_config": (),
    "rope_scaling": ({},),
    "rope_theta": (),
    "speculative_config": (),
    "structured_outputs_config": ({}, *({"backend": each} for each in ("auto", "guidance", "outlines", "xgrammar"))),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (),
}
# Parameters of its calls, likewise.
_NEUTRAL_IN_CALLS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "priority": ([],),
    "tokenization_kwargs": ({},),
    "truncate_prompt_tokens": (),
}
# Parameters of its calls that have another form here.
_OTHER_FORMS = {
    "prompt_token_ids": "give token ids as prompts: generate([[1, 2, 3], [4, 5]])",
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(…))",
}
# Methods of its LLM, by what serves here instead.
_METHODS = {
    "use embed, classify or reward; get_tokenizer() for token ids": "encode",
    "use close(), and make the LLM again": "sleep wake_up",
    "use rosebatch bench --profile": "start_profile stop_profile",
    "an output has its metrics": "get_metrics",
    "a cached prefix changes no answer; close() frees all": "reset_prefix_cache reset_mm_cache reset_encoder_cache",
    "use get_tokenizer().apply_chat_template(…)": "preprocess_chat",
    "weights cannot be read or changed": "apply_model collective_rpc get_model update_weights",
    "use tokenizer= of LLM": "set_tokenizer",
    "use stream for prompts that come one by one": "enqueue wait_for_completion",
    "plan has what was decided at load": "llm_engine model_config supported_tasks",
}
_HINTS = {name: hint for hint, names in _METHODS.items() for name in names.split()}
# Its names of values that have others here.
_VALUES: dict[str, dict[Any, str]] = {
    "load_format": {"safetensors": "auto"},
    "generation_config": {"vllm": "none"},
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "model_impl": {"vllm": "auto"},
}


class WithoutMethods:
    """A class that lacks methods of vLLM's ``LLM``: whoever asks for one is told what serves instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f": {_HINTS[name]}" if name in _HINTS else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{hint}", name=name, obj=self)


def own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by our names.

    Raises:
        ValueError: one of vLLM's has a value that is not served.
    """
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "enforce_eager" and value is True:
            own["cuda_graph"] = False
        elif name == "enable_lora" and value is True and settings.get("lora"):
            continue
        elif name == "allowed_local_media_path" and value == "":
            # vLLM's default: no file may be read.
            continue
        elif name == "limit_mm_per_prompt":
            own |= _limit_of_images(value)
        elif name == "mm_processor_kwargs" and isinstance(value, Mapping) and set(value) == {"max_pixels"}:
            own["max_pixels"] = value["max_pixels"]
        elif name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise not_served(name, value)
        elif name not in _IGNORED:
            own[_NAMES.get(name, name)] = value
    for name, values in _VALUES.items():
        if name in own:
            own[name] = values.get(own[name], own[name])
    if own.get("dtype") is not None:
        own["dtype"] = DTYPES.get(own["dtype"], dtype_name(own["dtype"]))
    return own


def _limit_of_images(given: Any) -> dict[str, Any]:
    """Of other kinds of inputs there is none, whatever their limit."""
    limits = {} if given is None else given
    if not isinstance(limits, Mapping) or not isinstance(limit := limits.get("image"), int | None):
        raise not_served("limit_mm_per_prompt", given)
    return {} if limit is None else {"limit_images": limit}


def require_neutral(call: str, given: Mapping[str, Any]) -> None:
    """Check that parameters of a call, which are vLLM's, ask for nothing.

    Raises:
        TypeError: there is no such parameter.
        ValueError: it asks for something that is not served.
    """
    for name, value in given.items():
        if name in _OTHER_FORMS:
            raise TypeError(f"{call}(): {name} is not served: {_OTHER_FORMS[name]}")
        if name in SAMPLING_FIELDS:
            raise TypeError(f"{call}(): {name} is a field of SamplingParams: {call}(…, SamplingParams({name}=…))")
        if name not in _NEUTRAL_IN_CALLS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        is_neutral = value is None or value in _NEUTRAL_IN_CALLS[name]
        if not is_neutral and not (name == "priority" and len(set(value)) == 1):
            raise not_served(name, value)
