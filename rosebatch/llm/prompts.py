"""What an ``LLM`` is given: prompts, and parameters for all or one for each."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

import numpy as np

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.not_served import instead_of
from rosebatch.core.plain import plain
from rosebatch.core.token_ids import FEW, TokenIds
from rosebatch.core.words import counted
from rosebatch.io.depth import DEEPEST, is_deeper
from rosebatch.io.fields import PromptOptions, RequestFields, to_struct, tools_of
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.images.references import ImageReference, source_of
from rosebatch.io.pairs import pairs_of
from rosebatch.io.tasks.score import require_continuations
from rosebatch.io.text_only import require_text
from rosebatch.io.tools import ToolUse


class TextPrompt(TypedDict):
    """A text, perhaps with images: of one, ``{"image": PIL.Image.Image}``, of several ``{"image": [...]}``."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids."""

    prompt_token_ids: Sequence[int]
    multi_modal_data: NotRequired[Mapping[str, Any]]


# A text, its token ids, or either in a mapping: ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, perhaps with
# images: ``"multi_modal_data": {"image": ...}``, and with the name of an adapter: ``"lora": ...``.
Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_IMAGES = "multi_modal_data"
_LORA = "lora"
# Types of nearly all prompts. To ask whether a value is a mapping takes several times as long.
_USUAL = frozenset({str, list})
# Numbers of NumPy.
_COPIED_AT_ONCE = 1 << 18
# Of whole numbers, but no token ids: parts of a file, and what has no order.
_NO_TOKEN_IDS = (bytes, bytearray, memoryview, Set, Mapping)


def _tool_use_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any], *, parallel: bool
) -> ToolUse | None:
    """What a chat may call.

    Raises:
        ValueError: the tools are no tools, or the choice is none of them.
    """
    if not isinstance(tools, Sequence | None):
        raise FlagError(f"tools must be a list, got {type(tools).__name__}")
    given = {"tools": list(tools or ()), "tool_choice": choice, "parallel_tool_calls": parallel}
    try:
        use = tools_of(to_struct(given, RequestFields), given, chat=True)
    except RowError as error:
        raise FlagError(error.message) from None
    # Scripts for other engines' libraries find calls of any form in the text themselves.
    return None if use is None else replace(use, may_stay_text=True)


def chats_fields(
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    parallel_tool_calls: bool = True,
) -> list[dict[str, Any]]:
    """The fields of a row for each conversation of a call; see ``LLM.chat``.

    Raises:
        ValueError: there is neither one conversation nor several, or the tools cannot be used.
    """
    options = PromptOptions(
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
    )
    for name, given in (("chat_template_kwargs", options.chat_template_kwargs), ("tools", tools)):
        if is_deeper(given):
            raise FlagError(f"{name} are nested more than {DEEPEST} levels deep")
    use = _tool_use_of(tools, tool_choice, parallel=parallel_tool_calls)
    messages = plain(messages)
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        example = '[{"role": "user", "content": "Hi"}]'
        raise FlagError(f"messages must be a list such as {example}, got {type(messages).__name__}")
    chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [{**_chat_fields(chat), "options": options, "tool_use": use} for chat in chats]


def _chat_fields(chat: Any) -> dict[str, Any]:
    """The messages of a chat, and its images; an ``error`` if it is none."""
    chat = plain(chat)
    try:
        if isinstance(chat, str) or not isinstance(chat, Sequence):
            raise RowError("invalid_messages", f"a chat is a list of messages, got {type(chat).__name__}")
        if not chat:
            raise RowError("empty_prompt", "messages is empty")
        messages = [dict(each) if isinstance(each, Mapping) else each for each in chat]
        if is_deeper(messages):
            raise RowError("invalid_messages", f"messages are nested more than {DEEPEST} levels deep")
        to_struct({"messages": messages}, RequestFields)
        messages, images = messages_with_images(messages)
        return {"messages": messages, "images": images}
    except RowError as refused:
        code = "invalid_messages" if refused.code == "invalid_field" else refused.code
        return {"error": RowError(code, refused.message)}


