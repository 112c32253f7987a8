"""How a folder of sentence-transformers describes its embeddings.

Its ``modules.json`` lists the parts of the model in order; the one that pools has a folder with a ``config.json``.
``config_sentence_transformers.json`` has prefixes of texts, and ``sentence_bert_config.json`` the longest prompt.
"""

import json
from pathlib import Path
from typing import Any

from rosebatch.core.errors import UserError
from rosebatch.core.pooling_params import NO_PROMPTS, PLAIN_POOLING, ModelPooling, NamedPrompts, Pooling, PoolingParams
from rosebatch.host.model_files import read_json, read_text, refusal, shown

_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_SERVED: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
}
_FLAG = "pooling_mode_"
_PROMPTS, _LIMITS = "config_sentence_transformers.json", "sentence_bert_config.json"


def read_pooling(folder: Path) -> PoolingParams:
    """The folder's own pooling; nothing where there is no ``modules.json``.

    Raises:
        UserError: it is unreadable, or asks for what is not served.
    """
    path = folder / "modules.json"
    if not path.exists():
        return PoolingParams()
    prompts = read_prompts(folder)
    pooling: Pooling | None = None
    normalize = False
    for kind, place in _modules(path):
        if kind == _POOLING:
            pooling = _pooling(path.parent / place / "config.json", prompts)
        elif kind == _NORMALIZE:
            normalize = True
        elif kind != _TRANSFORMER:
            raise refusal(path, f"its embeddings go through a part {shown(kind)}, which is not supported")
    return PoolingParams(pooling=pooling, normalize=normalize, prompt_name=prompts.default)


def read_prompts(folder: Path) -> NamedPrompts:
    """The folder's prefixes of texts; none where it has no such file.

    Raises:
        UserError: they are unreadable.
    """
    path = folder / _PROMPTS
    if not path.exists():
        return NO_PROMPTS
    values = read_json(path)
    texts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise refusal(path, "its prompts are no texts by name")
    if default is not None and (not isinstance(default, str) or default not in texts):
        raise refusal(path, f"its default prompt {shown(default)} is not among its prompts")
    return NamedPrompts(texts, default)


def prompts_or_none(folder: Path | None) -> NamedPrompts:
    """``read_prompts``; none if they are unreadable, which ``pooling_or_refusal`` reports."""
    try:
        return NO_PROMPTS if folder is None else read_prompts(folder)
    except UserError:
        return NO_PROMPTS


def longest_prompt(folder: Path) -> int | None:
    """The tokens of the longest prompt that the model was made for; None where it does not say.

    Raises:
        UserError: the file is unreadable.
    """
    path = folder / _LIMITS
    if not path.exists():
        return None
    limit = read_json(path).get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 2):
        raise refusal(path, f"max_seq_length {shown(limit)} is no length")
    return limit


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


def _pooling(path: Path, prompts: NamedPrompts) -> Pooling:
    values = read_json(path)
    modes = _modes(values)
    if values.get("include_prompt") is False and any(prompts.by_name.values()):
        raise refusal(path, "pooling without the prompt in front is not supported: give --pooling")
    if len(modes) != 1 or modes[0] not in _SERVED:
        asked = ", ".join(map(shown, modes)) or "nothing"
        raise refusal(path, f"pooling by {asked} is not supported: give --pooling")
    return _SERVED[modes[0]]


def _modes(values: dict[str, Any]) -> list[str]:
    """As flags, or as one name or several."""
    named = values.get("pooling_mode")
    if named is not None:
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]
    return [name.removeprefix(_FLAG) for name, value in values.items() if name.startswith(_FLAG) and value is True]


def pooling_or_refusal(folder: Path | None) -> ModelPooling:
    """``read_pooling``, or why the folder's own pooling is not served."""
    try:
        return PLAIN_POOLING if folder is None else ModelPooling(read_pooling(folder))
    except UserError as error:
        return ModelPooling(refused=str(error))
