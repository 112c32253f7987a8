"""Tokens that grammars leave no choice for: no step samples them, and the next one computes them all. No torch."""

from collections.abc import Iterable

from rosebatch.engine.sampling.masks import fill_masks, only_allowed
from rosebatch.engine.scheduling.sequence import SequenceState


def apply_forced(sequences: Iterable[SequenceState], vocab_size: int, now: float) -> int:
    """Append them to all of these, and keep the masks of what follows; returns how many.

    A token is forced where its mask has no other: grammars are asked for masks together, so on all cores. Not where
    log-probabilities are asked for, which only a step has, or where the minimum length rules the token out.
    """
    count = 0
    open_ones = [
        (each, each.constraint)
        for each in sequences
        if each.constraint is not None and each.finish_reason is None and each.may_be_forced and not each.replayed
    ]
    while open_ones:
        masks = fill_masks([constraint for _, constraint in open_ones], vocab_size)
        further = []
        for (sequence, constraint), mask, token_id in zip(open_ones, masks, only_allowed(masks), strict=True):
            before = len(sequence.generated)
            early = before < sequence.sampling.min_tokens
            if token_id < 0 or (early and token_id in sequence.spec.stop_ids):
                sequence.mask = mask
                continue
            # Of a run, no token would be looked at for an end that comes too early.
            run, complete = ([token_id], constraint.feed(token_id)) if early else constraint.follow(token_id)
            sequence.apply_token_ids(run, now=now, complete=complete)
            count += len(sequence.generated) - before
            if sequence.finish_reason is None:
                further.append((sequence, constraint))
        open_ones = further
    return count