def one_for_each(name: str, given: Any, default: Any, count: int) -> list[Any]:
    """Parameters of each prompt, from those of all or a list.

    Raises:
        ValueError: the list has another length, or it is none.
    """
    if isinstance(given, Mapping | str):
        raise ValueError(f"{name} must be {type(default).__name__}, got {type(given).__name__}")
    if given is None or isinstance(given, type(default)):
        return [default if given is None else given] * count
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} must be {type(default).__name__}, got {type(given).__name__}")
    params = list(given)
    if len(params) != count:
        raise ValueError(f"{name} has {counted(len(params), 'parameter')} for {counted(count, 'prompt')}")
    return params


def continuations_of(prompts: Sequence[Mapping[str, Any]], given: Any) -> list[tuple[Any, ...]]:
    """The continuations of each prompt, from those of all or a list of them; none where the prompt is scored.

    Raises:
        ValueError: they are no continuations, or the list has another length.
    """
    if given is None:
        return [()] * len(prompts)
    given = plain(given)
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise FlagError(f"continuations must be a list of texts or token ids, got {type(given).__name__}")
    given = list(given)
    if given and all(map(_is_continuation, given)):
        given = [given] * len(prompts)
    if len(given) != len(prompts):
        raise FlagError(f"continuations has {counted(len(given), 'list')} for {counted(len(prompts), 'prompt')}")
    for each in given:
        if isinstance(each, str) or not isinstance(each, Sequence) or not all(map(_is_continuation, each)):
            raise FlagError("continuations are lists of continuations, each of them a text or token ids")
    try:
        return [
            require_continuations("continuations", own, has_tokens=prompt.get("prompt_token_ids") is not None)
            for prompt, own in zip(prompts, given, strict=True)
        ]
    except RowError as error:
        raise FlagError(error.message) from None


def text_pairs(first: Any, second: Any) -> tuple[tuple[str, str], ...]:
    """The pairs of a call.

    Raises:
        ValueError: they are no texts, or not as many of both.
    """
    first, second = plain(first), plain(second)
    for each in (first, second):
        several_texts = isinstance(each, Sequence) and all(isinstance(text, str) for text in each)
        if not isinstance(each, str) and not several_texts:
            raise FlagError("this model scores pairs: give a text or texts, and a text or texts for them")
    try:
        # Each pair is a row.
        return pairs_of(first, second, most=math.inf)
    except RowError as error:
        raise FlagError(error.message) from None


def _is_continuation(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and all(type(each) is int for each in value))


def several(prompts: Any) -> Any:
    """The prompts of a call: one prompt, such as token ids in a list or an array, is a list of one.

    Raises:
        ValueError: they are no prompts.
    """
    prompts = _column(prompts)
    # A table would give the names of its columns.
    if isinstance(prompts, bytes) or hasattr(prompts, "columns") or not isinstance(prompts, Iterable):
        way = "; give one of its columns" if hasattr(prompts, "columns") else ""
        kind = type(prompts).__name__
        raise ValueError(f"prompts must be a text, token ids, a mapping, or several, got {kind}{way}")
    is_one = isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and all(type(plain(each)) is int for each in prompts)
    )
    return [prompts] if is_one else prompts


def _column(given: Any) -> Any:
    """A column of Arrow as a list, in which lists stay arrays; others of NumPy and the like as Python's numbers."""
    if not hasattr(given, "to_pylist") or hasattr(given, "columns"):
        return plain(given)
    return [each.values for each in given] if hasattr(given.type, "value_field") else given.to_pylist()


def _require_known(prompt: Mapping[str, Any]) -> None:
    text, ids = map(prompt.get, _PROMPT_KEYS)
    if len(prompt) == 1 and (text is not None or ids is not None):
        # Nearly all, and quicker to check.
        return
    others = {name: value for name, value in prompt.items() if name not in (_IMAGES, _LORA)}
    require_text(others, f"a prompt's images are in {_IMAGES}, as image")
    if not isinstance(prompt.get(_LORA), str | None):
        raise RowError("invalid_field", f"{_LORA} must be the name of an adapter, got {type(prompt[_LORA]).__name__}")
    given = [name for name, value in others.items() if value is not None]
    if not set(_PROMPT_KEYS).intersection(given):
        way = "; chat takes messages" if "messages" in given else ""
        got = ", ".join(map(str, given)) or "nothing"
        raise RowError("missing_prompt", f"expected prompt or prompt_token_ids, got {got}{way}")
    if unknown := [name for name in given if name not in _PROMPT_KEYS]:
        way = instead_of(unknown[0]) or f"a prompt's mapping has {' or '.join(_PROMPT_KEYS)}, {_IMAGES} and {_LORA}"
        raise RowError("unsupported_field", f"{unknown[0]} is not served: {way}")


