"""GGUF files from random transformers models, as llama.cpp's converter writes them."""

from itertools import product
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model import gguf_layers
from tests.model.gguf_layers import permute

VOCAB, LAYERS, END, BOS = 320, 2, 300, 301
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": END,
}
# By transformers' model types.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    **dict.fromkeys(("granitemoehybrid", "bamba"), gguf.MODEL_ARCH.GRANITE_HYBRID),
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "minicpm3": gguf.MODEL_ARCH.MINICPM3,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), gguf.MODEL_ARCH.DEEPSEEK2),
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Not the numbers of Llama 3.1, which a reader might take for granted.
LLAMA3_LIKE_ROPE = {**LLAMA3_ROPE, "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 32.0}
SHORT_LLAMA3_ROPE = {**LLAMA3_ROPE, "original_max_position_embeddings": 64}
STEEP_YARN_ROPE = {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 0.8}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    "original_max_position_embeddings": 128,
    "attention_factor": 1.25,
    "factor": 1.0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_theta=5000.0)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "llama-wide-heads": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32)),
    "llama-3.1": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LINEAR_ROPE)),
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE)),
    "llama-mlp-bias": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama-3.1-like": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_LIKE_ROPE)),
    "llama-3.1-short": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=SHORT_LLAMA3_ROPE)),
    "llama-steep-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=STEEP_YARN_ROPE)),
    "llama-longrope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LONG_ROPE)),
    "llama-experts": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=LAYERS,
            n_head=4,
            n_positions=128,
            initializer_range=0.2,
            bos_token_id=BOS,
            eos_token_id=END,
        )
    ),
}


