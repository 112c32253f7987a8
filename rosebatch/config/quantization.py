"""What ``--quantization`` may be."""

# Ours, and vLLM's name of the same.
_OWN = {"auto": "auto", "none": "none", "fp8": "fp8", "fp8_per_channel": "fp8"}
# Other engines' names of what a checkpoint says itself, by its ``quant_method``.
_METHODS = {
    "awq": ("awq", "awq_marlin"),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors", "compressed_tensors"),
    "gptq": ("gptq", "gptq_marlin"),
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8"),
    "mxfp4": ("mxfp4",),
}
QUANTIZATIONS = _OWN | {name: method for method, names in _METHODS.items() for name in names}


def quantization_named(name: str) -> str:
    """``auto``, ``none``, ``fp8``, or the ``quant_method`` that the checkpoint should have.

    Raises:
        ValueError: the name is not served.
    """
    if name not in QUANTIZATIONS:
        methods = ", ".join(_METHODS)
        raise ValueError(f"quantization must be auto, fp8, none, or what the checkpoint is ({methods}), got {name!r}")
    return QUANTIZATIONS[name]
