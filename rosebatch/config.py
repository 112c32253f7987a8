"""The frozen configs: how a run is set up, the shape of a model, and TOML files of both kinds of values."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, overload

import msgspec

from rosebatch.errors import FlagError, UserError
from rosebatch.host.model_files import refusal, shown
from rosebatch.toggles import SWITCH_NAMES

Sampler = Literal["rosebatch", "flashinfer"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "rosebatch", "transformers"]
InputFormat = Literal["auto", "jsonl", "openai", "parquet"]
GenerationConfig = Literal["none", "auto"]


# Of any size of a model: far above those of all models, and low enough to compute with.
MOST_SIZE = 2**24
MOST_LAYERS = 2**12
# Keys that the filter of HP1 spans: its kernels keep a sum for each in registers.
_MOST_TAPS = 8
# Tokens that the convolution before the delta rule spans: a tile of the kernel keeps them.
_MOST_DELTA_TAPS = 16
# Experts of a layer: a program of the router holds all their logits.
_MOST_EXPERTS = 2**12
# Kernels hold token ids and positions in 32 bits.
_MOST_ID = 2**31
_SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "intermediate_size", "max_model_len"),
)


class RopeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rotary position embedding: base frequency and how it is stretched past the trained length.

    Names as in transformers' configs. ``linear`` needs ``factor``. ``llama3`` needs it too, with the two frequency
    factors; ``yarn`` with the two betas. ``longrope`` needs the two lists.

    Attributes:
        original_max_position_embeddings: trained length, for all kinds but ``linear``.
        attention_factor: on cos and sin, for ``yarn`` and ``longrope``.
        truncate: whether yarn rounds the bounds of its ramp to whole channels.
        short_factor, long_factor: of each channel pair; the second holds where the model's most tokens exceed the
            trained length.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for name in (*names, "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {shown(value)}")
        if self.original_max_position_embeddings > MOST_SIZE:
            raise ValueError(f"original_max_position_embeddings must be in [1, {MOST_SIZE}]")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        if self.scaling == "yarn" and self.theta == 1:
            raise ValueError("theta must not be 1 with yarn")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if (self.scaling == "longrope") is not bool(factors):
                raise ValueError(f"{name} is {'missing' if not factors else 'for longrope only'}")
            if any(not 0 < factor < math.inf for factor in factors):
                raise ValueError(f"{name} must have positive numbers")


class HP1Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gate of HP1 attention; the formula is in ``rosebatch_kernels.hp1.reference``.

    Attributes:
        fir_k: keys that the filter spans, the key itself included.
        relu_pre: subtract only the positive part of a score from others.
        clip_min, clip_max: bounds of a weight before its head's factor.
    """

    fir_k: int = 3
    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.fir_k <= _MOST_TAPS:
            raise ValueError(f"fir_k must be in [1, {_MOST_TAPS}], got {shown(self.fir_k)}")
        if not (math.isfinite(self.clip_min) and math.isfinite(self.clip_max)):
            raise ValueError(f"clip_min and clip_max must be finite, got {self.clip_min} and {self.clip_max}")
        if self.clip_min > self.clip_max:
            raise ValueError(f"clip_min {self.clip_min} is above clip_max {self.clip_max}")


class DeltaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gated delta rule of some layers; the formula is in ``rosebatch_kernels.gated_delta.decode``.

    Attributes:
        layers: whether a layer has the rule in place of attention, for each layer.
        key_heads, value_heads: a key head serves ``value_heads / key_heads`` value heads.
        key_dim, value_dim: of a head of each kind.
        taps: tokens that the convolution spans, the token itself included.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= MOST_SIZE:
                raise ValueError(f"{name} must be in [1, {MOST_SIZE}], got {shown(getattr(self, name))}")
        if not 1 <= self.taps <= _MOST_DELTA_TAPS:
            raise ValueError(f"taps must be in [1, {_MOST_DELTA_TAPS}], got {shown(self.taps)}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is no multiple of key_heads {self.key_heads}")
        if all(self.layers):
            raise ValueError("a model whose layers all have the delta rule is not supported")

    @property
    def memory_bytes(self) -> int:
        """Bytes of a sequence's matrices in one layer, which are fp32."""
        return 4 * self.value_heads * self.key_dim * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in one layer, activations of ``itemsize``."""
        return self.memory_bytes + self.taps * self.channels * itemsize

    @property
    def channels(self) -> int:
        """Of q, k and v together, which the convolution mixes over time."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class ExpertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Routed experts in place of the MLP of some layers.

    Attributes:
        layers: whether a layer has experts, for each layer; the others have a dense MLP of ``intermediate_size``.
        num_experts: of a layer.
        experts_per_token: those that a token goes through.
        expert_size: inner size of an expert.
        normalize: whether the weights of a token's experts sum to 1.
        shared_size: inner size of an expert that all tokens go through; 0 for none.
        shared_gate: whether that has a gate, one number for each token.
    """

    layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    expert_size: int
    normalize: bool = True
    shared_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= _MOST_EXPERTS:
            raise ValueError(f"num_experts must be in [1, {_MOST_EXPERTS}], got {shown(self.num_experts)}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token must be in [1, {self.num_experts}], got {self.experts_per_token}")
        if not 1 <= self.expert_size <= MOST_SIZE:
            raise ValueError(f"expert_size must be in [1, {MOST_SIZE}], got {shown(self.expert_size)}")
        if not 0 <= self.shared_size <= MOST_SIZE:
            raise ValueError(f"shared_size must be in [0, {MOST_SIZE}], got {shown(self.shared_size)}")


# By the class that builds a model: families differ in how a layer is made, or in the names of its tensors.
Family = Literal[
    "gpt2",
    "llama",
    "mixtral",
    "gpt_oss",
    "gemma",
    "phi3",
    "olmo2",
    "glm4",
    "stablelm",
    "cohere",
    "gpt_neox",
    "starcoder2",
    "qwen3_next",
    "qwen3_5",
    "hp1",
    "transformers",
]
_DELTA_FAMILIES = ("qwen3_next", "qwen3_5")
_EXPERT_FAMILIES = ("llama", "mixtral", "gpt_oss", *_DELTA_FAMILIES)
_NOT_OF_DELTA = ("sliding_windows", "attention_scales", "attention_soft_cap")
_NOT_OF_HP1 = (
    *("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_windows", "attention_soft_cap", "logit_soft_cap"),
    *("sliding_rope", "rotary_layers", "rotary_dim", "parallel_residual"),
)


class KVShape(NamedTuple):
    """The K and V that one layer keeps of a token."""

    kv_heads: int
    head_dim: int


class TransformersShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a model that runs by transformers' own code, as far as ``ModelConfig`` has no field for it.

    Attributes:
        architecture: transformers' class.
        layer_weights: of the matrices in all layers.
        active_weights: those of them that a token is multiplied with; fewer where a router chooses experts.
        kv_shapes: of each layer.
    """

    architecture: str
    layer_weights: int
    active_weights: int
    kv_shapes: tuple[KVShape, ...]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a model: what the engine, the weights and a memory estimate need to know.

    Attributes:
        family: the class of ``rosebatch.model.registry`` that builds it.
        max_model_len: most tokens of prompt and completion together.
        norm_eps: of RMSNorm and LayerNorm; hp1 has none.
        activation: of the MLP, in transformers' spelling.
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias (GPT-2 has them all).
        qk_norm: whether q and k are normalised before the rotation; the family says how.
        sliding_windows: keys that a query sees, for each layer, 0 for all; empty means all in every layer.
        attention_scales: factor on q·k, for each layer; empty means head_dim ** -0.5 in every layer.
        attention_soft_cap, logit_soft_cap: a score or logit x becomes cap · tanh(x / cap); 0 for no cap.
        rope: None if positions are learned embeddings.
        sliding_rope: of layers with a sliding window, if it is another one (Gemma 3).
        rotary_layers: whether a layer has rotary positions, for each layer; empty means all.
        rotary_dim: the first channels of a head that are rotated; 0 for all. The last pair of an odd number is whole.
        parallel_residual: whether attention and MLP read the same residual, and both are added to it.
        embedding_multiplier, residual_multiplier, logit_multiplier: on embeddings (rounded to the dtype of the run), on
            what a sub-layer adds to the residual, and on logits before their soft cap.
        hp1: the gate of attention; for that family only.
        transformers: of the family of that name only; ``intermediate_size`` is then the width of a layer's widest
            tensor, and ``activation`` and ``norm_eps`` have no meaning.
        delta: the gated delta rule; for qwen3_next and qwen3_5 only.
        experts: routed experts; None for a dense MLP in every layer.
        head: whether it has an output projection; without, it embeds only.
        dtype: of the checkpoint; the default of a run.
    """

    family: Family
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
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    rope: RopeConfig | None = None
    sliding_rope: RopeConfig | None = None
    rotary_layers: tuple[bool, ...] = ()
    rotary_dim: int = 0
    parallel_residual: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    hp1: HP1Config | None = None
    transformers: TransformersShape | None = None
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None
    head: bool = True
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        for name in _SIZES:
            most = MOST_LAYERS if name == "num_layers" else MOST_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in [1, {most}], got {shown(getattr(self, name))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        self._check_rope()
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number >= 0, got {shown(getattr(self, name))}")
        for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {shown(getattr(self, name))}")
        for name in ("sliding_windows", "attention_scales", "rotary_layers"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(f"{name} has {len(getattr(self, name))} values for {self.num_layers} layers")
        if any(not 0 <= window < _MOST_ID for window in self.sliding_windows):
            raise ValueError(f"a sliding window must be in [0, {_MOST_ID}), got {shown(list(self.sliding_windows))}")
        # Some models write -1 where they have no end token.
        if any(not -1 <= token_id < _MOST_ID for token_id in self.eos_token_ids):
            raise ValueError(f"an end token must be in [0, {_MOST_ID}), got {shown(list(self.eos_token_ids))}")
        hp1 = self.family == "hp1"
        if hp1 is (self.hp1 is None):
            raise ValueError(
                "hp1 is missing: the gate of attention" if hp1 else f"hp1 has no meaning for {self.family}"
            )
        if (self.family == "transformers") is (self.transformers is None):
            raise ValueError(f"transformers does not fit the family {self.family}")
        if hp1 is (0 < self.norm_eps < math.inf):
            raise ValueError("norm_eps has no meaning for hp1" if hp1 else f"norm_eps must be > 0, got {self.norm_eps}")
        if (self.family in _DELTA_FAMILIES) is (self.delta is None):
            has = "is missing: the delta rule" if self.delta is None else f"has no meaning for {self.family}"
            raise ValueError(f"delta {has}")
        if self.delta and len(self.delta.layers) != self.num_layers:
            raise ValueError(f"delta.layers has {len(self.delta.layers)} values for {self.num_layers} layers")
        if self.experts and len(self.experts.layers) != self.num_layers:
            raise ValueError(f"experts.layers has {len(self.experts.layers)} values for {self.num_layers} layers")
        if self.experts is not None and self.family not in _EXPERT_FAMILIES:
            raise ValueError(f"experts has no meaning for {self.family}")
        if self.experts is None and self.family in ("mixtral", "gpt_oss"):
            raise ValueError("experts is missing")
        for name in _NOT_OF_DELTA:
            if self.delta and getattr(self, name):
                raise ValueError(f"{name} is not supported for {self.family}")
        for name in _NOT_OF_HP1:
            if hp1 and getattr(self, name):
                raise ValueError(f"{name} is not supported for hp1")
        if hp1 and self.activation != "relu":
            raise ValueError(f"activation {self.activation!r} is not supported for hp1: its MLP has relu")

    def _check_rope(self) -> None:
        if self.rope is None:
            return
        if not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim must be in [0, {self.head_dim}], got {shown(self.rotary_dim)}")
        if self.rotary_size > self.head_dim:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of channels")
        for rope in (self.rope, self.sliding_rope):
            if rope and rope.scaling == "longrope":
                if self.sliding_rope:
                    raise ValueError("longrope is for all layers alike: sliding_rope is not supported with it")
                for name in ("short_factor", "long_factor"):
                    if len(getattr(rope, name)) != self.rotary_size // 2:
                        count = len(getattr(rope, name))
                        raise ValueError(f"{name} has {count} values for {self.rotary_size // 2} pairs of channels")

    @property
    def rotary_size(self) -> int:
        """Channels of a head that are rotated: whole pairs."""
        channels = self.rotary_dim or self.head_dim
        return channels + channels % 2

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer with a KV cache keeps there."""
        if self.transformers is not None:
            return self.transformers.kv_shapes
        return (KVShape(self.num_kv_heads, self.head_dim),) * (self.num_layers - self.num_delta_layers)

    @property
    def num_delta_layers(self) -> int:
        """Layers that keep a state in place of K and V."""
        return sum(self.delta.layers) if self.delta else 0

    @property
    def num_expert_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.experts.layers) if self.experts else 0

    @property
    def kv_windows(self) -> list[int]:
        """``sliding_window`` of each layer with a KV cache."""
        states = self.delta.layers if self.delta else (False,) * self.num_layers
        return [self.sliding_window(layer) for layer, state in enumerate(states) if not state]

    def sliding_window(self, layer: int) -> int:
        """Keys a query of this layer sees, its own included; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rotary positions of this layer; None if it has none."""
        if self.rotary_layers and not self.rotary_layers[layer]:
            return None
        return self.sliding_rope if self.sliding_rope and self.sliding_window(layer) else self.rope

    def attention_scale(self, layer: int) -> float:
        """Factor on q·k in this layer."""
        return self.attention_scales[layer] if self.attention_scales else self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field of a config looks on the command line; ``rosebatch.cli.options`` makes flags of these.

    Attributes:
        help: one line for people.
        panel: of the help text.
        names: where the flag is not called like the field.
        least: of a number.
        metavar: of the value.
        rare: whether only ``--help-all`` shows it.
    """

    help: str
    panel: str = ""
    names: tuple[str, ...] = ()
    least: int | None = None
    metavar: str | None = None
    rare: bool = False


# A day. Longer ones would overflow a timer.
MOST_GRAMMAR_SECONDS = 86_400

MODEL, SAMPLING, LIMITS, SWITCHES = "Model", "Sampling", "Limits", "Switches (all on by default)"
DEVICES = "Several GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Which model runs, on what, and within which limits. Filled by the command line or by Python, handed down whole.

    Attributes:
        toggles: switches by name, True or False; others have their defaults. See ``rosebatch.toggles.Toggles``.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    model: Annotated[str | None, Flag("Hub id, folder, .gguf, or .toml of shapes.", MODEL)] = None
    revision: Annotated[str | None, Flag("Branch, tag or commit of a hub id.", MODEL)] = None
    dtype: Annotated[DType, Flag("float32, float16 or bfloat16.", MODEL, metavar="DTYPE")] = "auto"
    device: Annotated[Device, Flag("Default: the GPU if there is one.", MODEL)] = "auto"
    load_format: Annotated[LoadFormat, Flag("'dummy' runs random weights.", MODEL, rare=True)] = "auto"
    model_impl: Annotated[
        ModelImpl, Flag("'transformers' runs any decoder by transformers' own code.", MODEL, rare=True)
    ] = "auto"
    tokenizer: Annotated[str | None, Flag("Folder or hub id of another tokenizer.", MODEL, rare=True)] = None
    chat_template: Annotated[
        str | None, Flag("Jinja file in place of the model's template.", MODEL, metavar="FILE", rare=True)
    ] = None
    served_model_name: Annotated[str | None, Flag("The model's name in reports and responses.", MODEL, rare=True)] = (
        None
    )
    generation_config: Annotated[GenerationConfig, Flag("'auto': the model's defaults.", SAMPLING)] = "none"
    sampler: Annotated[
        Sampler,
        Flag("'flashinfer' needs that package. Sampled answers then depend on the batch.", SAMPLING, rare=True),
    ] = "rosebatch"
    data_parallel_size: Annotated[
        int | Literal["auto"],
        Flag(
            "Processes, each on a GPU of its own; auto: all GPUs. Default: 1.",
            DEVICES,
            ("--data-parallel-size", "-dp"),
            metavar="N|auto",
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Flag(
            "GPUs that hold the model together, if one is too small. Default: 1.",
            DEVICES,
            ("--tensor-parallel-size", "-tp"),
            metavar="N",
        ),
    ] = 1
    ray: Annotated[
        str | None,
        Flag(
            "Run these processes on a Ray cluster: its address, auto, or local.",
            DEVICES,
            metavar="ADDRESS|auto|local",
            rare=True,
        ),
    ] = None
    worker_timeout: Annotated[
        float, Flag("Seconds without a sign of life after which such a process is replaced.", DEVICES, rare=True)
    ] = 600.0
    max_model_len: Annotated[int | None, Flag("Most tokens of prompt and answer.", LIMITS)] = None
    max_prompt_bytes: Annotated[
        str | int, Flag("Longest prompt. Default: 8MiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "8MiB"
    max_num_seqs: Annotated[int, Flag("Most sequences in a step. Default: 256.", LIMITS)] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Flag("Most tokens in a step. Default: 16384 on a GPU, 1024 on a CPU.", LIMITS, rare=True),
    ] = None
    block_size: Annotated[
        int | None,
        Flag("Tokens in a KV cache block. Default: 64 on a GPU, 16 on a CPU.", LIMITS, rare=True),
    ] = None
    kv_cache_memory: Annotated[
        str | int | None, Flag("Size of the KV cache, such as 4GiB.", LIMITS, metavar="SIZE")
    ] = None
    gpu_memory_utilization: Annotated[float, Flag("Share of the GPU to use. Default: 0.9.", LIMITS)] = 0.9
    max_inflight_bytes: Annotated[
        str | int, Flag("Host memory for rows under way. Default: 1GiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "1GiB"
    grammar_timeout: Annotated[
        float, Flag("Most seconds to compile a row's schema or regex. Default: 10.", LIMITS, rare=True)
    ] = 10.0
    grammar_memory: Annotated[
        str | int, Flag("Most memory to compile one. Default: 2GiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "2GiB"
    toggles: Mapping[str, bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, kind in _KINDS.items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from None
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 < self.grammar_timeout <= MOST_GRAMMAR_SECONDS:
            raise ValueError(f"grammar_timeout must be in (0, {MOST_GRAMMAR_SECONDS}], got {self.grammar_timeout}")
        for name, least in _LEAST_SIZES.items():
            if in_bytes(value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if isinstance(self.kv_cache_memory, str):
            parse_size(self.kv_cache_memory)

    @classmethod
    def of(cls, model: str | None, **settings: Any) -> "RunConfig":
        """From keywords: fields, and switches by name.

        Raises:
            ValueError: there is no such setting, or its value is impossible.
        """
        own = {f.name for f in fields(cls)} - {"model", "toggles"}
        toggles = {name: value for name, value in settings.items() if name in SWITCH_NAMES}
        unknown = settings.keys() - own - toggles.keys()
        if unknown:
            name = min(unknown)
            near = get_close_matches(name, [*own, *SWITCH_NAMES], n=1)
            raise ValueError(f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else ""))
        for name, value in toggles.items():
            if not isinstance(value, bool | None):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        values: dict[str, Any] = {n: str(v) if isinstance(v, Path) else v for n, v in settings.items() if n in own}
        return cls(model=model, toggles=toggles, **values)

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        return in_bytes(self.kv_cache_memory)


_KINDS = {f.name: f.type for f in fields(RunConfig)}
_LEAST = {
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory": 0,
}
# In bytes; a smaller one would be a mistake.
_LEAST_SIZES = {"max_prompt_bytes": 1, "max_inflight_bytes": 2**20, "grammar_memory": 2**20}
_CHOICES = {
    name: get_args(kind)
    for name, kind in {
        "dtype": DType,
        "device": Device,
        "load_format": LoadFormat,
        "model_impl": ModelImpl,
        "generation_config": GenerationConfig,
        "sampler": Sampler,
    }.items()
}


ConfigT = TypeVar("ConfigT")


def convert(values: Any, kind: type[ConfigT], source: str) -> ConfigT:
    """Build a config from plain values.

    Raises:
        UserError: an unknown key, a wrong type or an impossible value; ``source`` says where it stands.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise refusal(source, error) from None


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


@overload
def in_bytes(size: str | int) -> int: ...


@overload
def in_bytes(size: None) -> None: ...


@overload
def in_bytes(size: str | int | None) -> int | None: ...


def in_bytes(size: str | int | None) -> int | None:
    """A size as the command line or Python gives it, in bytes.

    Raises:
        FlagError: it is no size.
    """
    return parse_size(size) if isinstance(size, str) else size