def _has_token_ids(given: np.ndarray) -> bool:
    whole = given.ndim == 1 and given.dtype.kind in "iu" and len(given) > 0
    # NumPy's ``min`` and ``max`` take three times as long for a prompt.
    return bool(whole and given[given.argmin()] >= 0 and given[given.argmax()] < 2**32)


def _array_of(given: Any) -> np.ndarray | None:
    """The array of NumPy, Arrow or pandas, or the tensor of the host, if its values are token ids."""
    try:
        found = np.asarray(given) if hasattr(given, "__array__") else None
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if found is not None and _has_token_ids(found) else None


def _token_ids(given: Any) -> Sequence[int] | None:
    """A prompt's token ids; None if it has no order, or truth values, or others that are no whole numbers."""
    ids: Sequence[Any] = given
    if type(given) is not list:
        if (array := _array_of(given)) is not None:
            # Without a number of Python for each, and without a copy of all of them in between.
            copied = TokenIds("I")
            for start in range(0, len(array), _COPIED_AT_ONCE):
                copied.frombytes(array[start : start + _COPIED_AT_ONCE].astype(np.uint32).tobytes())
            return copied
        found = plain(given)
        if isinstance(given, _NO_TOKEN_IDS) or not isinstance(found, Iterable):
            return None
        ids = found if isinstance(found, list | tuple) else tuple(found)
    if ids and hasattr(ids[0], "tolist"):
        ids = list(map(plain, ids))
    looked: Sequence[Any] = ids
    try:
        packed = TokenIds.of(ids)
        if len(ids) > FEW:
            values = np.frombuffer(packed, np.uint32)
            # Now, while they are near: the engine looks for it much later.
            packed.largest = int(values[values.argmax()])
            # Truth values are 0 and 1: mostly, there are none.
            if values[values.argmin()] > 1:
                return packed
            looked = [ids[place] for place in np.flatnonzero(values <= 1).tolist()]
        made: Sequence[int] = packed
    except (OverflowError, TypeError):
        made = tuple(ids)
    return made if all(issubclass(kind, int) and kind is not bool for kind in set(map(type, looked))) else None


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The fields of a row; an ``error`` if it is no prompt."""
    if type(prompt) not in _USUAL and isinstance(prompt, Mapping) and prompt.get(_IMAGES):
        try:
            images = _images_of(prompt[_IMAGES])
        except RowError as refused:
            return {"error": refused}
        return {**_fields_of(prompt), "images": images}
    return _fields_of(prompt)


def _images_of(given: Any) -> tuple[ImageReference, ...]:
    """The images of a prompt's mapping.

    Raises:
        RowError: it has none, or something else.
    """
    if not isinstance(given, Mapping) or set(given) != {"image"}:
        got = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise RowError("unsupported_field", f"{_IMAGES} has image alone, got {got}")
    images = given["image"]
    found = []
    for number, each in enumerate(images if isinstance(images, list | tuple) else [images]):
        where = f"{_IMAGES}.image[{number}]"
        found.append(ImageReference(where, source_of(each, where, "invalid_prompt")))
    return tuple(found)


def _fields_of(prompt: Prompt) -> dict[str, Any]:
    given: Any = prompt
    if type(prompt) not in _USUAL and isinstance(prompt, Mapping):
        try:
            _require_known(prompt)
        except RowError as refused:
            return {"error": refused}
        if (lora := prompt.get(_LORA)) is not None:
            return {**_fields_of({name: value for name, value in prompt.items() if name != _LORA}), _LORA: lora}
        text, ids = map(prompt.get, _PROMPT_KEYS)
        given = text if ids is None else ids
        if isinstance(given, str) is not (ids is None):
            return _no_prompt(given)
    if isinstance(given, str):
        return {"prompt": given} if given else {"error": RowError("empty_prompt", "prompt is empty")}
    token_ids = _token_ids(given)
    return _no_prompt(given) if token_ids is None else {"prompt_token_ids": token_ids}


def _no_prompt(given: Any) -> dict[str, Any]:
    told = f"a prompt is a text, token ids or a mapping, got {type(given).__name__}"
    return {"error": RowError("invalid_prompt", told)}
