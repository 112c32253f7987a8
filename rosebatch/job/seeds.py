"""The seed of a row that has none of its own."""

import hashlib
from collections.abc import Sequence


def row_seed(
    job_seed: int | None, index: int, row_id: str | int | None, token_ids: Sequence[int], number: int = 0
) -> int:
    """A 64-bit seed that follows from the row's own contents, so that rows are independent of each other.

    With a job seed, it follows from that seed, the row's id and its prompt. Reordering the file or running a row alone
    changes nothing; rows with the same id and prompt get the same seed. Without a job seed, it follows from the row's
    place instead: a prompt that is repeated in the file is sampled anew, and a second run gives the same results.
    ``number`` distinguishes the prompts of one row.
    """
    place = f"{index}" if job_seed is None else f"seed {job_seed}"
    key = f"{place}|{row_id!r}|{tuple(token_ids)}{f'|{number}' if number else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
