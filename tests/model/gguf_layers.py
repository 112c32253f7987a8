"""GGUF files of models whose layers differ from each other, as llama.cpp's converter writes them."""

import gguf
import numpy as np


def add_common(writer, config, kv_heads):
    """What its ``TextModel`` adds for all models."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(config.vocab_size)
    add_of_names(writer, config, _NAMES)


def add_of_names(writer, config, names):
    """Adds what the config has of these."""
    for name, add in names.items():
        if (value := getattr(config, name, None)) is not None:
            getattr(writer, add)(value)


_NAMES = {
    "intermediate_size": "add_feed_forward_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "norm_eps": "add_layer_norm_rms_eps",
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


# By transformers' model types: what adds metadata, and what the converter makes of a tensor.
METADATA = {"lfm2": add_lfm2, **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), add_deepseek)}
TENSORS = {"lfm2": lfm2, **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), deepseek)}
