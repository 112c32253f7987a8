"""transformers' names of the architectures that rosebatch runs by its own code, and how their config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rosebatch.model.configs.cohere import COHERE2_DEFAULTS, COHERE_DEFAULTS, cohere, cohere2
from rosebatch.model.configs.experts import (
    MIXTRAL_DEFAULTS,
    QWEN2_MOE_DEFAULTS,
    QWEN3_MOE_DEFAULTS,
    mixtral,
    qwen2_moe,
    qwen3_moe,
)
from rosebatch.model.configs.gemma import GEMMA2_DEFAULTS, GEMMA3_DEFAULTS, gemma2, gemma3
from rosebatch.model.configs.glm4 import GLM4_DEFAULTS, glm4
from rosebatch.model.configs.gpt2 import gpt2
from rosebatch.model.configs.gpt_neox import GPT_NEOX_DEFAULTS, gpt_neox
from rosebatch.model.configs.gpt_oss import GPT_OSS_DEFAULTS, gpt_oss
from rosebatch.model.configs.hp1 import hp1
from rosebatch.model.configs.llama import (
    GRANITE_DEFAULTS,
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    QWEN2_DEFAULTS,
    QWEN3_DEFAULTS,
    SMOLLM3_DEFAULTS,
    granite,
    llama,
    mistral,
    qwen2,
    qwen3,
    smollm3,
)
from rosebatch.model.configs.olmo2 import OLMO2_DEFAULTS, OLMO3_DEFAULTS, olmo2, olmo3
from rosebatch.model.configs.phi3 import PHI3_DEFAULTS, phi3
from rosebatch.model.configs.qwen3_next import (
    QWEN3_5_DEFAULTS,
    QWEN3_5_MOE_DEFAULTS,
    QWEN3_NEXT_DEFAULTS,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from rosebatch.model.configs.stablelm import STABLELM_DEFAULTS, stablelm
from rosebatch.model.configs.starcoder2 import STARCODER2_DEFAULTS, starcoder2


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of transformers' classes.

    Attributes:
        model_type: transformers' name of its config.
        models: that have it, for people.
        parse: config.json, completed by ``defaults`` -> fields of ``ModelConfig``; raises ValueError or KeyError.
        defaults: of fields that config.json leaves out: those of transformers' config class.
        part: the object of config.json that holds the language model; empty if that is all of it.
        window: whether models of it may have sliding windows.
        experts: whether its MLPs are mixtures of experts.
        quantized: transformers' names of the formats that are expanded at load; others are refused.
        fallback: whether transformers' own code may run it, with ``--model-impl transformers``.
    """

    model_type: str
    models: str
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    window: bool = False
    experts: bool = False
    quantized: tuple[str, ...] = ()
    fallback: bool = True


ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture("gpt2", "GPT-2", gpt2, {"eos_token_id": 50256}),
    "LlamaForCausalLM": Architecture("llama", "Llama 2 and 3.x, SmolLM2", llama, LLAMA_DEFAULTS),
    "MistralForCausalLM": Architecture("mistral", "Mistral", mistral, MISTRAL_DEFAULTS, window=True),
    "Qwen2ForCausalLM": Architecture("qwen2", "Qwen2, Qwen2.5", qwen2, QWEN2_DEFAULTS, window=True),
    "Qwen3ForCausalLM": Architecture("qwen3", "Qwen3", qwen3, QWEN3_DEFAULTS, window=True),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", qwen2_moe, QWEN2_MOE_DEFAULTS, window=True, experts=True
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", "Qwen3 with experts", qwen3_moe, QWEN3_MOE_DEFAULTS, window=True, experts=True
    ),
    "MixtralForCausalLM": Architecture("mixtral", "Mixtral", mixtral, MIXTRAL_DEFAULTS, window=True, experts=True),
    "GptOssForCausalLM": Architecture(
        "gpt_oss", "gpt-oss", gpt_oss, GPT_OSS_DEFAULTS, window=True, experts=True, quantized=("mxfp4",)
    ),
    "Gemma2ForCausalLM": Architecture("gemma2", "Gemma 2", gemma2, GEMMA2_DEFAULTS, window=True),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "Gemma 3", gemma3, GEMMA3_DEFAULTS, window=True),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3", "Gemma 3 with images: text only", gemma3, GEMMA3_DEFAULTS, "text_config", window=True
    ),
    "Phi3ForCausalLM": Architecture("phi3", "Phi-3, Phi-4, Phi-4-mini", phi3, PHI3_DEFAULTS, window=True),
    "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2", olmo2, OLMO2_DEFAULTS),
    "Olmo3ForCausalLM": Architecture("olmo3", "OLMo 3", olmo3, OLMO3_DEFAULTS, window=True),
    "GraniteForCausalLM": Architecture("granite", "Granite 3.x", granite, GRANITE_DEFAULTS),
    "SmolLM3ForCausalLM": Architecture("smollm3", "SmolLM3", smollm3, SMOLLM3_DEFAULTS, window=True),
    "Glm4ForCausalLM": Architecture("glm4", "GLM-4-0414", glm4, GLM4_DEFAULTS),
    "StableLmForCausalLM": Architecture("stablelm", "StableLM", stablelm, STABLELM_DEFAULTS),
    "CohereForCausalLM": Architecture("cohere", "Command R, R+, Aya", cohere, COHERE_DEFAULTS),
    "Cohere2ForCausalLM": Architecture("cohere2", "Command R7B, Command A", cohere2, COHERE2_DEFAULTS, window=True),
    "GPTNeoXForCausalLM": Architecture("gpt_neox", "GPT-NeoX, Pythia", gpt_neox, GPT_NEOX_DEFAULTS),
    "Starcoder2ForCausalLM": Architecture("starcoder2", "StarCoder2", starcoder2, STARCODER2_DEFAULTS, window=True),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", "Qwen3-Next", qwen3_next, QWEN3_NEXT_DEFAULTS, experts=True, fallback=False
    ),
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", "Qwen3.5", qwen3_5, QWEN3_5_DEFAULTS, fallback=False),
    "Qwen3_5ForConditionalGeneration": Architecture(
        "qwen3_5", "Qwen3.5 with images: text only", qwen3_5, QWEN3_5_DEFAULTS, "text_config", fallback=False
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text", "Qwen3.5 with experts", qwen3_5_moe, QWEN3_5_MOE_DEFAULTS, experts=True, fallback=False
    ),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        "qwen3_5_moe",
        "Qwen3.5 with experts and images: text only",
        qwen3_5_moe,
        QWEN3_5_MOE_DEFAULTS,
        "text_config",
        experts=True,
        fallback=False,
    ),
    # A format of our own: transformers has no such class.
    "HP1ForCausalLM": Architecture("hp1", "[HP1](hp1.md), attention without softmax", hp1, fallback=False),
}
