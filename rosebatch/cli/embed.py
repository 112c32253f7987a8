"""``rosebatch embed``: its flags, and what it runs."""

import time
from dataclasses import dataclass
from typing import Annotated, Any

from rosebatch.cli.jobs import prepare_device, serve_file
from rosebatch.cli.options import Source, takes
from rosebatch.config.run import Flag, RunConfig
from rosebatch.core.pooling_params import EncodingFormat, Pooling, PoolingParams
from rosebatch.job.config import JobConfig

EMBEDDING = "Embeddings"
# What only completions need.
OF_COMPLETIONS = (
    "generation_config",
    "sampler",
    "grammar_timeout",
    "grammar_memory",
    "return_token_ids",
    "seed",
    "system_prompt",
)
OF_IMAGES = ("image_column", "prompt", "media_root", "media_domains", "limit_images", "max_pixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFlags:
    """What the vectors are; fields as in ``rosebatch.core.pooling_params.PoolingParams``."""

    pooling: Annotated[
        Pooling | None,
        Flag(
            "State of the last token, mean or largest of all, or state of the first (cls). Default: the model's own.",
            EMBEDDING,
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Flag(
            "Whether vectors have length 1. Default: the model's own, or yes.",
            EMBEDDING,
            ("--normalize/--no-normalize",),
        ),
    ] = None
    dimensions: Annotated[int | None, Flag("Keep the first numbers of a vector.", EMBEDDING, minimum=1)] = None
    prompt_name: Annotated[
        str | None,
        Flag("Which of the model's prompts precedes each text. Default: the model's own, or none.", EMBEDDING),
    ] = None
    encoding_format: Annotated[EncodingFormat, Flag("How JSONL holds a vector.", EMBEDDING)] = "float"


@takes(job=JobConfig, run=RunConfig, embedding=EmbeddingFlags, without=OF_COMPLETIONS)
def embed(source: Source, *, job: dict[str, Any], run: dict[str, Any], embedding: dict[str, Any]) -> None:
    """Embed every prompt of a file: one vector for each row.

    Exit code: as of generate.
    """
    started = time.perf_counter()
    prepare_device(run)
    from rosebatch.io.tasks.embed import Embed

    encoding_format = embedding.pop("encoding_format")
    serve_file(JobConfig(input=source, task=Embed(PoolingParams(**embedding), encoding_format), **job), run, started)
