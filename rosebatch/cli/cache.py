"""``rosebatch cache``: the disk space of converted models."""

from typing import Annotated

import typer


def cache(*, clear: Annotated[bool, typer.Option("--clear", metavar=" ", help="Delete all of them.")] = False) -> None:
    """List the models that rosebatch converted from .gguf files, with their sizes.

    Models from the Hugging Face Hub are in its own cache: see 'hf cache'.
    """
    from rosebatch.model.gguf_cache import cache_dir, cached_models, clear_cache

    models = cached_models()
    rows = [(model.name, model.num_bytes) for model in models]
    rows.append(("total", sum(model.num_bytes for model in models)))
    width = max(len(name) for name, _ in rows)
    typer.echo(cache_dir())
    for name, num_bytes in rows:
        typer.echo(f"{name:{width}}  {_mib(num_bytes):>14}")
    if clear:
        typer.echo(f"{_mib(clear_cache())} deleted")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
