"""GGUF files of models whose layers differ from each other, as llama.cpp's converter writes them."""


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


# By transformers' model types: what adds metadata, and what the converter makes of a tensor.
METADATA = {"lfm2": add_lfm2}
TENSORS = {"lfm2": lfm2}
