"""Identities of full blocks: hashes of all tokens up to a block's end, of many blocks in a few calls. No torch."""

import os
from array import array
from collections.abc import Sequence

import numpy as np

# Sums of 64 bits in a hash.
_SUMS = 4
HASH_BYTES = 8 * _SUMS
_HASH = np.dtype(f"V{HASH_BYTES}")
# A block's hash, or its place among others.
Before = bytes | int | None


class BlockHashes:
    """Hashes of prefixes: one more than each token, times a secret random factor of its place, summed modulo 2^64.

    Two different prefixes have equal sums for at most one of 2^32 choices of the factors, so four sums of their own
    factors make it one of 2^128 (source: multilinear hashing, Lemire and Kaser, arXiv 1202.4961). Nobody can write
    prompts that collide without knowing the factors, which no process tells.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # Of the tokens of each block that was seen so far.
        self._factors = np.empty((0, _SUMS, block_size), np.uint64)

    def of_prefixes(self, token_ids: bytes, prefixes: Sequence[tuple[int, int, Before]]) -> list[bytes]:
        """Hashes of successive full blocks of several sequences.

        Args:
            token_ids: of these blocks, 32 bits each, native order; one sequence's after the other's.
            prefixes: for each sequence, how many blocks are before its own, how many are its own, and the block before
                these: its hash, or its place among the blocks of earlier sequences here; None if there is none.
        """
        self._grow(max([first + count for first, count, _ in prefixes]))
        factors = [self._factors[first : first + count] for first, count, _ in prefixes]
        sums = self._sums(factors[0] if len(factors) == 1 else np.concatenate(factors), token_ids)
        stop = 0
        for _, count, before in prefixes:
            begin, stop = stop, stop + count
            if before is not None:
                sums[begin] += sums[before] if isinstance(before, int) else np.frombuffer(before, np.uint64)
            if count > 1:
                own = sums[begin:stop]
                np.add.accumulate(own, out=own)
        return _split(sums)

    def of_next(self, token_ids: "array[int]", numbers: Sequence[int], before: Sequence[bytes]) -> list[bytes]:
        """Hashes of the next block of several sequences.

        Args:
            token_ids: of these blocks, one sequence's after the other's.
            numbers: for each sequence, how many blocks are before its own.
            before: for each, the hash of the last of these; empty if there are none.
        """
        none = bytes(HASH_BYTES)
        known = b"".join([each or none for each in before])
        self._grow(max(numbers) + 1)
        sums = self._sums(self._factors.take(numbers, axis=0), token_ids)
        sums += np.frombuffer(known, np.uint64).reshape(-1, _SUMS)
        return _split(sums)

    def _sums(self, factors: np.ndarray, token_ids: "bytes | array[int]") -> np.ndarray:
        """``[blocks, sums]`` uint64, each of one block's tokens alone, by factors ``[blocks, sums, tokens]``."""
        # Zeros are tokens, too.
        tokens = np.add(np.frombuffer(token_ids, np.uint32), 1, dtype=np.uint64)
        sums: np.ndarray = np.vecdot(factors, tokens.reshape(-1, 1, self.block_size))
        return sums

    def _grow(self, blocks: int) -> None:
        """Have factors of so many blocks at least."""
        if blocks <= len(self._factors):
            return
        more = max(blocks - len(self._factors), len(self._factors))
        made = np.frombuffer(os.urandom(more * HASH_BYTES * self.block_size), np.uint64)
        self._factors = np.concatenate([self._factors, made.reshape(-1, _SUMS, self.block_size)])


def _split(sums: np.ndarray) -> list[bytes]:
    found: list[bytes] = sums.view(_HASH)[:, 0].tolist()
    return found
