"""What a folder of sentence-transformers says of its embeddings: how states are pooled, and if they are normalised.

Its ``modules.json`` lists the parts of the model in order; the one that pools has a folder with a ``config.json``.
"""

import json
from pathlib import Path
from typing import Any

from rosebatch.errors import UserError
from rosebatch.host.model_files import read_json, read_text, refusal, shown
from rosebatch.pooling_params import Pooling, PoolingParams

_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_SERVED: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_FLAG = "pooling_mode_"


def read_pooling(folder: Path) -> PoolingParams:
    """The folder's own pooling; nothing where there is no ``modules.json``.

    Raises:
        UserError: it is unreadable, or asks for what is not served.
    """
    path = folder / "modules.json"
    if not path.exists():
        return PoolingParams()
    pooling: Pooling | None = None
    normalize = False
    for kind, place in _modules(path):
        if kind == _POOLING:
            pooling = _pooling(path.parent / place / "config.json")
        elif kind == _NORMALIZE:
            normalize = True
        elif kind != _TRANSFORMER:
            raise refusal(path, f"its embeddings go through a part {shown(kind)}, which is not supported")
    return PoolingParams(pooling=pooling, normalize=normalize)


def _modules(path: Path) -> list[tuple[str, str]]:
    """The class of each part, without its package, and its folder."""
    try:
        found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in json.loads(read_text(path))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise refusal(path, f"unreadable list of parts ({error})") from None
    for _, place in found:
        # Nothing outside of the folder is read.
        if place and (Path(place).name != place or place == ".."):
            raise refusal(path, f"{shown(place)} is no folder beside it")
    return found


def _pooling(path: Path) -> Pooling:
    values = read_json(path)
    modes = _modes(values)
    if len(modes) != 1 or modes[0] not in _SERVED:
        asked = ", ".join(map(shown, modes)) or "nothing"
        raise refusal(path, f"pooling by {asked} is not supported: give --pooling last or mean")
    return _SERVED[modes[0]]


def _modes(values: dict[str, Any]) -> list[str]:
    """As flags, or as one name or several."""
    named = values.get("pooling_mode")
    if named is not None:
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]
    return [name.removeprefix(_FLAG) for name, value in values.items() if name.startswith(_FLAG) and value is True]


def pooling_or_refusal(folder: Path | None) -> tuple[PoolingParams, str | None]:
    """``read_pooling``, and why the folder's own embeddings cannot be had; None if they can."""
    try:
        return PoolingParams() if folder is None else read_pooling(folder), None
    except UserError as error:
        return PoolingParams(), str(error)
