"""transformers' ``generate`` on left-padded batches. ``python -m rosebatch.bench.peers.transformers SPEC.json``.

A batch holds ``max_num_seqs`` prompts and runs to the longest output in it; of the others, the tokens that were asked
for are counted.
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
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, spec["dtype"])
    if spec["load_format"] == "dummy":
        torch.manual_seed(0)
        with torch.device(spec["device"]):
            config = AutoConfig.from_pretrained(spec["model"])
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **spec["args"])
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, **spec["args"]).to(spec["device"])
    model.eval()
    model.generation_config.eos_token_id = None

    def batch(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        width, longest = max(map(len, prompts)), max(output_lens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=spec["device"])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=spec["device"])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                pad_token_id=0,
                **_generation(sampling),
            )
        got = out[:, width:].tolist()
        return [min(len(row), n) for row, n in zip(got, output_lens, strict=True)]

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        size = spec["max_num_seqs"]
        starts = range(0, len(prompts), size)
        return lambda: [n for i in starts for n in batch(prompts[i : i + size], output_lens[i : i + size], sampling)]

    return Loaded(transformers.__version__, prepare)


def _generation(sampling: dict[str, Any]) -> dict[str, Any]:
    if not sampling.get("temperature"):
        return {"do_sample": False}
    # Where nothing is said, transformers keeps the 50 likeliest tokens.
    return {"do_sample": True, "top_k": 0, **sampling}


if __name__ == "__main__":
    serve(load)
