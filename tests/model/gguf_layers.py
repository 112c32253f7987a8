"""GGUF files of models whose layers differ from each other, as llama.cpp's converter writes them."""

import gguf
import numpy as np


def add_common(writer, config, kv_heads, *, routes=True):
    """What its ``TextModel`` adds for all models, of experts too if the checkpoint's config has their fields."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(config.vocab_size)
    add_of_names(writer, config, _NAMES)
    if routes:
        add_of_names(writer, config, _MIXTURE_NAMES)


def add_of_names(writer, config, names):
    """Adds what the config has of these."""
    for name, add in names.items():
        if (value := getattr(config, name, None)) is not None:
            getattr(writer, add)(value)


_NAMES = {
    "intermediate_size": "add_feed_forward_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "norm_eps": "add_layer_norm_rms_eps",
}
_MIXTURE_NAMES = {
    "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "n_group": "add_expert_group_count",
    "topk_group": "add_expert_group_used_count",
}


def kv_heads(config, attends):
    """The list that marks the layers with attention."""
    return [config.num_key_value_heads if own else 0 for own in attends]


def add_lfm2(writer, config):
    """Adds metadata of short convolutions, and of MLPs that are smaller than the config's number."""
    add_common(writer, config, kv_heads(config, [kind != "conv" for kind in config.layer_types]))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    size, unit = config.intermediate_size, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        size = unit * ((int(config.block_ffn_dim_multiplier * int(2 * size / 3)) + unit - 1) // unit)
    writer.add_feed_forward_length(size)


def lfm2(config, name, values):
    """The convolution is squeezed."""
    yield name, values.squeeze(1) if "conv.conv" in name else values


# Whether files have what makes keys and values of a latent apart: older ones do not.
SPLIT = True


def add_deepseek(writer, config):
    """Adds metadata of latent attention as one head of keys and values, and of experts."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    sizes = config.qk_nope_head_dim + rotated, config.v_head_dim
    add_common(writer, config, 1 if SPLIT else config.num_attention_heads)
    add_rope(writer, config.rope_parameters)
    writer.add_rope_dimension_count(rotated)
    if SPLIT:
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
        sizes = rank + rotated, rank
    writer.add_key_length(sizes[0])
    writer.add_value_length(sizes[1])
    add_of_names(writer, config, _LATENT_NAMES)
    if config.model_type != "glm4_moe_lite":
        writer.add_expert_gating_func(_GATES[config.model_type])
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if (growth := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * growth)


_LATENT_NAMES = {
    "kv_lora_rank": "add_kv_lora_rank",
    "q_lora_rank": "add_q_lora_rank",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "n_routed_experts": "add_expert_count",
    "n_shared_experts": "add_expert_shared_count",
    "routed_scaling_factor": "add_expert_weights_scale",
}
_GATES = {"deepseek_v2": gguf.ExpertGatingFuncType.SOFTMAX, "deepseek_v3": gguf.ExpertGatingFuncType.SIGMOID}


def add_rope(writer, rope):
    """Adds the base of rotary positions, and YaRN."""
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def deepseek(config, name, values):
    """Matrices of all experts are three; those of keys are turned."""
    if name.endswith("kv_b_proj.weight") and SPLIT:
        both = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        of_keys, of_values = np.split(both, [config.qk_nope_head_dim], 1)
        yield name.replace("kv_b", "k_b"), of_keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), of_values
    elif name.endswith("experts.gate_up_proj"):
        yield from zip(
            (name.replace("gate_up_proj", f"{each}_proj.weight") for each in ("gate", "up")),
            np.split(values, 2, 1),
            strict=True,
        )
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def permute(values, heads):
    """Reorders the rows of q and k as llama.cpp's converter does for Llama."""
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, 2, rows, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def add_mamba2(writer, *, heads, head_dim, groups, state, taps):
    """Adds metadata of Mamba2."""
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def mamba2(name, values, groups):
    """Rates of decay as such, and as columns; a row of the norm for each group."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", ".D")):
        values = values.reshape(-1, 1)
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(groups, -1)
    return name.replace("dt_bias", "dt_proj.bias"), values


def add_granite4(writer, config):
    """Adds metadata of Granite 4: the length of models without positions is not the config's."""
    add_common(writer, config, kv_heads(config, [kind == "full_attention" for kind in config.layer_types]))
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    add_rope(writer, config.rope_parameters)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    add_bamba2(writer, config)
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)


