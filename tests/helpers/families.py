"""Tiny models of the families: transformers' config class and values of each, with all that makes the family its own.

Head sizes are no powers of two, windows end within a block, and scaled positions begin within the prompts' lengths.
"""

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_UNSIZED = {key: value for key, value in _SIZES.items() if key != "num_hidden_layers"}
_UNTIED = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
# Heads of 12 channels, of which 3 are rotated, in two pairs.
_NARROW = {**_SIZES, "hidden_size": 48}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 1.6],
    "long_factor": [2.0, 3.0, 6.0],
}
_DELTA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
# Odd sizes: no multiple of a tile's.
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
_SHARED = {"shared_expert_intermediate_size": 36}
_MOE_DELTA = {key: value for key, value in _DELTA.items() if key != "intermediate_size"}
# Every width differs from the others.
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.3,
}
# By the names of Kimi Linear's config class.
_KIMI_ROUTED = {key: value for key, value in _ROUTED.items() if not key.startswith(("n_routed", "first_k"))}
_KIMI_ROUTED["num_local_experts"] = _ROUTED["n_routed_experts"]
_GEMMA = {**_UNTIED, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24}
_GEMMA4: dict[str, Any] = {
    **_UNTIED,
    "vocab_size_per_layer_input": 211,
    "head_dim": 24,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        # 6 of 20 pairs.
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 2000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
_EXPERTS_OF_GEMMA4 = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 28}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 20}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}

