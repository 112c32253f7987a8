"""Settings by vLLM's names, for scripts that were written for it."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.sampling_params import MAX_LOGPROBS

# vLLM's names of our switches.
_SWITCHES = {"enable_prefix_caching": "prefix_cache", "enable_chunked_prefill": "chunked_prefill"}
# Its parameters and ours that change nothing here, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (None, True, False),
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": (True, False),
    "disable_log_stats": (True, False),
    "distributed_executor_backend": (None, "mp", "uni"),
    "enable_lora": (False,),
    "enforce_eager": (False,),
    "kv_cache_dtype": ("auto",),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "ray": (None,),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "swap_space": (0, 4),
    "task": (None, "auto", "generate", "embed"),
    "download_dir": (None,),
    "hf_overrides": (None, {}),
    "limit_mm_per_prompt": (None, {}),
    "max_logprobs": tuple(range(MAX_LOGPROBS + 1)),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (True, False),
}
# Parameters of its calls, likewise.
_NEUTRAL_IN_CALLS: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_content_format": ("auto", "string"),
    "lora_request": (None,),
    "mm_processor_kwargs": (None, {}),
    "priority": (None, []),
    "tokenization_kwargs": (None, {}),
    "truncate_prompt_tokens": (None,),
}
# Its names of values that have others here.
_VALUES = {
    "load_format": {"safetensors": "auto"},
    "generation_config": {"vllm": "none"},
    "model_impl": {"vllm": "auto"},
}
_DTYPES = {"half": "float16", "float": "float32"}


def own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by our names.

    Raises:
        ValueError: one of vLLM's has a value that is not served.
    """
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "enforce_eager" and value is True:
            own["cuda_graph"] = False
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ValueError(f"{name}={value!r} is not served")
        else:
            own[_SWITCHES.get(name, name)] = value
    for name, values in _VALUES.items():
        if name in own:
            own[name] = values.get(own[name], own[name])
    if "dtype" in own:
        own["dtype"] = _DTYPES.get(own["dtype"], str(own["dtype"]).removeprefix("torch."))
    return own


def require_neutral(call: str, given: Mapping[str, Any]) -> None:
    """Check that parameters of a call, which are vLLM's, ask for nothing.

    Raises:
        TypeError: there is no such parameter.
        ValueError: it asks for something that is not served.
    """
    for name, value in given.items():
        if name not in _NEUTRAL_IN_CALLS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if value not in _NEUTRAL_IN_CALLS[name] and not (name == "priority" and len(set(value)) == 1):
            raise ValueError(f"{name}={value!r} is not served")
