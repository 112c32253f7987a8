"""PyTorch reference of drafts: prompt lookup (Saxena 2023) and its verification (arXiv 2211.17192) in a decode step.

A step with drafts computes ``Q`` tokens of each sequence: the last one, and up to ``Q - 1`` that may follow it. Row
``i · Q + j`` of the step is token ``j`` of sequence ``i``. It has fields of its own, ``drafted [NUM_FIELDS, B · Q]``.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.shared_keys import Pieces
from rosebatch_kernels.common.tokens import NO_TOKEN, NOT_FINITE, WRONG_DRAFT
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, POSITION, STOPS, TOKEN

# Tokens of an ending that are compared: a longer one is hardly a better guess, and each takes time.
LONGEST = 8
# Tokens of an ending that must have come before: fewer would often be chance.
SHORTEST = 3
# A copy with a change goes on if so many of its last tokens are those of the original.
LOOKED_AT, ALIKE = 8, 5


def propose(
    fields: Tensor,
    tokens: Tensor,
    firsts: Tensor,
    answers: Tensor,
    distances: Tensor,
    drafted: Tensor,
    windows: Tensor,
    pieces: Pieces | None = None,
) -> None:
    """Find drafts: what followed the longest ending that a sequence has elsewhere, too; of equal ones, the last.

    What followed is repeated, if it is short: a sequence that has begun to repeat itself goes on. Without such an
    ending, a copy may have changed a token: it goes on at its distance from the original while most of its last tokens
    are the same.

    Args:
        fields: ``[NUM_FIELDS, B]`` int32, see ``rosebatch_kernels.feedback.layout``.
        tokens: ``[B, W]`` int32, of each sequence those up to its last one, if there are at most ``W``; else it has no
            drafts. Others may come before its first one, such as a prediction of what follows.
        firsts: ``[B]`` int32, the place of a sequence's first token among them.
        answers: ``[1 + N]`` int32, a number n of tokens, and the tokens: of all sequences, they come before their own.
            -1 is no token: drafts end there.
        distances: ``[B]`` int32, from a sequence's end back to the last place with such an ending; 0 for none. Written.
        drafted: ``[NUM_FIELDS, B · Q]`` int32, written: the fields of each row. A row without a draft is not live, nor
            is one of a sequence that is not; it has that sequence's position. No draft is at the limit or beyond.
        windows: ``[N]`` int32, those of the model's layers; 0 for all keys.
        pieces: how decode attention cuts keys; then rows of a sequence are cut at the same places.
    """
    (_, batch), width = fields.shape, tokens.shape[1]
    queries = drafted.shape[1] // batch
    rows = fields[:, :, None].repeat(1, 1, queries)
    shared = answers[1 : 1 + int(answers[0])].tolist()
    for row in range(batch):
        position, limit = int(fields[POSITION, row]), int(fields[LIMIT, row])
        found: list[int] = []
        place = position + int(firsts[row])
        if position < limit and place < width:
            own = tokens[row, : place + 1].tolist()
            distances[row] = distance = _distance(shared, own, int(distances[row]))
            most = min(queries, limit - position) - 1
            # What followed may be shorter than what is wanted: then it goes on as it did.
            found = ((shared + own)[len(shared) + len(own) - distance :] * most)[:most] if distance else []
            found = found[: found.index(-1)] if -1 in found else found
            if pieces is not None:
                cuts = [[pieces.cut(position + j, w) for w in windows.tolist()] for j in range(len(found) + 1)]
                found = found[: next((j for j, cut in enumerate(cuts) if cut != cuts[0]), len(cuts)) - 1]
        rows[POSITION : NEXT + 1, row, : 1 + len(found)] += torch.arange(1 + len(found), device=fields.device)
        rows[TOKEN, row, 1 : 1 + len(found)] = torch.tensor(found, dtype=torch.int32, device=fields.device)
        rows[TOKEN, row, 1 + len(found) :] = 0
        rows[LIMIT, row, 1 + len(found) :] = 0
    drafted.copy_(rows.flatten(1))


def _distance(shared: list[int], own: list[int], before: int) -> int:
    """From the end of some tokens back to where they go on alike; ``before`` is what that was in the last step."""
    whole, best, place = shared + own, SHORTEST - 1, -1
    for end in range(len(whole) - 1):
        length = 0
        # An ending is all in the answers, or all in the sequence.
        most = min(LONGEST, len(own), end + 1 if end < len(shared) else end + 1 - len(shared))
        while length < most and whole[end - length] == whole[-1 - length]:
            length += 1
        if length >= max(best, SHORTEST):
            best, place = length, end
    if place >= 0:
        return len(whole) - 1 - place
    newest = range(len(whole) - 1, max(len(whole) - 1 - LOOKED_AT, before - 1, len(shared) - 1), -1)
    return before if before and sum(whole[i] == whole[i - before] for i in newest) >= ALIKE else 0


def verify(
    sampled: Tensor,
    drafted: Tensor,
    fields: Tensor,
    tokens: Tensor,
    firsts: Tensor,
    history: Tensor,
    step: Tensor,
    end_tokens: Tensor,
) -> None:
    """Take over the sampled tokens of each sequence up to the first that is not the draft for its position.

    Sequences stop as ``rosebatch_kernels.feedback.reference.advance`` has it, and nothing follows then.

    Args:
        sampled: ``[B · Q]`` integers, the token sampled after each row.
        drafted: from ``propose``.
        fields: ``[NUM_FIELDS, B]`` int32; written in place.
        tokens, firsts: see ``propose``; tokens are written in place, where there is room.
        history: ``[S, N]`` int32, N at least B · Q; row ``step % S`` gets each row's token, ``WRONG_DRAFT`` where a
            draft was in vain, or ``NO_TOKEN`` of a row that was not live.
        step: one int32 on the device, incremented.
        end_tokens: ``[E]`` int32.
    """
    (_, batch), width = fields.shape, tokens.shape[1]
    queries, ends = drafted.shape[1] // batch, end_tokens.tolist()
    shown = history[int(step) % len(history)]
    for row in range(batch):
        position, limit = int(fields[POSITION, row]), int(fields[LIMIT, row])
        going, kept = position < limit, 0
        for j in range(queries):
            place = row * queries + j
            is_live = position < limit and position + j < int(drafted[LIMIT, place])
            going = going and is_live and (j == 0 or int(drafted[TOKEN, place]) == int(sampled[place - 1]))
            token = int(sampled[place])
            shown[place] = token if going else WRONG_DRAFT if is_live else NO_TOKEN
            if not going:
                continue
            kept += 1
            failed = token == NOT_FINITE
            fields[TOKEN, row] = max(token, 0)
            if (there := int(firsts[row]) + position + kept) < width:
                tokens[row, there] = max(token, 0)
            if failed or (token in ends and fields[STOPS, row]):
                fields[LIMIT, row] = 0
                going = False
        fields[POSITION, row] += kept
        fields[NEXT, row] += kept
    step += 1
