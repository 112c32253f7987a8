"""Keys of config.json that change what a model computes, where the model's family does not read them.

Files hold many keys that change nothing, and transformers ignores what a class does not have. These names have one
meaning wherever they occur: dropped without a word, they would make another model of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rosebatch.model.hf.fields import UnservedError

_Parse = Callable[[Mapping[str, Any]], Any]
# Name -> the value that changes nothing; without one: false, 0 and what is empty.
_COMPUTING: dict[str, Any] = {
    "is_causal": True,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "scale_emb", "embedding_multiplier"), 1),
    **dict.fromkeys(("residual_multiplier", "logits_scaling", "logit_scale", "logits_mup_width_multiplier"), 1),
    **dict.fromkeys(("per_layer_config", "kv_sharing_modes", "num_kv_shared_layers", "hidden_size_per_layer_input")),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
    **dict.fromkeys(("attention_multiplier", "scale_depth", "dim_model_base", "clip_qkv", "alibi", "use_alibi")),
    **dict.fromkeys(("use_logn_attn", "use_dynamic_ntk", "use_qk_norm", "qk_norm", "qk_layernorm", "lm_head_bias")),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank")),
    **dict.fromkeys(("use_bidirectional_attention", "attention_chunk_size", "attn_temperature_tuning")),
    **dict.fromkeys(("unpadded_vocab_size", "no_rope_layers", "add_cross_attention", "quantization")),
}
# Families count their experts under one of these names; a file may hold the same number under several.
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
# No parser that reads a key takes this for a value like others.
_IMPOSSIBLE = "impossible"


def require_read(values: Mapping[str, Any], parse: _Parse, known: Mapping[str, Any]) -> None:
    """Check that a family reads all such keys.

    Args:
        values: of config.json.
        parse: of the family. A key whose value may be anything, with the same result, is not read.
        known: keys that it reads under conditions.

    Raises:
        UnservedError: it does not read one.
    """
    for name in sorted(values.keys() & (_COMPUTING.keys() - known.keys())):
        value, neutral = values[name], _COMPUTING[name]
        if value is None or value == neutral or (neutral is None and not value):
            continue
        names = {each for each in _EXPERTS if values.get(each) == value} if name in _EXPERTS else {name}
        if _same(parse, {**values, **dict.fromkeys(names, _IMPOSSIBLE)}, parse(values)):
            raise UnservedError(f"{name} is not supported")


def _same(parse: _Parse, values: Mapping[str, Any], expected: Any) -> bool:
    try:
        return bool(parse(values) == expected)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
