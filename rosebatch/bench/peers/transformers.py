"""transformers' ``generate`` on left-padded batches. ``python -m rosebatch.bench.peers.transformers SPEC.json``.

A batch holds ``max_num_seqs`` prompts and runs until its longest output is done. For every prompt only the requested
tokens count.
"""

import os
from collections.abc import Callable
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Load the model, or build it with random weights."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, spec["dtype"])
    if spec["load_format"] == "dummy":
        torch.manual_seed(0)
        with torch.device(spec["device"]):
            config = AutoConfig.from_pretrained(spec["model"], trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **spec["args"])
    else:
        args = {"trust_remote_code": False, **spec["args"]}
        model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, **args).to(spec["device"])
    model.eval()
    # No end token, and none of the sampling values that the model's authors recommend: the others get none.
    model.generation_config = GenerationConfig(pad_token_id=0)

    def batch(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        ids, mask = (torch.tensor(rows, device=spec["device"]) for rows in pad_left(prompts))
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(output_lens),
                pad_token_id=0,
                **_generation(sampling),
            )
        generated = out[:, ids.shape[1] :].tolist()
        return [min(len(row), n) for row, n in zip(generated, output_lens, strict=True)]

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        size = spec["max_num_seqs"]
        starts = range(0, len(prompts), size)
        return lambda: [n for i in starts for n in batch(prompts[i : i + size], output_lens[i : i + size], sampling)]

    return Loaded(transformers.__version__, prepare)


def pad_left(prompts: Prompts) -> tuple[Prompts, Prompts]:
    """The prompts at one length, with zeros on their left, and their attention mask: 0 for padding, 1 for tokens."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    return ids, [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]


def _generation(sampling: dict[str, Any]) -> dict[str, Any]:
    if not sampling.get("temperature"):
        return {"do_sample": False}
    # By default transformers keeps only the 50 likeliest tokens.
    return {"do_sample": True, "top_k": 0, **sampling}


if __name__ == "__main__":
    serve(load)
