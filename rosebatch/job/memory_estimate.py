"""How much memory a row takes while it is under way: estimates that are cheap, and the same in every run."""

from collections.abc import Collection, Sequence
from sys import getsizeof
from typing import Any

from msgspec import Raw

from rosebatch.core.request import LOGPROB_BYTES, RANK_BYTES
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import FEW, TokenIds
from rosebatch.io.rows import FailedRow, Row
from rosebatch.text.shared_tools import SharedTools

_LISTS = (list, tuple)
_CONTAINERS = (dict, *_LISTS)
_FLOATS = {float}
# Types of values that have nothing in them.
_PLAIN = {*_FLOATS, str, int, bool, type(None)}

# An integer of Python, and two places that refer to it: a tuple and the list of the engine's first completion.
_INTEGER = 32
_PROMPT_TOKEN = _INTEGER + 2 * 8
# A token id with a number, in a tuple of both.
_PAIR = 128
# That list of each further completion.
_COPIED_TOKEN = 8
# The objects of a row and its sampling parameters.
ROW = 2000


def row_bytes(row: Row | FailedRow) -> int:
    """Bytes of a row as it was read."""
    size = ROW + (_deep_bytes(row.metadata) if row.metadata else 0)
    if isinstance(row, Row):
        size += _sampling_bytes(row.sampling) + len(row.options.suffix) + len(row.prediction)
        size += _deep_bytes(row.options.chat_template_kwargs) if row.options.chat_template_kwargs else 0
        if row.continuations:
            size += sum(map(getsizeof, row.continuations))
        if row.prompt is not None:
            return size + getsizeof(row.prompt)
        if (token_ids := row.prompt_token_ids) is not None:
            # Not each id by itself: there are thousands.
            return size + getsizeof(token_ids) + _INTEGER * len(token_ids)
        if row.pairs:
            size += sum(getsizeof(first) + getsizeof(second) for first, second in row.pairs)
        for each in row.prompts:
            size += getsizeof(each) + (0 if isinstance(each, str) else _INTEGER * len(each))
        size += _deep_bytes(row.messages) if row.messages else 0
        size += sum(image.size for image in row.images)
        size += _tool_bytes(row.tool_use.tools) if row.tool_use is not None else 0
    return size


def prompt_bytes(sampling: SamplingParams, num_tokens: int, max_model_len: int) -> int:
    """Bytes of a prompt's token ids, and of the log-probabilities that it may bring.

    Generated tokens do not count: the KV cache bounds those of running completions.

    Args:
        sampling: its parameters.
        num_tokens: of the prompt.
        max_model_len: most tokens of prompt and completion together.
    """
    size = num_tokens * (_PROMPT_TOKEN + _COPIED_TOKEN * (sampling.n - 1))
    if sampling.logprobs is not None:
        limit = max(0, min(sampling.max_tokens, max_model_len - num_tokens))
        size += sampling.n * limit * _scored_bytes(sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        size += num_tokens * _scored_bytes(sampling.prompt_logprobs)
    return size


def _sampling_bytes(sampling: SamplingParams) -> int:
    """Bytes of what a row may give very many of."""
    few = not (sampling.stop or sampling.bad_words or sampling.logit_bias)
    if few and not (sampling.stop_token_ids or sampling.allowed_token_ids or sampling.grammar):
        return 0
    size = _PAIR * len(sampling.logit_bias)
    for texts in (sampling.stop, sampling.bad_words):
        if texts:
            size += sum(map(getsizeof, texts))
    size += _PROMPT_TOKEN * (len(sampling.stop_token_ids) + len(sampling.allowed_token_ids or ()))
    return size if sampling.grammar is None else size + len(sampling.grammar.source)


def _scored_bytes(likeliest: int) -> int:
    """Bytes of a token's log-probability, packed, with those of its likeliest ones."""
    return LOGPROB_BYTES * (1 + likeliest) + RANK_BYTES


def _tool_bytes(tools: Sequence[Any]) -> int:
    if not isinstance(tools, SharedTools):
        return _deep_bytes(tools)
    if tools.memory is None:
        tools.memory = _deep_bytes(tools)
    return tools.memory


def _are_token_ids(values: Sequence[Any]) -> bool:
    """Whether they are whole numbers of 32 bits; tables keep those of prompts, and looks at thousands take long."""
    try:
        TokenIds.of(values)
    except (OverflowError, TypeError):
        return False
    return True


def _deep_bytes(value: object) -> int:
    """Bytes of decoded JSON; nothing is assumed of its depth."""
    size, rest = getsizeof(value), [value]
    while rest:
        each = rest.pop()
        inner: Collection[object] = ()
        if isinstance(each, dict):
            size += sum(map(getsizeof, each))
            inner = each.values()
        elif isinstance(each, _LISTS):
            if len(each) > FEW and _are_token_ids(each):
                size += _INTEGER * len(each)
            else:
                inner = each
        # Of millions of values, a look at each takes half a second.
        types = set(map(type, inner))
        if types == _FLOATS:
            size += getsizeof(0.0) * len(inner)
        else:
            size += sum(map(_own_bytes if Raw in types else getsizeof, inner))
        if not types <= _PLAIN:
            # Never the values themselves.
            rest += [found for found in inner if isinstance(found, _CONTAINERS)]
    return size


def _own_bytes(value: object) -> int:
    """Bytes of a value, of JSON those of its text."""
    return memoryview(value).nbytes if isinstance(value, Raw) else getsizeof(value)
