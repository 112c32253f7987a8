"""The transformers fallback: a network of transformers' as a ``Model``, with our attention and operators inside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.host.model_files import refusal
from rosebatch.model.contract import Attention, ImageRows, rows_of
from rosebatch.model.fallback.attention import attending, running
from rosebatch.model.fallback.check import close, require_tokenwise, waits_for_host
from rosebatch.model.fallback.config import error_text
from rosebatch.model.fallback.fusion import Fusion, spread_positions
from rosebatch.model.fallback.network import (
    Decoder,
    build_network,
    fix_rope,
    network_class,
    our_functions,
    require_decoder,
)
from rosebatch.model.weight_files import weight_files
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.ops import Ops

_SEED = 0
# Tokens of the check of fused layers.
_TOKENS = 12
# Most relative difference of hidden states: rounding adds up over the layers of a random model.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}


class Fallback:
    """A decoder of transformers' as a ``rosebatch.model.contract.Model``.

    Args:
        decoder: on its device.
        config: of the model.
        ops: the operators of the run.
        waits: why its steps cannot be CUDA graphs; None if they can.

    Attributes:
        layers: none that a profiler could name parts of.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, ops: Ops, waits: str | None) -> None:
        self.decoder = decoder
        self.ops = ops
        self.layers: list[Any] = []
        self.mixers = [replace(spec, e4m3=config.stores_e4m3(spec.window)) for spec in decoder.layers.specs]
        self.waits = waits

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """See ``rosebatch.model.contract.SeeingModel``; no vectors are added behind layers."""
        with running(attending(self.mixers, attention)):
            return rows_of(self.decoder.hidden(input_ids.long(), positions.long(), images), wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        return self.decoder.logits(hidden)


def load_fallback(
    hf_config: Any, config: ModelConfig, folder: Path | None, ops: Ops, dtype: torch.dtype, device: torch.device
) -> Fallback:
    """Load a model of transformers'.

    Args:
        hf_config: of transformers.
        config: made of it.
        folder: with safetensors weights; None for random ones.
        ops: the operators of the run.
        dtype: of weights and activations.
        device: of the run.

    Raises:
        UserError: weights are missing, or a layer cannot be served.
    """
    assert config.transformers is not None
    place = folder or config.transformers.architecture
    try:
        network = _random(hf_config, dtype, device) if folder is None else _load(hf_config, folder, dtype, device)
        fix_rope(network, config.max_model_len)
        decoder = Decoder(network)
        if hf_config.get_text_config(decoder=True) is not hf_config:
            for name in decoder.layers.idle:
                # A tower is loaded with the first image.
                setattr(decoder.layers.body, name, None)
        require_tokenwise(decoder, config.vocab_size)
        _fuse_if_same(decoder, config, ops)
    except UserError:
        raise
    except Exception as error:
        raise refusal(place, f"{config.transformers.architecture} is not supported: {error_text(error)}") from None
    if device.type == "cuda":
        # What fusing left free counts as taken otherwise, and the KV cache would be smaller.
        torch.cuda.empty_cache()
    return Fallback(decoder, config, ops, waits_for_host(decoder))


def _fuse_if_same(decoder: Decoder, config: ModelConfig, ops: Ops) -> None:
    """Fuse, unless the whole then computes something else; its parts were checked one by one."""
    device = next(decoder.network.parameters()).device
    ids = decoder.some_ids(_TOKENS, device)
    positions = spread_positions(_TOKENS, config.max_model_len, device)
    before = decoder.hidden_per_token(ids, positions)
    with torch.no_grad():
        fusion = Fusion(decoder, ops, config.max_model_len)
        try:
            fusion.run()
            same = close(decoder.hidden_per_token(ids, positions), before, _TOLERANCE[before.dtype])
        except (KeyError, RuntimeError, TypeError, AttributeError):
            # A part of the network needed something from a part that is no longer run.
            same = False
    if same:
        fusion.release()
    else:
        fusion.undo()


def _random(hf_config: Any, dtype: torch.dtype, device: torch.device) -> Module:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return build_network(hf_config, dtype, device)


def _load(hf_config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Module:
    SafetensorsWeights(folder, dtype, device).require_plain_matrices()
    files, whole = weight_files(folder), folder / "model.safetensors"
    # transformers finds one file, or those of an index.
    shards = None if whole in files or whole.with_name(f"{whole.name}.index.json").exists() else files
    network, info = network_class(hf_config).from_pretrained(
        str(folder) if shards is None else None,
        state_dict=None if shards is None else {k: v for file in shards for k, v in load_file(file).items()},
        config=hf_config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **our_functions(),
    )
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise ValueError(f"weights have {what.replace('_', ' ')}: {sorted(map(str, info[what]))[0]}")
    return require_decoder(network.to(device))
