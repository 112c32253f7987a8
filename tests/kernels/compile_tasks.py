"""Which groups of launches are compiled for which architectures, and the kernels that each group has."""

from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY

GROUPS = {
    "attention": {"_decode", "_prefill", "_prepare", "_rotate"},
    "invariant": {"_decode", "_prefill", "_product"},
    "attention_of_more_families": {"_decode", "_prefill", "_prepare", "_whole_norm"},
    "prompts_on_hopper": {"_prefill_hopper"},
    "shared_attention": {"_attend_shared", "_decode", "_prefill_shared", "_ready_queries"},
    "attention_of_e4m3": {"_append", "_attend_shared", "_decode", "_prefill", "_prefill_shared", "_prepare"},
    "gated_attention": {"_gated_attend_shared", "_gated_decode", "_gated_prefill", "_prepare"},
    "whole_prompts": {"_bidirectional_attend"},
    "delta_rule": {"_causal_conv", "_delta_decode", "_delta_solve", "_delta_walk", "_gated_norm"},
    "channel_delta": {
        "_causal_conv", "_channel_solve", "_channel_walk", "_delta_decode", "_gated_norm",
    },
    "mamba2": {"_causal_conv", "_gate_norm", "_mamba_decode", "_mamba_walk"},
    "latent_attention": {"_decode_latents", "_each_head", "_merge_latents", "_prefill_latents", "_prepare_latents"},
    "latents_on_hopper": {"_decode_latents_hopper", "_merge_latents"},
    "expanded_latents": {"_attend_fresh", "_attend_prefix"},
    "short_convolutions": {"_convolve_chunks", "_convolve_tokens"},
    "layers": {
        "_activation", "_activation_mul", "_append", "_bias_residual", "_copy_blocks", "_norm", "_sigmoid_mul",
        "_uclip",
    },
    "short_sums": {
        "_add_chunks", "_count_chunk", "_expert_product", "_gated_product", "_place_chunk", "_product",
    },
    "fp8": {"_fp8_product", "_norm", "_quantize"},
    "int4": {"_int4_decode", "_int4_product", "_sum_parts"},
    "adapters": {"_add_chunks", "_count_chunk", "_expand", "_expand_gated", "_place_chunk", "_shrink"},
    "experts": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_route"},
    "experts_of_fp8": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_quantize"},
    "tokens": {
        "_adjust", "_advance", "_choose", "_count", "_mask", "_report", "_scale_and_cap", "_sum_segments", "_summarise",
    },
    "drafts": {"_propose", "_verify"},
}  # fmt: skip
# Those of "layers" that need the shared memory of Hopper.
STREAMED = {"_gated_product", "_logits", "_product"}
# Groups that not all architectures have. 103 has each instruction of "fp8".
ARCHITECTURES = {
    "prompts_on_hopper": (HOPPER,),
    "latents_on_hopper": (HOPPER,),
    "expanded_latents": (HOPPER,),
    "short_sums": (HOPPER,),
    "fp8": (89, 90, 100, 103, 120),
    "attention_of_e4m3": (89, 90, 100, 120),
    # Experts are decoded at load for the generation of 100.
    "experts_of_fp8": (89, 90, 120),
}
# Nothing is compiled for these: another of the generation, with no more shared memory, has the same sizes and launches.
ALIKE = {80: 86, 89: 86, 103: 100}
# Sizes, memory and shapes of products in tensor cores are those of 86 here too, and so were the bytes of shared memory
# of each form. Triton runs the passes that it has for 100, and kernels may wait for their predecessor.
CONSUMER_BLACKWELL = 120
# How far forms beyond the first are compiled, see ``compiling.py``.
OTHERS = {86: "converted", HOPPER: "converted", CONSUMER_BLACKWELL: "firsts"}
# All forms of these go through ptxas, which is what may be wrong there.
WHOLE = {"short_sums"}
TASKS = [
    (arch, group)
    for arch in SHARED_MEMORY
    for group in GROUPS
    if (arch in ARCHITECTURES[group] if group in ARCHITECTURES else arch not in ALIKE)
]


def others_of(arch: int, group: str) -> str:
    """How far the forms of a task beyond the first are compiled."""
    return "whole" if group in WHOLE else OTHERS.get(arch, "lowered")


def kernels_of(arch: int, group: str) -> set[str]:
    """The names of the kernels that an architecture has of a group."""
    streams = group == "layers" and SHARED_MEMORY[arch] >= SHARED_MEMORY[HOPPER]
    return GROUPS[group] | (STREAMED if streams else set())
