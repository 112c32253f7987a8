"""The shape of a model."""

import math
from typing import Literal, NamedTuple

import msgspec

from rosebatch.config.classifier import ClassifierConfig
from rosebatch.config.full_heads import FullHeadsConfig
from rosebatch.config.gated_delta import DeltaConfig
from rosebatch.config.hp1 import HP1Config
from rosebatch.config.latent import LatentConfig
from rosebatch.config.layer_inputs import LayerInputsConfig
from rosebatch.config.limits import MAX_ID, MAX_LAYERS, MAX_SIZE, require_in
from rosebatch.config.mamba2 import MambaConfig
from rosebatch.config.multipliers import MultipliersConfig
from rosebatch.config.shared_kv import SharedKVConfig
from rosebatch.config.short_conv import ConvConfig
from rosebatch.host.model_files import shown

# Windows of so many keys at most stay in 16 bits: they take little memory.
_SHORT_WINDOW = 512
# Experts of a layer: a program of the router holds all their logits.
_MAX_EXPERTS = 2**12
_SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "intermediate_size", "max_model_len"),
)


class RopeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Rotary position embedding: base frequency and how it is stretched past the trained length.

    Names as in transformers' configs. ``linear`` needs ``factor``. ``llama3`` needs it too, with the two frequency
    factors; ``yarn`` with the two betas. ``longrope`` needs the two lists.

    Attributes:
        original_max_position_embeddings: trained length, for all kinds but ``linear``.
        attention_factor: on cos and sin, for ``yarn`` and ``longrope``.
        truncate: whether yarn rounds the bounds of its ramp to whole channels.
        spread: channels that the frequencies are spread over, of which the first are taken; 0 for those that are
            rotated (Gemma 4 spreads them over whole heads).
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
    spread: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for name in (*names, "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {shown(value)}")
        require_in("original_max_position_embeddings", self.original_max_position_embeddings, 1, MAX_SIZE)
        require_in("spread", self.spread, 0, MAX_SIZE)
        if self.spread and self.scaling not in ("default", "linear"):
            raise ValueError(f"spread is not supported with {self.scaling}")
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


class ExpertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Routed experts in place of the MLP of some layers, or beside it.

    Attributes:
        layers: whether a layer has experts, for each layer; the others have a dense MLP of ``intermediate_size``.
        num_experts: of a layer.
        experts_per_token: those that a token goes through.
        expert_size: inner size of an expert.
        normalize: whether the weights of a token's experts sum to 1.
        shared_size: inner size of an expert that all tokens go through; 0 for none.
        shared_gate: whether that has a gate, one number for each token.
        sigmoid: whether experts' scores are sigmoids, chosen with a correction added to each (DeepSeek V3); else shares
            of a softmax.
        groups: experts are in so many groups, of as many neighbours each.
        kept_groups: the best groups, of which a token's experts are.
        weight_scale: factor on their weights.
        sum_eps: added to the sum of chosen sigmoids that normalizes them.
        wide_router: whether the router's product is in fp32, whatever the dtype of the run.
        beside_mlp: whether such a layer has its dense MLP as well.
    """

    layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    expert_size: int
    normalize: bool = True
    shared_size: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    weight_scale: float = 1.0
    sum_eps: float = 1e-20
    wide_router: bool = False
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        require_in("num_experts", self.num_experts, 1, _MAX_EXPERTS)
        require_in("groups", self.groups, 1, self.num_experts)
        require_in("kept_groups", self.kept_groups, 1, self.groups)
        if self.num_experts % self.groups:
            raise ValueError(f"num_experts {self.num_experts} is no multiple of groups {self.groups}")
        size = self.num_experts // self.groups
        if self.sigmoid and self.groups > 1 and size == 1:
            raise ValueError("a group has the scores of its two best experts: groups of one are not supported")
        require_in("experts_per_token", self.experts_per_token, 1, self.kept_groups * size)
        if not math.isfinite(self.weight_scale):
            raise ValueError(f"weight_scale must be finite, got {shown(self.weight_scale)}")
        if not 0 < self.sum_eps < 1:
            raise ValueError(f"sum_eps must be in (0, 1), got {shown(self.sum_eps)}")
        require_in("expert_size", self.expert_size, 1, MAX_SIZE)
        require_in("shared_size", self.shared_size, 0, MAX_SIZE)


class Planes(NamedTuple):
    """Planes of one size, such as K and V, in one tensor of the cache. A plane is what a layer keeps of each token.

    Attributes:
        heads: rows of a token in a plane.
        width: numbers of a row.
        number: of planes.
        dtype: PyTorch's name of it; None for that of activations.
    """

    heads: int
    width: int
    number: int = 1
    dtype: str | None = None

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.heads * self.width * self.number


def e4m3_planes(planes: Planes) -> tuple[Planes, Planes]:
    """The same as bytes of e4m3, and a scale of each row."""
    return planes._replace(dtype="uint8"), planes._replace(width=1, dtype="float32")


class TransformersShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """The shape of a model that runs by transformers' own code, as far as ``ModelConfig`` has no field for it.

    Attributes:
        architecture: transformers' class.
        layer_weights: of the matrices in all layers.
        active_weights: those of them that a token is multiplied with; fewer where a router chooses experts.
        kv_planes: of each layer, a tensor after the other.
    """

    architecture: str
    layer_weights: int
    active_weights: int
    kv_planes: tuple[tuple[Planes, ...], ...]


# Its text is in the identity of a job: a new field at its default must not keep --resume from older ones.
class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """The shape of a model: what the engine, the weights and a memory estimate need.

    Attributes:
        family: a name of ``rosebatch.model.registry``, where ``check_config`` has its rules; or ``transformers``.
        max_model_len: most tokens of prompt and completion together.
        norm_eps: of RMSNorm and LayerNorm; hp1 has none.
        activation: of the MLP, in transformers' spelling.
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias (GPT-2 has them all).
        qk_norm: whether q and k are normalised before the rotation; the family says how.
        sliding_windows: keys that a query sees, for each layer, 0 for all; empty means all in every layer.
        attention_scales: factor on q·k, for each layer; empty means head_dim ** -0.5 in every layer.
        attention_soft_cap, logit_soft_cap: a score or logit x becomes cap · tanh(x / cap); 0 for no cap.
        rope: None if positions are learned embeddings, or there are none.
        sliding_rope: of layers with a sliding window, if it is another one (Gemma 3).
        rotary_layers: whether a layer has rotary positions, for each layer; empty means all.
        rotary_dim: the first channels of a head that are rotated; 0 for all. The last pair of an odd number is whole.
        parallel_residual: whether attention and MLP read the same residual, and both are added to it.
        embedding_multiplier, residual_multiplier, logit_multiplier: on embeddings (rounded to the dtype of the run), on
            what a sub-layer adds to the residual, and on logits before their soft cap.
        hp1: the gate of attention of such a model, which has no norms.
        transformers: of the family of that name only; ``intermediate_size`` is then the width of a layer's widest
            tensor, and ``activation`` and ``norm_eps`` have no meaning.
        delta: the gated delta rule of some layers.
        conv: short convolutions of some layers.
        mamba: Mamba2 of some layers.
        multipliers: factors of a layer's products; None for none.
        attention_layers: whether a layer has attention, for each layer; None: all that keep no state.
        mlp_layers: whether a layer has an MLP or experts, for each layer; None: all.
        latent: latent attention in every layer that attends; ``num_kv_heads`` is 1 then.
        full_heads: K/V heads of layers without a sliding window, where they differ; see ``of_layer``.
        shared_kv: last layers that read the K and V of others; None if each layer has its own.
        layer_inputs: further embeddings for each layer; None for none.
        experts: routed experts; None for a dense MLP in every layer.
        bidirectional: whether a token sees those after it too. A prompt is then computed in one step, and nothing is
            kept of it; a sliding window has the keys on each side, the query's own included.
        token_types: rows of a table that is added to embeddings (BERT); 0 for none. Token ids from ``vocab_size`` on
            are of the second type, and so on.
        position_offset: rows of learned positions before that of the first token (RoBERTa).
        head: whether it has an output projection; without, it embeds only.
        classifier: its classification head; None if it has none.
        dtype: of the checkpoint; the default of a run.
        kv_cache_dtype: ``fp8`` stores K and V as ``stores_e4m3`` says; ``auto`` is the dtype of activations.
    """

    family: str
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
    conv: ConvConfig | None = None
    mamba: MambaConfig | None = None
    multipliers: MultipliersConfig | None = None
    attention_layers: tuple[bool, ...] | None = None
    mlp_layers: tuple[bool, ...] | None = None
    latent: LatentConfig | None = None
    full_heads: FullHeadsConfig | None = None
    shared_kv: SharedKVConfig | None = None
    layer_inputs: LayerInputsConfig | None = None
    experts: ExpertsConfig | None = None
    bidirectional: bool = False
    token_types: int = 0
    position_offset: int = 0
    head: bool = True
    classifier: ClassifierConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"

    def __post_init__(self) -> None:
        for name in _SIZES:
            require_in(name, getattr(self, name), 1, MAX_LAYERS if name == "num_layers" else MAX_SIZE)
        for name in ("token_types", "position_offset"):
            require_in(name, getattr(self, name), 0, MAX_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        self._check_rope()
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number >= 0, got {shown(getattr(self, name))}")
        for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {shown(getattr(self, name))}")
        for name in ("sliding_windows", "attention_scales", "rotary_layers", "attention_layers", "mlp_layers"):
            if (given := getattr(self, name)) and len(given) != self.num_layers:
                raise ValueError(f"{name} has {len(given)} values for {self.num_layers} layers")
        if any(not 0 <= window < MAX_ID for window in self.sliding_windows):
            raise ValueError(f"a sliding window must be in [0, {MAX_ID}), got {shown(list(self.sliding_windows))}")
        # Some models write -1 where they have no end token.
        if any(not -1 <= token_id < MAX_ID for token_id in self.eos_token_ids):
            raise ValueError(f"an end token must be in [0, {MAX_ID}), got {shown(list(self.eos_token_ids))}")
        if (self.family == "transformers") is (self.transformers is None):
            raise ValueError(f"transformers does not fit the family {self.family}")
        if self.hp1 is None and not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be > 0, got {self.norm_eps}")
        for name in ("delta", "conv", "mamba", "experts"):
            part = getattr(self, name)
            if part and len(part.layers) != self.num_layers:
                raise ValueError(f"{name}.layers has {len(part.layers)} values for {self.num_layers} layers")
        if self.mamba and not any(self.attends):
            raise ValueError("a model whose layers all have Mamba2 alone is not supported")
        if self.latent:
            require_in("num_kv_heads of latent attention", self.num_kv_heads, 1, 1)
            require_in("rotary_dim of latent attention", self.rotary_dim, 2, self.head_dim - 1)
            if self.rotary_dim % 2:
                raise ValueError(f"rotary_dim {self.rotary_dim} is odd: latent attention has whole pairs")
        if self.full_heads and self.num_heads % self.full_heads.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of {self.full_heads.num_kv_heads} K/V heads")
        if self.shared_kv:
            own = self.num_layers - self.shared_kv.layers
            windows = [self.sliding_window(layer) for layer in range(self.num_layers)]
            if not {*windows[:own]} >= {*windows}:
                raise ValueError("layers that share K and V need one with the same window before them")
        if self.layer_inputs and self.layer_inputs.vocab_size < self.vocab_size:
            raise ValueError(f"layer_inputs.vocab_size {self.layer_inputs.vocab_size} is below {self.vocab_size}")

    def _check_rope(self) -> None:
        if self.rope is None:
            return
        require_in("rotary_dim", self.rotary_dim, 0, self.head_dim)
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
    def num_token_ids(self) -> int:
        """Token ids are below this: those of the vocabulary, once for each type of tokens."""
        return self.vocab_size * max(1, self.token_types)

    @property
    def longest(self) -> int:
        """Most tokens that ``--max-model-len`` may ask for: scaled positions reach past the length in config.json."""
        rope = self.rope
        if rope is None:
            return self.max_model_len
        return scaled_length(self.max_model_len, rope.scaling, rope.factor, rope.original_max_position_embeddings)

    @property
    def kv_planes(self) -> tuple[tuple[Planes, ...], ...]:
        """What each layer with a KV cache keeps there: the ``planes`` of the model's mixers, as a test checks."""
        if self.bidirectional:
            return ()
        if self.transformers is not None:
            layers = self.transformers.kv_planes
        elif self.latent:
            layers = ((Planes(1, self.latent.rank + self.rotary_dim),),) * sum(self.attends)
        else:
            each = [self.of_window(window) for window in self.kv_windows]
            layers = tuple((Planes(own.num_kv_heads, own.head_dim, 2),) for own in each)
        return tuple(
            e4m3_planes(*planes) if self.stores_e4m3(window) else planes
            for planes, window in zip(layers, self.kv_windows, strict=True)
        )

    def stores_e4m3(self, window: int) -> bool:
        """Whether K and V of layers with this window are e4m3; not those of HP1, latents, and of short windows."""
        if self.hp1 or self.latent:
            return False
        return self.kv_cache_dtype == "fp8" and not 0 < window <= _SHORT_WINDOW

    @property
    def state_layers(self) -> tuple[bool, ...]:
        """Whether a layer keeps a state, for each layer."""
        part = self.delta or self.conv or self.mamba
        return part.layers if part else (False,) * self.num_layers

    @property
    def num_state_layers(self) -> int:
        """Layers that keep a state."""
        return sum(self.state_layers)

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether a layer has attention, for each layer."""
        return self.attention_layers or tuple(not state for state in self.state_layers)

    @property
    def mixer_channels(self) -> int:
        """Numbers of a token that a layer's mixer has at most, its result left out."""
        kinds = self, self.of_window(0)
        attending = max((own.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in kinds)
        if self.latent:
            # The projections, q and results over latents, and results over values.
            latent, width = self.latent, self.latent.rank + self.rotary_dim
            of_heads = self.num_heads * (self.head_dim + width + latent.rank + latent.value_dim)
            attending = of_heads + 2 * (latent.q_rank + width)
        rule = self.delta or self.mamba
        if rule:
            return max(attending, rule.step_channels)
        # The convolution's inputs, and what it makes of them.
        return max(attending, 4 * self.hidden_size) if self.conv else attending

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's states in all layers, activations of ``itemsize``."""
        rule = self.delta or self.mamba
        if rule:
            return self.num_state_layers * rule.state_bytes(itemsize)
        return self.num_state_layers * self.conv.taps * self.hidden_size * itemsize if self.conv else 0

    @property
    def kv_windows(self) -> list[int]:
        """``sliding_window`` of each layer with a KV cache."""
        if self.bidirectional:
            return []
        own = self.attends[: self.num_layers - (self.shared_kv.layers if self.shared_kv else 0)]
        return [self.sliding_window(layer) for layer, attends in enumerate(own) if attends]

    def kv_layer(self, layer: int) -> int:
        """The layer whose K and V this one reads; the same number if it has its own."""
        own = self.num_layers - (self.shared_kv.layers if self.shared_kv else 0)
        window = self.sliding_window(layer)
        return layer if layer < own else max(each for each in range(own) if self.sliding_window(each) == window)

    def inner_size(self, layer: int) -> int:
        """``intermediate_size`` of this layer's MLP."""
        wide = self.shared_kv is not None and self.shared_kv.wide_mlp and self.kv_layer(layer) != layer
        return self.intermediate_size * (1 + wide)

    def sliding_window(self, layer: int) -> int:
        """Keys a query of this layer sees, its own included; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def of_layer(self, layer: int) -> "ModelConfig":
        """The shape with this layer's K/V heads as those of all layers."""
        return self.of_window(self.sliding_window(layer))

    def of_window(self, window: int) -> "ModelConfig":
        """The same of layers with this window."""
        full = self.full_heads
        if full is None or window:
            return self
        heads = {"num_kv_heads": full.num_kv_heads, "head_dim": full.head_dim, "rotary_dim": full.rotary_dim}
        return msgspec.structs.replace(self, full_heads=None, **heads)

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rotary positions of this layer; None if it has none."""
        if self.rotary_layers and not self.rotary_layers[layer]:
            return None
        return self.sliding_rope if self.sliding_rope and self.sliding_window(layer) else self.rope

    def attention_scale(self, layer: int) -> float:
        """Factor on q·k in this layer."""
        return self.attention_scales[layer] if self.attention_scales else self.of_layer(layer).head_dim ** -0.5


def scaled_length(length: int, scaling: str | None, factor: float, trained: int) -> int:
    """Most tokens that scaled positions reach.

    Args:
        length: in config.json.
        scaling: of rotary positions. Only ``linear`` and ``yarn`` are meant for more.
        factor: of the scaling.
        trained: what ``yarn`` multiplies.
    """
    if scaling not in ("linear", "yarn"):
        return length
    return min(max(length, int(factor * (trained if scaling == "yarn" else length))), MAX_SIZE)
