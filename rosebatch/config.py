"""The frozen configs of a run: the shape of a model, the limits of the engine, and their TOML files."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rosebatch.errors import FlagError, UserError

Sampler = Literal["rosebatch", "flashinfer"]


class RopeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rotary position embedding: base frequency and how it is stretched past the trained length.

    ``llama3`` needs all four factors, ``linear`` only ``factor``. Names as in transformers' configs.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class HP1Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gate of HP1 attention; ``rosebatch_kernels.hp1.reference`` has the formula.

    Attributes:
        relu_pre: whether only the positive part of a score is subtracted from others.
        clip_min, clip_max: bounds of a weight before its head's factor.
    """

    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip_min) and math.isfinite(self.clip_max)):
            raise ValueError(f"clip_min and clip_max must be finite, got {self.clip_min} and {self.clip_max}")
        if self.clip_min > self.clip_max:
            raise ValueError(f"clip_min {self.clip_min} is above clip_max {self.clip_max}")


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a model; everything the engine, the weights and a memory estimate need to know.

    Attributes:
        family: which file of ``rosebatch.model`` builds it.
        max_model_len: most tokens of prompt and completion together.
        norm_eps: of RMSNorm and LayerNorm; the norms of hp1 have none.
        activation: of the MLP, by transformers' name.
        qkv_bias, out_bias, mlp_bias: whether those projections have one (GPT-2 has them all).
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        sliding_windows: for each layer the number of keys a query sees, 0 for all; empty means all, everywhere.
        attention_scales: for each layer the factor on q·k; empty means head_dim ** -0.5 everywhere.
        rope: None where positions are learned embeddings.
        hp1: the gate of attention, of that family only.
        dtype: of the checkpoint; ``auto`` on the command line starts from it.
    """

    family: Literal["gpt2", "llama", "hp1"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    norm_eps: float = 0.0
    activation: str
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    attention_scales: tuple[float, ...] = ()
    rope: RopeConfig | None = None
    hp1: HP1Config | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        hp1 = self.family == "hp1"
        if hp1 is (self.hp1 is None):
            raise ValueError(
                "hp1 is missing: the gate of attention" if hp1 else f"hp1 has no meaning for {self.family}"
            )
        if hp1 is (self.norm_eps > 0):
            raise ValueError("norm_eps has no meaning for hp1" if hp1 else f"norm_eps must be > 0, got {self.norm_eps}")
        for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_windows"):
            if hp1 and getattr(self, name):
                raise ValueError(f"{name} is not supported for hp1")
        if hp1 and self.activation != "relu":
            raise ValueError(f"activation {self.activation!r} is not supported for hp1: its MLP has relu")

    def sliding_window(self, layer: int) -> int:
        """Keys a query of this layer sees, its own included; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def attention_scale(self, layer: int) -> float:
        """Factor on q·k in this layer."""
        return self.attention_scales[layer] if self.attention_scales else self.head_dim**-0.5


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of the engine.

    Attributes:
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step, the chunk size of prefill; 0 lets the device decide.
        block_size: tokens of a KV cache block; 0 lets the device decide.
        kv_cache_memory: bytes of KV cache; 0 lets the device decide.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    block_size: int = 0
    kv_cache_memory: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 0),
            ("block_size", 0),
            ("kv_cache_memory", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")


ConfigT = TypeVar("ConfigT")


def convert(values: Any, kind: type[ConfigT], source: str) -> ConfigT:
    """Build a config from plain values.

    Raises:
        UserError: an unknown key, a wrong type or an impossible value; ``source`` says where it stands.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"{source}: {error}") from None


def load_toml(path: Path, kind: type[ConfigT]) -> ConfigT:
    """Read a config from a TOML file.

    Raises:
        UserError: the file cannot be read, is no TOML, or does not fit ``kind``.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    return convert(values, kind, str(path))


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Bytes of ``512MiB``, ``4GB`` or a plain number.

    Raises:
        FlagError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise FlagError(f"{text!r} is no size in bytes: write it like 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