# The first families, by kernels and runners of their own.
_PLAIN = {**_SIZES, "intermediate_size": 96}
_GPT2 = {"vocab_size": 199, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name -> transformers' config class and its values; HP1 is the tests' own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT2),
    "gpt2-options": (
        "GPT2Config",
        {
            **_GPT2,
            "n_inner": 100,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("LlamaConfig", _PLAIN),
    "llama3-rope-biases-tied": (
        "LlamaConfig",
        {
            **_PLAIN,
            "rope_parameters": _LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        {**_PLAIN, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {**_PLAIN, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", _PLAIN),
    "qwen2-window": (
        "Qwen2Config",
        {**_PLAIN, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_PLAIN, "head_dim": 24, "tie_word_embeddings": True}),
    "hp1": ("HP1", {**_PLAIN, "head_dim": 24}),
    "hp1-options": (
        "HP1",
        {
            **_PLAIN,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
            "relu_pre": False,
            "clip_min": -0.2,
            "clip_max": 0.15,
        },
    ),
}
# The fast tier: one model of each family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {**_UNTIED, "head_dim": 24, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    # As 31B, 26B-A4B and E2B.
    "gemma4": ("Gemma4TextConfig", {**_GEMMA4, "final_logit_softcapping": 7.0}),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {
            **{key: value for key, value in _GEMMA4.items() if "per_layer_input" not in key},
            "num_global_key_value_heads": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma4_moe": ("Gemma4TextConfig", {**_GEMMA4, **_EXPERTS_OF_GEMMA4}),
    "gemma4_e": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "num_hidden_layers": 5,
            "layer_types": [*_GEMMA4["layer_types"], "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 10,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "phi3": ("Phi3Config", {**_SIZES, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    # Some prompts are longer than the trained length, and some become so with their answers.
    "phi3-longrope": ("Phi3Config", {**_NARROW, "original_max_position_embeddings": 40, "rope_parameters": _LONGROPE}),
    "olmo2": ("Olmo2Config", _SIZES),
    "olmo3": (
        "Olmo3Config",
        {
            **_SIZES,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {**_SIZES, **_GRANITE},
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "layer_types": ["full_attention"] * 3,
            **_GRANITE,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_theta": 500.0},
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            **_SIZES,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4Config", {**_SIZES, "head_dim": 24, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "stablelm": (
        "StableLmConfig",
        {**_SIZES, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "cohere": ("CohereConfig", {**_UNTIED, "use_qk_norm": True, "logit_scale": 2.0}),
    "cohere2": ("Cohere2Config", {**_UNTIED, "sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.7}),
    "gpt_neox": ("GPTNeoXConfig", {**_NARROW, "num_key_value_heads": 4}),
    "starcoder2": ("Starcoder2Config", {**_UNTIED, "sliding_window": 24}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SIZES, **_EXPERTS, "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [2]},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_SIZES, **_EXPERTS, **_SHARED}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SIZES,
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS, **_SHARED, "mlp_only_layers": [2]}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_MOE_DELTA, **_EXPERTS, **_SHARED}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**_DELTA, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 3},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
        },
    ),
    "bamba": ("BambaConfig", {**_SIZES, **_MAMBA, "attn_layer_indices": [1]}),
    "granite4_h": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            **_MAMBA,
            **_GRANITE,
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 72,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    # transformers' prompts keep steps above a least one, and its generated tokens do not: it is too small to matter.
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_UNSIZED,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
            "n_routed_experts": 5,
            "moe_intermediate_size": 28,
            "moe_shared_expert_intermediate_size": 36,
            "routed_scaling_factor": 2.5,
            "head_dim": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 4,
            "ssm_state_size": 20,
            "time_step_min": 1e-9,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_SIZES,
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.7, 1.1, 0.8, 1.4, 0.6],
            "ssm_out_multiplier": 0.5,
            "mlp_multipliers": [0.8, 1.2],
        },
    ),
    "lfm2": ("Lfm2Config", {**_SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_SIZES,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, **_ROUTED, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_LATENT, **_ROUTED, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENT, **_ROUTED, "mlp_layer_types": ["dense", "sparse", "dense"]}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            **_KIMI_ROUTED,
            "linear_num_heads": 4,
            "linear_head_dim": 20,
        },
    ),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "rope_parameters": {"rope_theta": 500.0}, "dim_model_base": 48}),
}
# The thorough tier: what else their configs allow.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-untied": ("GemmaConfig", {**_SIZES, "attention_bias": True, "num_key_value_heads": 1}),
    "gemma2-plain": (
        "Gemma2Config",
        {
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-pattern": ("Gemma3TextConfig", {**_GEMMA, "sliding_window_pattern": 2, "final_logit_softcapping": 9.0}),
    "gemma4-scaled": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "factor": 4.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    # Layers share K and V whose values are the keys; experts as well.
    "gemma4_e-experts": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            **_EXPERTS_OF_GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 1,
        },
    ),
    "phi3-window": ("Phi3Config", {**_SIZES, "sliding_window": 24, "num_key_value_heads": 4}),
    "phi3-longrope-window": (
        "Phi3Config",
        {**_NARROW, "sliding_window": 24, "original_max_position_embeddings": 40, "rope_parameters": _LONGROPE},
    ),
    "granite-biases": (
        "GraniteConfig",
        {**_SIZES, "attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.3, "head_dim": 20},
    ),
    "granite4-nope": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2-biases": ("Olmo2Config", {**_SIZES, "attention_bias": True, "num_key_value_heads": 1}),
    "smollm3-biases": ("SmolLM3Config", {**_SIZES, "attention_bias": True, "no_rope_layers": [0, 1, 1]}),
    "glm4-odd": ("Glm4Config", {**_SIZES, "head_dim": 20, "attention_bias": False, "partial_rotary_factor": 0.25}),
    "stablelm-serial": ("StableLmConfig", {**_SIZES, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "cohere-biases": ("CohereConfig", {**_UNTIED, "attention_bias": True, "hidden_size": 80, "logit_scale": 1.0}),
    "gpt_neox-serial": (
        "GPTNeoXConfig",
        {**_SIZES, "use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False, "hidden_act": "relu"},
    ),
    "starcoder2-unbiased": (
        "Starcoder2Config",
        {**_SIZES, "use_bias": False, "sliding_window": None, "hidden_act": "gelu"},
    ),
    "qwen3_moe-mixed": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
        },
    ),
    "qwen2_moe-windows": (
        "Qwen2MoeConfig",
        {**_SIZES, **_EXPERTS, **_SHARED, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 24},
    ),
    "mixtral-one": ("MixtralConfig", {**_SIZES, "num_local_experts": 3, "num_experts_per_tok": 1}),
    "lfm2-untied": (
        "Lfm2Config",
        {
            **_SIZES,
            "full_attn_idxs": [0, 2],
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe-unscaled": (
        "Lfm2MoeConfig",
        {
            **_SIZES,
            **_EXPERTS,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next-dense": ("Qwen3NextConfig", {**_DELTA, "mlp_only_layers": [0, 1, 2, 3]}),
    "olmo_hybrid-nope": (
        "OlmoHybridConfig",
        {
            **_SIZES,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "granite4_h-dense": (
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            **_MAMBA,
            **_GRANITE,
            "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    "falcon_h1-normed": (
        "FalconH1Config",
        {
            **_SIZES,
            **_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "mlp_bias": True,
            "mlp_multipliers": [0.8, 1.2],
            "mamba_d_conv": 3,
        },
    ),
    "nemotron_h-biases": (
        "NemotronHConfig",
        {
            **_UNSIZED,
            "layers_block_type": ["mlp", "full_attention", "linear_attention"],
            "head_dim": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 16,
            "time_step_min": 1e-9,
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "deepseek_v2-greedy": (
        "DeepseekV2Config",
        {**_LATENT, **_ROUTED, "q_lora_rank": None, "num_experts_per_tok": 3, "kv_lora_rank": 34},
    ),
    "deepseek_v3-halves": (
        "DeepseekV3Config",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "minicpm3-longrope": (
        "MiniCPM3Config",
        {
            **_LATENT,
            "qk_rope_head_dim": 6,
            "original_max_position_embeddings": 40,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 1.0},
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "scale_emb": 2.5,
        },
    ),
    "llama-yarn": ("LlamaConfig", {**_SIZES, "rope_parameters": _YARN}),
    "llama-yarn-exact": (
        "LlamaConfig",
        {
            **_SIZES,
            "head_dim": 40,
            "rope_parameters": {**_YARN, "truncate": False, "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama-gelu": ("LlamaConfig", {**_SIZES, "hidden_act": "gelu"}),
    "qwen3-yarn": ("Qwen3Config", {**_SIZES, "head_dim": 24, "rope_parameters": {**_YARN, "attention_factor": 0.8}}),
}

_ENCODER = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 130,
    "pad_token_id": None,
}
_AFTER_PADDING = {**_ENCODER, "pad_token_id": 1}
_WINDOWED = {key: value for key, value in _ENCODER.items() if key != "pad_token_id"}
# Models whose tokens see those after them: they embed. The second value of ``layer_types`` slides.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _ENCODER),
    "bert-relu": ("BertConfig", {**_ENCODER, "hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-5}),
    "roberta": ("RobertaConfig", {**_AFTER_PADDING, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {**_AFTER_PADDING, "pad_token_id": 5}),
    "camembert": ("CamembertConfig", {**_AFTER_PADDING, "type_vocab_size": 1}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": 199, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 130},
    ),
    "mpnet": ("MPNetConfig", _AFTER_PADDING),
    "nomic_bert": ("NomicBertConfig", {**_ENCODER, "pad_token_id": 0}),
    "gte": ("GteConfig", _AFTER_PADDING),
    "gte-untyped": ("GteConfig", {**_AFTER_PADDING, "type_vocab_size": 0, "hidden_act": "silu"}),
    "modernbert": ("ModernBertConfig", {**_WINDOWED, "local_attention": 24, "pad_token_id": 3}),
    "modernbert-biases": (
        "ModernBertConfig",
        {
            **_WINDOWED,
            "local_attention": 9,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "pad_token_id": 3,
        },
    ),
    "embeddinggemma": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "num_hidden_layers": 3,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def reference_options(name: str) -> dict[str, Any]:
    """Further options of transformers' ``generate`` for a model: without a cache, longrope is exact.

    5.23 recomputes its cache where a sequence outgrows the trained length. 5.17 drops it and sees only new tokens.
    """
    return {"use_cache": False} if "longrope" in name else {}
