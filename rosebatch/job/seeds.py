"""The seed of a row that does not bring its own."""

import hashlib
from collections.abc import Sequence


def row_seed(
    job_seed: int | None, index: int, row_id: str | int | None, token_ids: Sequence[int], number: int = 0
) -> int:
    """A 64-bit seed that the row's own contents decide, so that rows are independent of each other.

    With a job seed, it follows from that, the row's id and its prompt: reordering the file or running a row alone
    changes nothing, and rows alike in both draw alike. Without one, it follows from the row's place too: a prompt
    that is repeated in the file is sampled anew each time, and a second run of the same file gives the same. Of a row
    with several prompts, ``number`` tells them apart.
    """
    place = f"{index}" if job_seed is None else f"seed {job_seed}"
    key = f"{place}|{row_id!r}|{tuple(token_ids)}{f'|{number}' if number else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
