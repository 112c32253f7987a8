"""Phi-3, Phi-4 and Phi-4-mini: a Llama whose checkpoints hold q, k and v as one tensor, and gate and up as another."""

from rosebatch.model.families.llama import Llama


class Phi3(Llama):
    """See ``Llama``."""

    qkv_names = ("self_attn.qkv_proj",)
    gate_up_names = ("mlp.gate_up_proj",)
