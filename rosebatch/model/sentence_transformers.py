"""How a folder of sentence-transformers describes its embeddings.

Its ``modules.json`` lists the parts of the model in order; the one that pools has a folder with a ``config.json``.
Dense parts have folders with weights as well. ``config_sentence_transformers.json`` has prefixes of texts, and
``sentence_bert_config.json`` the longest prompt.
"""

import json
from pathlib import Path
from typing import Any

from rosebatch.config.limits import MAX_SIZE
from rosebatch.core.errors import UserError
from rosebatch.core.pooling_params import (
    NO_PROMPTS,
    PLAIN_POOLING,
    Dense,
    ModelPooling,
    NamedPrompts,
    Pooling,
    PoolingParams,
)
from rosebatch.host.model_files import read_json, read_text, refusal, shown

_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"
_SERVED: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "max_tokens": "max",
    "max": "max",
    "cls_token": "cls",
    "cls": "cls",
}
_FLAG = "pooling_mode_"
_PROMPTS = "config_sentence_transformers.json"
# Of the first part; former versions named it by the kind of model.
_LIMITS = [
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta", "mpnet")
]
# Activations of Dense -> whether they are tanh.
_ACTIVATIONS = {"Identity": False, "Tanh": True}
_VECTOR = "sentence_embedding"
# Tokens of the shortest limit that is one.
_SHORTEST = 2


def read_pooling(folder: Path) -> PoolingParams:
    """The folder's own pooling; nothing where there is no ``modules.json``.

    Raises:
        UserError: it is unreadable, or asks for what is not served.
    """
    path = folder / "modules.json"
    if not path.exists():
        return PoolingParams()
    require_plain_texts(folder, "give messages in place of texts, and --pooling")
    prompts = read_prompts(folder)
    pooling: Pooling | None = None
    normalize = False
    for kind, place in _modules(path):
        if kind == _POOLING:
            pooling = _pooling(path.parent / place / "config.json", prompts)
        elif kind == _NORMALIZE:
            own = path.parent / place / "config.json"
            if own.exists():
                _require_vector(own, read_json(own))
            normalize = True
        elif kind == _DENSE and normalize:
            raise refusal(path, "its embeddings are normalised before a part 'Dense', which is not supported")
        elif kind not in (_TRANSFORMER, _DENSE):
            raise refusal(path, f"its embeddings go through a part {shown(kind)}, which is not supported")
    if pooling is None:
        raise refusal(path, "none of its parts pools: give --pooling")
    return PoolingParams(pooling=pooling, normalize=normalize, prompt_name=prompts.default)


def read_dense(folder: Path) -> tuple[Dense, ...]:
    """The products that follow the pooling; none where there is no ``modules.json``.

    Raises:
        UserError: one is unreadable, or has what is not served.
    """
    path = folder / "modules.json"
    places = [place for kind, place in _modules(path) if kind == _DENSE] if path.exists() else []
    return tuple(_dense(folder / place) for place in places)


def _dense(folder: Path) -> Dense:
    path = folder / "config.json"
    values = read_json(path)
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise refusal(path, f"activation {shown(activation)} is not supported; supported are Identity and Tanh")
    _require_vector(path, values)
    if values.get("use_residual"):
        raise refusal(path, "use_residual is not supported")
    sizes = values.get("in_features"), values.get("out_features")
    if not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise refusal(path, f"in_features and out_features are no sizes: {shown(list(sizes))}")
    bias = values.get("bias", True)
    if type(bias) is not bool:
        raise refusal(path, f"bias must be true or false, got {shown(bias)}")
    return Dense(folder, values["in_features"], values["out_features"], bias, _ACTIVATIONS[activation])


def _require_vector(path: Path, values: dict[str, Any]) -> None:
    """Check that a part is for the pooled vector, and not for each token."""
    for name in ("module_input_name", "module_output_name"):
        if values.get(name, _VECTOR) not in (None, _VECTOR):
            raise refusal(path, f"{name} {shown(values[name])} is not supported")


def require_plain_texts(folder: Path, hint: str) -> None:
    """Check that the model sees texts as they are, and not in messages that a chat template renders.

    Args:
        folder: of the model.
        hint: what to do where it does not.

    Raises:
        UserError: it does not, or the file is unreadable.
    """
    path, values = _limits(folder)
    kinds = values.get("modality_config")
    if isinstance(kinds, dict) and "message" in kinds:
        raise refusal(path, f"its texts go through the chat template: {hint}")


def read_prompts(folder: Path) -> NamedPrompts:
    """The folder's prefixes of texts; none where it has no such file.

    Raises:
        UserError: they are unreadable.
    """
    path, lower_case = folder / _PROMPTS, _limits(folder)[1].get("do_lower_case") is True
    if not path.exists():
        return NamedPrompts(lower_case=lower_case)
    values = read_json(path)
    texts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if isinstance(texts, dict):
        # A name without a text is one of nothing.
        texts = {name: "" if text is None else text for name, text in texts.items()}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise refusal(path, "its prompts are no texts by name")
    if default is not None and (not isinstance(default, str) or default not in texts):
        raise refusal(path, f"its default prompt {shown(default)} is not among its prompts")
    return NamedPrompts(texts, default, lower_case)


def prompts_or_none(folder: Path | None) -> NamedPrompts:
    """``read_prompts``; none if they are unreadable, which ``pooling_or_refusal`` reports."""
    try:
        return NO_PROMPTS if folder is None else read_prompts(folder)
    except UserError:
        return NO_PROMPTS


def own_activation(folder: Path) -> str | None:
    """What a cross-encoder's outputs go through, by its name in Python; None where the folder does not say.

    Raises:
        UserError: the file is unreadable.
    """
    path = folder / _PROMPTS
    named = read_json(path).get("activation_fn") if path.exists() else None
    return None if named is None else str(named)


def longest_prompt(folder: Path) -> int | None:
    """The tokens of the longest prompt that the model was made for; None where it does not say.

    Raises:
        UserError: the file is unreadable.
    """
    path, values = _limits(folder)
    limit = values.get("max_seq_length")
    tokenizer = folder / "tokenizer_config.json"
    if limit is None and (folder / "modules.json").exists() and tokenizer.exists():
        # Later versions leave it to the tokenizer, whose number may be one that means none.
        limit = read_json(tokenizer).get("model_max_length")
        return limit if type(limit) is int and limit >= _SHORTEST else None
    if limit is not None and (type(limit) is not int or limit < _SHORTEST):
        raise refusal(path, f"max_seq_length {shown(limit)} is no length")
    return limit


def _limits(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the first part, and its values; none where there is no such file."""
    path = next((folder / name for name in _LIMITS if (folder / name).exists()), None)
    return (folder, {}) if path is None else (path, read_json(path))


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
        if folder is None:
            return PLAIN_POOLING
        return ModelPooling(read_pooling(folder), dense=read_dense(folder))
    except UserError as error:
        return ModelPooling(refused=str(error))
