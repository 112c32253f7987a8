"""A tiny shape of each family, with all that makes its layers its own."""

from rosebatch.config.delta import DeltaConfig
from rosebatch.config.model import ExpertsConfig, ModelConfig, RopeConfig

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 12,
    "intermediate_size": 24,
    "max_model_len": 40,
    "norm_eps": 1e-5,
    "rope": RopeConfig(theta=100.0),
}
_LONGROPE = RopeConfig(
    theta=100.0,
    scaling="longrope",
    original_max_position_embeddings=10,
    short_factor=(1.0, 1.2, 1.5),
    long_factor=(3.0, 5.0, 9.0),
    attention_factor=1.2,
)
_GATED = {**_SIZES, "activation": "silu"}
_PLAIN = {**_SIZES, "activation": "gelu_new", "mlp_bias": True, "out_bias": True, "qkv_bias": True}
_EXPERTS = {"layers": (True, True), "num_experts": 5, "experts_per_token": 2, "expert_size": 12}
FAMILIES = {
    "gemma": ModelConfig(
        family="gemma",
        **{**_SIZES, "activation": "gelu_pytorch_tanh"},
        tie_word_embeddings=True,
        qk_norm=True,
        sliding_windows=(5, 0),
        sliding_rope=RopeConfig(theta=10.0),
        attention_scales=(0.3, 0.3),
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        embedding_multiplier=5.7,
    ),
    "granite": ModelConfig(family="llama", **_GATED, residual_multiplier=0.4, logit_multiplier=0.5, out_bias=True),
    "smollm3": ModelConfig(family="llama", **_GATED, rotary_layers=(True, False)),
    "phi3": ModelConfig(family="phi3", **_GATED, rotary_dim=6),
    # Of its tests' prompts one is longer than the trained length, and one becomes so within a window of decode steps.
    "phi3-longrope": ModelConfig(family="phi3", **{**_GATED, "rope": _LONGROPE}, rotary_dim=6),
    "olmo2": ModelConfig(family="olmo2", **_GATED, qk_norm=True),
    "glm4": ModelConfig(family="glm4", **_GATED, rotary_dim=6, qkv_bias=True),
    "stablelm": ModelConfig(family="stablelm", **_GATED, rotary_dim=4, qk_norm=True, parallel_residual=True),
    "cohere": ModelConfig(
        family="cohere",
        **_GATED,
        qk_norm=True,
        parallel_residual=True,
        logit_multiplier=0.7,
        rotary_layers=(True, False),
    ),
    "gpt_neox": ModelConfig(family="gpt_neox", **{**_PLAIN, "num_kv_heads": 2}, rotary_dim=3, parallel_residual=True),
    "qwen3_moe": ModelConfig(
        family="llama",
        **_GATED,
        qk_norm=True,
        experts=ExpertsConfig(layers=(True, False), num_experts=5, experts_per_token=2, expert_size=12),
    ),
    "qwen2_moe": ModelConfig(
        family="llama",
        **_GATED,
        qkv_bias=True,
        experts=ExpertsConfig(**_EXPERTS, normalize=False, shared_size=20, shared_gate=True),
    ),
    "mixtral": ModelConfig(family="mixtral", **_GATED, sliding_windows=(5, 5), experts=ExpertsConfig(**_EXPERTS)),
    "gpt_oss": ModelConfig(
        family="gpt_oss",
        **_GATED,
        qkv_bias=True,
        out_bias=True,
        sliding_windows=(5, 0),
        experts=ExpertsConfig(**_EXPERTS),
    ),
    "qwen3_next": ModelConfig(
        family="qwen3_next",
        **_GATED,
        qk_norm=True,
        rotary_dim=6,
        delta=DeltaConfig(layers=(True, False), key_heads=1, value_heads=2, key_dim=8, value_dim=12),
    ),
    "qwen3_5": ModelConfig(
        family="qwen3_5",
        **_GATED,
        qk_norm=True,
        delta=DeltaConfig(layers=(False, True), key_heads=2, value_heads=2, key_dim=12, value_dim=8, taps=3),
    ),
    "starcoder2": ModelConfig(family="starcoder2", **_PLAIN, sliding_windows=(5, 5)),
}
