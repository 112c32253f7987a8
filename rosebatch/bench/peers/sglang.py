"""SGLang's offline engine. ``python -m rosebatch.bench.peers.sglang SPEC.json``, see ``protocol``."""

import os
from collections.abc import Callable
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults, but with graphs for all batch sizes: by default the largest have none."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    largest_graph = "cuda_graph_max_bs_decode"
    if largest_graph not in ServerArgs.__dataclass_fields__:
        largest_graph = "cuda_graph_max_bs"  # its name until 2026
    arguments = {
        "model_path": spec["model"],
        "load_format": spec["load_format"],
        "dtype": spec["dtype"],
        "max_running_requests": spec["max_num_seqs"],
        "disable_radix_cache": not spec["prefix_cache"],
        largest_graph: spec["max_num_seqs"],
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.85,
        "random_seed": 0,
        "log_level": "error",
    }
    engine = Engine(**arguments | spec["args"])

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        # SGLang needs a tokenizer for a minimum. Without end tokens every output has the maximum length.
        params = [{"max_new_tokens": n, "ignore_eos": True, **sampling} for n in output_lens]
        return lambda: [len(out["output_ids"]) for out in engine.generate(input_ids=prompts, sampling_params=params)]

    return Loaded(sglang.__version__, prepare, engine.shutdown)


if __name__ == "__main__":
    serve(load)
