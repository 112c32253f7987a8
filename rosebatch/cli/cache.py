"""``rosebatch cache``: the disk space of converted models and of Python's bytecode."""

from typing import Annotated

import typer


def cache(*, clear: Annotated[bool, typer.Option("--clear", metavar=" ", help="Delete all of them.")] = False) -> None:
    """List the models that rosebatch converted from .gguf files, with their sizes, and that of Python's bytecode.

    Models from the Hugging Face Hub are in its own cache: see 'hf cache'.
    """
    from rosebatch.host.bytecode import bytecode_bytes, clear_bytecode
    from rosebatch.model.gguf.cache import cache_dir, cached_models, clear_cache

    models = cached_models()
    rows = [(model.name, model.num_bytes) for model in models]
    if bytecode := bytecode_bytes():
        rows.append(("Python's bytecode", bytecode))
    rows.append(("total", sum(num_bytes for _, num_bytes in rows)))
    width = max(len(name) for name, _ in rows)
    typer.echo(cache_dir())
    for name, num_bytes in rows:
        typer.echo(f"{name:{width}}  {_mib(num_bytes):>14}")
    if clear:
        typer.echo(f"{_mib(clear_cache() + clear_bytecode())} deleted")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