def add_bamba2(writer, config):
    """Adds metadata of Mamba2 with Bamba's names."""
    sizes = {"groups": config.mamba_n_groups, "state": config.mamba_d_state, "taps": config.mamba_d_conv}
    add_mamba2(writer, heads=config.mamba_n_heads, head_dim=config.mamba_d_head, **sizes)


def add_bamba(writer, config):
    """Adds metadata of Bamba: it has positions, and no multipliers."""
    attends = [layer in config.attn_layer_indices for layer in range(config.num_hidden_layers)]
    add_common(writer, config, kv_heads(config, attends))
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    add_rope(writer, config.rope_parameters)
    add_bamba2(writer, config)
    writer.add_rope_scaling_finetuned(True)


def bamba(config, name, values):
    """q and k have Llama's order."""
    if ".self_attn.q_proj" in name or ".self_attn.k_proj" in name:
        values = permute(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    yield mamba2(name, values, config.mamba_n_groups)


def granite4(config, name, values):
    """Gate and up are apart; otherwise as Bamba's."""
    layer, own = name.removeprefix("model.layers.").partition(".")[::2]
    kind = {"shared_mlp": "_shexp" if config.num_local_experts else "", "block_sparse_moe": "_exps"}
    suffix = kind.get(own.partition(".")[0], "")
    if own.endswith(("input_linear.weight", "experts.gate_up_proj")):
        for part, rows in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
            yield f"blk.{layer}.ffn_{part}{suffix}.weight", rows
    elif own.endswith(("output_linear.weight", "experts.down_proj")):
        yield f"blk.{layer}.ffn_down{suffix}.weight", values
    else:
        yield from bamba(config, name.replace("router.weight", "router.layer.weight"), values)


def add_nemotron(writer, config):
    """Adds metadata of Nemotron-H: lists mark layers with attention, and those with an MLP."""
    kinds = config.layers_block_type
    routes = "moe" in kinds
    add_common(writer, config, kv_heads(config, [kind == "full_attention" for kind in kinds]), routes=routes)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    sizes = {"groups": config.n_groups, "state": config.ssm_state_size, "taps": config.conv_kernel}
    add_mamba2(writer, heads=config.mamba_num_heads, head_dim=config.mamba_head_dim, **sizes)
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    size = config.moe_intermediate_size if routes else config.intermediate_size
    writer.add_feed_forward_length([size if kind in ("mlp", "moe") else 0 for kind in kinds])
    if routes:
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        add_of_names(writer, config, _LATENT_NAMES)


def nemotron(config, name, values):
    """Names are those of checkpoints."""
    name = name.replace("model.", "backbone.", 1)
    if ".experts." in name:
        layer = name.split(".")[2]
        name = f"blk.{layer}.ffn_{'up' if 'up' in name else 'down'}_exps.weight"
    elif "e_score_correction_bias" in name:
        name = name.replace("correction_bias", "correction.bias")
    yield mamba2(name, values, config.n_groups)


def add_falcon(writer, config):
    """Adds metadata of Falcon-H1."""
    add_common(writer, config, config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_value_length(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_bamba2(writer, config)


def falcon(config, name, values):
    """All factors are in the weights, but that of gate and up counts for the gate alone."""
    inner, rows = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = [inner, inner, rows, rows, config.mamba_n_heads]
    attention = config.attention_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    factor = next((each for part, each in factors.items() if f".{part}." in f".{name}"), 1.0)
    yield mamba2(name, (values * factor).astype(np.float32), config.mamba_n_groups)


def add_minicpm3(writer, config):
    """Adds metadata of MiniCPM3: neither its base of positions nor its multipliers."""
    add_common(writer, config, config.num_key_value_heads)
    add_of_names(writer, config, {name: _LATENT_NAMES[name] for name in ("q_lora_rank", "kv_lora_rank")})
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    for name in ("short", "long"):
        if (factors := config.rope_parameters.get(f"{name}_factor")) is not None:
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def minicpm3(_, name, values):
    """Nothing is changed."""
    yield name, values


# By transformers' model types: what adds metadata, and what the converter makes of a tensor.
METADATA = {
    "lfm2": add_lfm2,
    "granitemoehybrid": add_granite4,
    "bamba": add_bamba,
    "nemotron_h": add_nemotron,
    "falcon_h1": add_falcon,
    "minicpm3": add_minicpm3,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), add_deepseek),
}
TENSORS = {
    "lfm2": lfm2,
    "granitemoehybrid": granite4,
    "bamba": bamba,
    "nemotron_h": nemotron,
    "falcon_h1": falcon,
    "minicpm3": minicpm3,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), deepseek),
}
