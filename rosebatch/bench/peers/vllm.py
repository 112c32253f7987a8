"""vLLM's offline engine. ``python -m rosebatch.bench.peers.vllm SPEC.json``, see ``protocol``."""

import os
from collections.abc import Callable
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, serve

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults. Token ids go in and come out, so it needs no tokenizer."""
    import vllm

    arguments = {
        "model": spec["model"],
        "load_format": spec["load_format"],
        "dtype": spec["dtype"],
        "max_num_seqs": spec["max_num_seqs"],
        "enable_prefix_caching": spec["prefix_cache"],
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.9,
        "seed": 0,
    }
    engine = vllm.LLM(**arguments | spec["args"])

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            vllm.SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, **sampling)
            for n in output_lens
        ]
        return lambda: [len(out.outputs[0].token_ids) for out in engine.generate(inputs, params, use_tqdm=False)]

    return Loaded(vllm.__version__, prepare)


if __name__ == "__main__":
    serve(load)
