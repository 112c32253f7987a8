"""Tiny random models of transformers' families, and engines that are loaded from their folders."""

from pathlib import Path
from typing import Any

import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine
from rosebatch.model.fallback.network import network_class
from rosebatch.model.source import find_model


def random_model(config: Any, kind: Any = None, *, plain: bool = False, **options: Any) -> Any:
    """A model of transformers in fp32, always the same.

    Args:
        config: of transformers.
        kind: transformers' class; None for that of the config with an output projection.
        plain: norms are at one and biases at zero. A model could ignore them without failing a test.
        options: of ``_from_config``.
    """
    torch.manual_seed(0)
    if kind is None:
        model = network_class(config)._from_config(config, dtype=torch.float32, **options).eval()
    else:
        model = kind(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not plain:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    means = {"correction_bias": 0.0, "expert_bias": 0.0, "layer_scalar": 1.0}
    for name, buffer in model.named_buffers():
        for mean in (mean for end, mean in means.items() if name.endswith(end) and not plain):
            torch.nn.init.normal_(buffer, mean, 0.2)
    return model


def engine_of(
    folder: Path,
    dtype: str = "float32",
    device: str = "cpu",
    *,
    blocks: int = 0,
    switches: dict[str, bool] | None = None,
    max_model_len: int | None = None,
    model_impl: str = "auto",
    kv_cache_dtype: str = "auto",
    speculative_model: str | None = None,
    lora: tuple[str, ...] = (),
    quantization: str = "auto",
    **limits: int,
) -> Engine:
    """An engine on a model's folder, with ``blocks`` of KV cache; 0 gives plenty. Limits are of ``RunConfig``."""
    on = torch.device(device)
    model = {"max_model_len": max_model_len, "model_impl": model_impl, "kv_cache_dtype": kv_cache_dtype}
    model |= {"speculative_model": speculative_model, "lora": lora, "quantization": quantization}
    source = find_model(RunConfig(model=str(folder), dtype=dtype, **model), on)
    block_size = limits.setdefault("block_size", 16)
    planes = [*source.config.kv_planes, source.draft_planes]
    memory = blocks * bytes_per_block(planes, block_size, source.dtype) or 1 << 26
    config = RunConfig(**{"kv_cache_memory": memory, **limits})
    return load_engine(source, config, Switches.resolve(switches or {}, on.type), on).engine
