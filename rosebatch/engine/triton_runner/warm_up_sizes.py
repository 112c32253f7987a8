"""Sizes of steps that together need nearly all kernels that those of other sizes do."""

from collections.abc import Callable, Collection, Hashable, Sequence

from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, padded_size

_ROWS = (128, 48, 24, 4, 1)
_TOKENS = (2048, 1152, 512, 64, 16)


def warm_up_decodes(sizes: Sequence[int], form: Callable[..., Hashable]) -> Collection[tuple[int, bool]]:
    """Batch sizes of decode steps, with and without divided rows.

    Args:
        sizes: those that there are, in order.
        form: see ``DeviceOps.decode_form``.
    """
    chosen = [sizes[-1], *(rows for rows in _ROWS if rows < sizes[-1])]
    # Of sizes with the same form the largest that is chosen already: its rows can share keys.
    last = (*sizes, *reversed(chosen))
    forms = {form(rows, divided=divided): (rows, divided) for divided in (False, True) for rows in last}
    return dict.fromkeys([*((rows, True) for rows in chosen), *forms.values()])


def warm_up_tokens(limit: int, *, has_experts: bool) -> Collection[int]:
    """Tokens of packed steps, at most so many, padding left out.

    Each of many experts has few tokens, so they need large steps as well.
    """
    large = [padded_size(min(limit, MAX_PADDED_TOKENS))] if has_experts else []
    return dict.fromkeys([*large, *(tokens for tokens in _TOKENS if tokens <= limit)])
