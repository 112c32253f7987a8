"""vLLM's embeddings. ``python -m rosebatch.bench.peers.vllm_embed SPEC.json``: see ``protocol``.

Nothing is generated, so all ``output_lens`` are 0, and there is no ``sampling`` to look at.
"""

from collections.abc import Callable
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, serve
from rosebatch.bench.peers.vllm import engine_arguments


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults for embeddings. Token ids go in, so it needs no tokenizer."""
    import vllm

    _without_scores()
    pooling = {"runner": "pooling", "convert": "embed"}
    engine = vllm.LLM(**{**pooling, **engine_arguments(spec)})

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return lambda: [0 for _ in engine.embed(inputs, use_tqdm=False)]

    return Loaded(vllm.__version__, prepare)


def _without_scores() -> None:
    """Have vLLM 0.33 leave out scores, which embedding models can give as well: they ask for a tokenizer."""
    try:
        from vllm.entrypoints.pooling import factories
    except ImportError:
        return
    factories.enable_scoring_api = lambda *_: False


if __name__ == "__main__":
    serve(load)
