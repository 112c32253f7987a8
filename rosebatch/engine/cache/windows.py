"""Sliding windows: which layers share block tables, and how many blocks a window takes. No torch."""

from collections.abc import Sequence


def window_groups(windows: Sequence[int], max_model_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Groups of layers with the same sliding window: the window of each group, and the group of each layer.

    A window as long as the longest sequence is none. Full attention, window 0, is the first group.
    """
    reach = [window if window < max_model_len else 0 for window in windows]
    distinct = sorted(set(reach)) or [0]
    return tuple(distinct), tuple(distinct.index(window) for window in reach)


def blocks_of_window(window: int, block_size: int) -> int:
    """Maximum number of blocks with keys that a token sees before it: both ends may lie inside a block."""
    return -(-(window - 1) // block_size) + 1


def max_blocks(window: int, block_size: int, *, longest: int, slots: int, chunk: int) -> int:
    """Maximum number of blocks that a group of layers uses: more would only keep old prefixes.

    Args:
        window: of the group; 0 for full attention.
        block_size: tokens of a block.
        longest: tokens of a sequence.
        slots: sequences at a time.
        chunk: most tokens of a step with prompts. Their blocks come back after the step.
    """
    full = slots * -(-longest // block_size)
    if not window:
        return full
    # A sequence is admitted only if there is a spare block for every other.
    return min(full, slots * (blocks_of_window(window, block_size) + 1) + -(-chunk // block_size) + 2)
