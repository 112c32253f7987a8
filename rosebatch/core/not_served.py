"""What serves instead of vLLM's parameters and settings that are not served."""

_INSTEAD = {
    "use n: choices are not ranked": "best_of",
    "use logit_bias, bad_words or allowed_token_ids": "logits_processors",
    "JSON is written on one line": "whitespace_pattern disable_any_whitespace",
    "use grammar": "structural_tag",
    'write "additionalProperties": false into the schema': "disable_additional_properties",
    "use lora={name: folder} of LLM": "enable_lora",
    "give {'prompt': text, 'lora': name} as the prompt": "lora_request",
    "use chat_template= of LLM, with a file": "chat_template",
    "only text is served": "chat_template_content_format",
    "give {'image': 4}": "limit_mm_per_prompt",
    "use max_pixels= of LLM": "mm_processor_kwargs",
    "leave it out, equal images are found by their pixels": "multi_modal_uuids",
    "give urgent prompts first": "priority",
    "give token ids as prompts": "tokenization_kwargs truncate_prompt_tokens enable_prompt_embeds",
    "use tensor_parallel_size or data_parallel_size": "pipeline_parallel_size distributed_executor_backend",
    "use tensor_parallel_size or quantization='fp8'": "cpu_offload_gb",
    "completes, embeds, scores and classifies": "task runner",
    "set HF_HOME": "download_dir",
    "set HF_TOKEN": "hf_token",
    "change config.json in a copy of the model": "hf_overrides rope_scaling rope_theta disable_sliding_window",
    "use tokenizer= of LLM": "tokenizer_mode tokenizer_revision",
    "prompts may be token ids": "skip_tokenizer_init",
    "use switches, such as cuda_graph=False": "compilation_config",
    "use speculative_model= of LLM, with an EAGLE-3 head": "speculative_config",
    "use SamplingParams": "override_generation_config",
    "they are of the model's own logits": "logprobs_mode",
    "there is one backend, llguidance, and reasoning_parser= of LLM": "structured_outputs_config",
    "use kv_cache_memory": "num_gpu_blocks_override",
    "use PoolingParams": "pooler_config override_pooler_config",
    "use close(), and make the LLM again": "enable_sleep_mode",
}
_HINTS = {name: hint for hint, names in _INSTEAD.items() for name in names.split()}


def instead_of(name: str) -> str | None:
    """What serves instead of a parameter or setting of vLLM; None if nothing does."""
    return _HINTS.get(name)


def not_served(name: str, value: object) -> ValueError:
    """The error for a parameter with a value that is not served."""
    return ValueError(f"{name}={value!r} is not served" + (f": {_HINTS[name]}" if name in _HINTS else ""))
