"""Offline batch text generation: a file of prompts in, completions and a throughput report out.

::

    from rosebatch import LLM, SamplingParams, run_file

    with LLM("Qwen/Qwen3-0.6B") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].outputs[0].text)

    run_file("prompts.jsonl", "answers.jsonl", model="Qwen/Qwen3-0.6B", resume=True)
"""

from rosebatch.core.version import __version__ as __version__

# Not from typing: until the command line is imported, Ctrl-C prints a traceback, and that takes as long.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rosebatch.core.errors import UserError as UserError
    from rosebatch.core.pooling_params import PoolingParams as PoolingParams
    from rosebatch.core.sampling_params import SamplingParams as SamplingParams
    from rosebatch.core.structured_outputs import GrammarSpec as GrammarSpec
    from rosebatch.core.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
    from rosebatch.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from rosebatch.llm.beam_search import BeamSearchOutput as BeamSearchOutput
    from rosebatch.llm.beam_search import BeamSearchParams as BeamSearchParams
    from rosebatch.llm.beam_search import BeamSearchSequence as BeamSearchSequence
    from rosebatch.llm.classes import ClassificationOutput as ClassificationOutput
    from rosebatch.llm.classes import ClassificationRequestOutput as ClassificationRequestOutput
    from rosebatch.llm.classes import RewardOutput as RewardOutput
    from rosebatch.llm.classes import TokenClassificationOutput as TokenClassificationOutput
    from rosebatch.llm.embeddings import EmbeddingOutput as EmbeddingOutput
    from rosebatch.llm.embeddings import EmbeddingRequestOutput as EmbeddingRequestOutput
    from rosebatch.llm.llm import LLM as LLM
    from rosebatch.llm.lora_request import LoRARequest as LoRARequest
    from rosebatch.llm.outputs import CompletionOutput as CompletionOutput
    from rosebatch.llm.outputs import Logprob as Logprob
    from rosebatch.llm.outputs import RequestMetrics as RequestMetrics
    from rosebatch.llm.outputs import RequestOutput as RequestOutput
    from rosebatch.llm.prompts import TextPrompt as TextPrompt
    from rosebatch.llm.prompts import TokensPrompt as TokensPrompt
    from rosebatch.llm.run_file import JobResult as JobResult
    from rosebatch.llm.run_file import run_file as run_file
    from rosebatch.llm.scores import ScoreRequestOutput as ScoreRequestOutput
    from rosebatch.llm.scores import ScoringOutput as ScoringOutput
    from rosebatch.llm.scores import ScoringRequestOutput as ScoringRequestOutput

# Imported when they are first asked for: the command line starts without PyTorch.
_PLACES = {
    "LLM": "rosebatch.llm.llm",
    "SamplingParams": "rosebatch.core.sampling_params",
    "GrammarSpec": "rosebatch.core.structured_outputs",
    "GuidedDecodingParams": "rosebatch.core.structured_outputs",
    "StructuredOutputsParams": "rosebatch.core.structured_outputs",
    "TextPrompt": "rosebatch.llm.prompts",
    "TokensPrompt": "rosebatch.llm.prompts",
    "run_file": "rosebatch.llm.run_file",
    "JobResult": "rosebatch.llm.run_file",
    "RequestOutput": "rosebatch.llm.outputs",
    "CompletionOutput": "rosebatch.llm.outputs",
    "BeamSearchParams": "rosebatch.llm.beam_search",
    "BeamSearchOutput": "rosebatch.llm.beam_search",
    "BeamSearchSequence": "rosebatch.llm.beam_search",
    "LoRARequest": "rosebatch.llm.lora_request",
    "PoolingParams": "rosebatch.core.pooling_params",
    "EmbeddingRequestOutput": "rosebatch.llm.embeddings",
    "EmbeddingOutput": "rosebatch.llm.embeddings",
    "ScoreRequestOutput": "rosebatch.llm.scores",
    "ScoringRequestOutput": "rosebatch.llm.scores",
    "ScoringOutput": "rosebatch.llm.scores",
    "ClassificationRequestOutput": "rosebatch.llm.classes",
    "ClassificationOutput": "rosebatch.llm.classes",
    "TokenClassificationOutput": "rosebatch.llm.classes",
    "RewardOutput": "rosebatch.llm.classes",
    "Logprob": "rosebatch.llm.outputs",
    "RequestMetrics": "rosebatch.llm.outputs",
    "UserError": "rosebatch.core.errors",
}
__all__ = ["__version__", *_PLACES]
# vLLM's names that are not served, by what serves instead.
_INSTEAD = {
    "await LLM(…).agenerate(…) is for asyncio": "AsyncLLM AsyncLLMEngine AsyncEngineArgs",
    "use LLM(model, …)": "EngineArgs LLMEngine",
    "stream yields whole outputs": "RequestOutputKind",
    "use EmbeddingRequestOutput": "PoolingOutput PoolingRequestOutput",
}


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    for hint, names in _INSTEAD.items():
        if name in names.split():
            raise ImportError(f"rosebatch has no {name}: {hint}", name="rosebatch")
    if name not in _PLACES:
        raise AttributeError(f"module 'rosebatch' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