def random_model(name, models=MODELS):
    """A model with every parameter random, also norms and biases: at 1 and 0 they would hide mistakes."""
    torch.manual_seed(0)
    model = models[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def llama3_divisors(rope, head_dim):
    """The tensor in which llama.cpp's converter stores Llama 3's RoPE scaling: a divisor for each pair of channels."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def add_tokenizer(writer, *, pre="gpt-2", merges=("a b",), words=(), **more):
    """Adds bytes, the merges' results, whole words, two special tokens, a user-defined one, and unused ones."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += dict.fromkeys([*("".join(merge.split(" ")) for merge in merges), *words])
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types = [more.get("types", {}).get(token, kind) for token, kind in zip(tokens, types, strict=True)]
    while len(tokens) < END:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    tokens += ["<|stop|>", "<|begin|>", "<tool>"]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    while len(tokens) < VOCAB:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model(more.get("kind", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(BOS)
    if "add_bos" in more:
        writer.add_add_bos_token(more["add_bos"])
    if "add_eos" in more:
        writer.add_add_eos_token(more["add_eos"])
    if "template" in more:
        writer.add_chat_template(more["template"])
    if "eot" in more:
        writer.add_eot_token_id(more["eot"])
    if "eot_word" in more:
        writer.add_eot_token_id(tokens.index(more["eot_word"]))


def converted(config, name, values):
    """What llama.cpp's converter makes of a tensor: names for the package's table, and values."""
    kind, own = config.model_type, name.rpartition(".layers.")[2].partition(".")[2]
    if kind in gguf_layers.TENSORS:
        yield from gguf_layers.TENSORS[kind](config, name, values)
        return
    plus_one = kind.startswith(("gemma", *DELTA)) and name.endswith("norm.weight")
    if own.startswith(("self_attn.q_proj", "self_attn.k_proj")) and kind in ("llama", "mixtral", "granite"):
        is_q = own.startswith("self_attn.q_proj")
        values = permute(values, config.num_attention_heads if is_q else config.num_key_value_heads)
    elif kind == "gpt2" and values.ndim == 2 and ".h." in name:
        values = values.T
    elif own.startswith("linear_attn."):
        yield from _delta(config, name, own.removeprefix("linear_attn."), values)
        return
    elif "query_key_value" in name:
        heads = config.num_attention_heads
        values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    elif plus_one:
        values = values + np.float32(1)
    elif own == "self_attn.sinks":
        name += ".weight"
    elif "layernorm.norms." in own:
        return
    elif own.startswith("mlp.experts."):
        yield from _experts(config, name, own, values)
        return
    yield name, values


def _delta(config, name, own, values):
    """The gated delta rule. Files of Qwen3.5 have the first value head of each key head first."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    group, wide = heads // key_heads, heads * config.linear_value_head_dim
    key_rows = key_heads * config.linear_key_head_dim

    def tiled(rows):
        return rows.reshape(key_heads, group, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if own == "A_log":
        values = -np.exp(values)
    elif own == "dt_bias":
        name = name.replace("dt_bias", "dt_proj.bias")
    elif own == "conv1d.weight":
        values = values[:, 0]
    if own == "in_proj_qkvz.weight":
        rows = values.reshape(key_heads, -1, values.shape[-1])
        own_keys, own_values = config.linear_key_head_dim, group * config.linear_value_head_dim
        *qkv, gate = np.split(rows, np.cumsum([own_keys, own_keys, own_values]), 1)
        prefix = name.removesuffix("in_proj_qkvz.weight")
        yield f"{prefix}in_proj_qkv.weight", np.concatenate([part.reshape(-1, values.shape[-1]) for part in qkv])
        yield f"{prefix}in_proj_z.weight", gate.reshape(-1, values.shape[-1])
        return
    if config.model_type != "qwen3_next" and own != "norm.weight":
        if own == "out_proj.weight":
            values = tiled(values.T).T
        else:
            first = 2 * key_rows if len(values) == 2 * key_rows + wide else 0
            values = np.concatenate([values[:first], tiled(values[first:])])
    yield name, values


def _experts(config, name, own, values):
    """The two matrices that transformers has in one tensor, apart."""
    prefix, suffix = name.removesuffix(own), "bias" if own.endswith("_bias") else "weight"
    turned = config.model_type == "gpt_oss"
    if turned and suffix == "weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in own:
        yield f"{prefix}mlp.experts.down_proj.{suffix}", values
        return
    middle = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if turned else (values[:, :middle], values[:, middle:])
    yield f"{prefix}mlp.experts.gate_proj.{suffix}", gate
    yield f"{prefix}mlp.experts.up_proj.{suffix}", up


def head_norms(model):
    """StableLM's norms of heads, one below the other."""
    state, heads = model.state_dict(), {"q": "num_attention_heads", "k": "num_key_value_heads"}
    for layer, (name, count) in product(range(model.config.num_hidden_layers), heads.items()):
        prefix = f"model.layers.{layer}.self_attn.{name}_layernorm"
        if f"{prefix}.norms.0.weight" in state:
            norms = [state[f"{prefix}.norms.{i}.weight"] for i in range(getattr(model.config, count))]
            yield f"{prefix}.weight", torch.stack(norms).numpy()


def add_rope(writer, config, head_dim):
    """Adds metadata of rotary positions, and their tensors."""
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        writer.add_rope_dimension_count(int(share * head_dim))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_float32(f"{writer.arch}.rope.scaling.yarn_beta_fast", rope["beta_fast"])
            writer.add_float32(f"{writer.arch}.rope.scaling.yarn_beta_slow", rope["beta_slow"])
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (1 + 0.1 * np.log(rope["factor"])))
    if rope["rope_type"] == "longrope":
        if config.model_type != "phi3":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        length = rope["original_max_position_embeddings"]
        factor = config.max_position_embeddings / length
        growth = np.sqrt(1 + np.log(factor) / np.log(length))
        writer.add_rope_scaling_orig_ctx_len(length)
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor", growth))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))


def add_metadata(writer, config):
    """Adds what the converter writes of a config."""
    kind = config.model_type
    if kind in gguf_layers.METADATA:
        gguf_layers.METADATA[kind](writer, config)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if kind == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if kind != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    if kind != "gpt_neox":
        writer.add_head_count_kv(config.num_key_value_heads)
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon"):
        if (eps := getattr(config, name, None)) is not None:
            (writer.add_layer_norm_rms_eps if name == "rms_norm_eps" else writer.add_layer_norm_eps)(eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    add_rope(writer, config, head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size or kind == "gpt_oss":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if kind != "mixtral":
            size = config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
            writer.add_expert_feed_forward_length(size)
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind.startswith(DELTA):
        add_delta(writer, config)
    if window := getattr(config, "sliding_window", None) if kind in WINDOWS else None:
        writer.add_sliding_window(window)
    if (types := getattr(config, "layer_types", None)) and kind in ("gemma3_text", "cohere2"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])
    for name, add in OPTIONS.items():
        if (value := getattr(config, name, None)) is not None:
            getattr(writer, add)(value)


def add_delta(writer, config):
    """Adds metadata of the gated delta rule."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


DELTA = ("qwen3_next", "qwen3_5")
WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "cohere2", "phi3", "starcoder2")
OPTIONS = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "use_parallel_residual": "add_parallel_residual",
}


def architecture_of(config):
    """The package's key of an architecture. Nemotron-H with experts has another name than without."""
    dense = config.model_type == "nemotron_h" and "moe" not in config.layers_block_type
    return gguf.MODEL_ARCH.NEMOTRON_H if dense else ARCHITECTURES[config.model_type]


def add_model(writer, model, quantized):
    """Adds metadata and tensors, named by the gguf package's own table."""
    config = model.config
    add_metadata(writer, config)
    names = gguf.get_tensor_name_map(architecture_of(config), config.num_hidden_layers)
    tensors = [(name, values.detach().numpy()) for name, values in model.state_dict().items()]
    if config.tie_word_embeddings:
        tensors = [(name, values) for name, values in tensors if name != "lm_head.weight"]
    stored = [new for name, values in tensors for new in converted(config, name, values)]
    for hf_name, given in [*stored, *head_norms(model)]:
        values = np.ascontiguousarray(given)
        # The package has no name of Cohere's head, which it takes to be tied.
        gguf_name = (
            names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or {"lm_head.weight": "output.weight"}[hf_name]
        )
        fits = values.ndim >= 2 and values.shape[-1] % 32 == 0
        kind = next((kind for part, kind in quantized.items() if part in hf_name and fits), None)
        if kind is None:
            writer.add_tensor(gguf_name, values)
        elif kind == gguf.GGMLQuantizationType.I8:
            writer.add_tensor(gguf_name, values.astype(np.int8))
        else:
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)


def write(path, name="llama", model=None, *, quantized=None, architecture=None, **tokenizer):
    """Writes a file of a model, or of a tokenizer alone."""
    if model is not None:
        architecture = gguf.MODEL_ARCH_NAMES[architecture_of(model.config)]
    writer = gguf.GGUFWriter(path, architecture or name)
    if model is not None:
        add_model(writer, model, quantized or {})
    add_tokenizer(writer, **tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def changed(good, fields=(), tensors=(), without=()):
    """A reader of a good file that is changed in memory: further fields, or None for fewer, and tensors alike."""
    others = {key: SimpleNamespace(contents=lambda value=value: value) for key, value in dict(fields).items()}
    like = good.tensors[0]
    more = [SimpleNamespace(name=name, data=like.data, tensor_type=like.tensor_type) for name in tensors]
    kept = [tensor for tensor in good.tensors if tensor.name not in without]
    found = {key: value for key, value in (good.fields | others).items() if dict(fields).get(key, 0) is not None}
    return SimpleNamespace(fields=found, tensors=[*kept, *more])
