"""Settings by vLLM's names, for scripts that were written for it."""

from collections.abc import Mapping
from typing import Any

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
    "seed": (None, 0),
    "skip_tokenizer_init": (False,),
    "swap_space": (0, 4),
    "task": (None, "auto", "generate", "embed"),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (True, False),
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
    if "dtype" in own:
        own["dtype"] = _DTYPES.get(own["dtype"], str(own["dtype"]).removeprefix("torch."))
    return own
