"""Log-probabilities of tokens by the model's own logits, as rows of int32 that travel like tokens do.

See ``rosebatch_kernels.logprobs.layout``; a row has room for ``MAX_LOGPROBS`` likeliest tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.request import PackedLogprobs
from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch_kernels.logprobs.layout import IDS, LOGPROB, RANK, width

ROW = width(MAX_LOGPROBS)
# Where log-probabilities of likeliest tokens begin.
_TOPS = IDS + MAX_LOGPROBS
# Rows of prompt logits in memory at once: those of a whole prompt may be larger than everything else.
_PROMPT_ROWS = 128


class _Asked(NamedTuple):
    """A chunk whose prompt gets log-probabilities: its number, and the tokens, each with the row before it."""

    number: int
    rows: np.ndarray
    following: Sequence[int]
    limit: int


def prompt_logprobs(
    chunks: Sequence[Chunk],
    specs: Mapping[int, SequenceSpec],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    logprob_rows: Callable[..., Tensor],
    up: Staging,
    down: Staging,
) -> Callable[[], dict[int, PackedLogprobs]]:
    """Begin to fetch what ``StepResult.prompt_logprobs`` holds.

    Args:
        chunks: those of a packed step.
        specs: the specs of their sequences.
        hidden: ``[T, H]``, the step's final hidden states.
        logits_of: hidden states to logits.
        logprob_rows: the operator of this run.
        up, down: copy in stream order.

    Returns:
        a function that waits for them; it waits for nothing if there are none.
    """
    asked, first = [], 0
    for number, chunk in enumerate(chunks):
        if (found := _asked(number, chunk, specs[chunk.id], first)) is not None:
            asked.append(found)
        first += len(chunk.token_ids)
    if not asked:
        return dict
    lengths = [len(each.following) for each in asked]
    before = np.concatenate([each.rows for each in asked])
    following = np.concatenate([np.array(each.following, np.int64) for each in asked])
    limit = max(each.limit for each in asked)
    # Those of all chunks together: a product reads the whole head, for one row as for many.
    pairs = zip(*(sent.split(_PROMPT_ROWS) for sent in up.send(before, following)), strict=True)
    parts = [logprob_rows(logits_of(hidden[rows]), ids, limit, MAX_LOGPROBS) for rows, ids in pairs]
    fetch = down.fetch(torch.cat(parts))

    def read() -> dict[int, PackedLogprobs]:
        rows = np.split(fetch(), np.cumsum(lengths)[:-1])
        return {a.number: read_logprobs(own, a.following, a.limit) for a, own in zip(asked, rows, strict=True)}

    return read


def _asked(number: int, chunk: Chunk, spec: SequenceSpec, first_row: int) -> _Asked | None:
    """What a chunk reports; None for nothing. Its own rows start at ``first_row``."""
    if not spec.is_scored(chunk.end):
        return None
    assert spec.first_scored is not None
    begin = max(chunk.start, spec.first_scored - 1)
    following = list(spec.prompt_token_ids[begin + 1 : chunk.end + 1])
    rows = np.arange(len(following), dtype=np.int64) + (first_row + begin - chunk.start)
    if spec.scoring is not None and chunk.end == len(spec.prompt_token_ids):
        last = first_row + len(chunk.token_ids) - 1
        following += spec.scoring.next_token_ids
        rows = np.concatenate([rows, np.full(len(spec.scoring.next_token_ids), last)])
    return _Asked(number, rows, following, spec.sampling.prompt_logprobs or 0) if following else None


def read_all(
    rows: Iterable[np.ndarray], specs: Sequence[SequenceSpec], token_ids: Sequence[Sequence[int]]
) -> list[PackedLogprobs]:
    """Each sequence's log-probabilities from its rows ``[T, ROW]``; none for one without."""
    return [
        PackedLogprobs() if (limit := spec.sampling.logprobs) is None else read_logprobs(own, tokens, limit)
        for own, spec, tokens in zip(rows, specs, token_ids, strict=True)
    ]


def read_logprobs(rows: np.ndarray, token_ids: Sequence[int], limit: int) -> PackedLogprobs:
    """Read rows ``[T, ROW]`` int32 of these tokens, with their ``limit`` likeliest.

    There are fewer tokens than rows if the sequence ended earlier.
    """
    rows = rows[: len(token_ids)]
    ids = np.empty((len(rows), 1 + limit), np.int32)
    ids[:, 0], ids[:, 1:] = token_ids, rows[:, IDS : IDS + limit]
    values = np.empty_like(ids)
    values[:, 0], values[:, 1:] = rows[:, LOGPROB], rows[:, _TOPS : _TOPS + limit]
    return PackedLogprobs.of(ids.tobytes(), values.tobytes(), rows[:, RANK].tobytes(), 1 + limit)
