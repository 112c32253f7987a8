"""Log-probabilities of tokens by the model's own logits, as rows of int32 that travel like tokens do.

A row holds the log-probability of the token, ``MOST_LOGPROBS`` ids of likeliest tokens, and their log-probabilities.
Real numbers are stored as the bits of fp32.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.request import Logprobs
from rosebatch.sampling_params import MOST_LOGPROBS

ROW = 1 + 2 * MOST_LOGPROBS
_IDS = slice(1, 1 + MOST_LOGPROBS)
# Prompt logits held at a time: those of a whole prompt may be larger than everything else.
_PROMPT_ROWS = 128


def logprob_rows(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """``[S, ROW]`` int32 for tokens ``[S]`` of logits ``[S, V]``, with the ``most`` likeliest filled in.

    Nothing is fetched from the device, so a CUDA graph can hold it. Nobody reads the row of a token below 0.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    rows = torch.zeros(len(logits), ROW, dtype=torch.int32, device=logits.device)
    rows[:, 0] = logprobs.gather(1, tokens.long().clamp_min(0)[:, None])[:, 0].view(torch.int32)
    most = min(most, logits.shape[1])
    if most:
        values, ids = logprobs.topk(most)
        rows[:, 1 : 1 + most] = ids.int()
        rows[:, 1 + MOST_LOGPROBS : 1 + MOST_LOGPROBS + most] = values.contiguous().view(torch.int32)
    return rows


def prompt_logprobs(
    chunks: Sequence[Chunk],
    specs: Mapping[int, SequenceSpec],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
) -> dict[int, list[Logprobs]]:
    """What ``StepResult.prompt_logprobs`` holds, from the final hidden states ``[T, H]`` of a packed step.

    Fetched at once: whoever asks for them waits for the prompt anyway.
    """
    found, first = {}, 0
    for number, chunk in enumerate(chunks):
        spec = specs[chunk.id]
        most, behind = spec.sampling.prompt_logprobs, spec.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
        if most is not None and behind:
            tokens = torch.tensor(behind, device=hidden.device)
            states = hidden[first : first + len(behind)]
            parts = zip(states.split(_PROMPT_ROWS), tokens.split(_PROMPT_ROWS), strict=True)
            rows = torch.cat([logprob_rows(logits_of(some), ids, most) for some, ids in parts])
            found[number] = read_logprobs(rows.cpu().numpy(), behind, most)
        first += len(chunk.token_ids)
    return found


def read_all(
    rows: np.ndarray, specs: Sequence[SequenceSpec], token_ids: Sequence[Sequence[int]]
) -> list[list[Logprobs]]:
    """Each sequence's log-probabilities from rows ``[S, T, ROW]``; an empty list for one that does not ask."""
    return [
        [] if (most := spec.sampling.logprobs) is None else read_logprobs(own, tokens, most)
        for own, spec, tokens in zip(rows, specs, token_ids, strict=True)
    ]


def read_logprobs(rows: np.ndarray, token_ids: Sequence[int], most: int) -> list[Logprobs]:
    """Read rows ``[T, ROW]`` int32 of these tokens, with their ``most`` likeliest.

    There are fewer tokens than rows if the sequence ended earlier.
    """
    rows = np.ascontiguousarray(rows[: len(token_ids)])
    ids, reals = rows[:, _IDS][:, :most].tolist(), rows.view(np.float32)
    chosen, tops = reals[:, 0].tolist(), reals[:, 1 + MOST_LOGPROBS :][:, :most].tolist()
    return [
        Logprobs(token_id, logprob, tuple(zip(top_ids, top, strict=True)))
        for token_id, logprob, top_ids, top in zip(token_ids, chosen, ids, tops, strict=True)
    ]
