"""Identities of full blocks: hashes of all tokens up to a block's end, of many blocks in a few calls. No torch."""

import os
from array import array
from collections.abc import Sequence

import numpy as np

# Sums of 64 bits in a hash.
_SUMS = 4
HASH_BYTES = 8 * _SUMS
_HASH = np.dtype(f"V{HASH_BYTES}")


class BlockHashes:
    """Hashes of prefixes: one more than each token, times a secret random factor of its place, summed modulo 2^64.

    Two different prefixes have equal sums for at most one of 2^32 choices of the factors, so four sums of their own
    factors make it one of 2^128 (source: multilinear hashing, Lemire and Kaser, arXiv 1202.4961). Nobody can write
    prompts that collide without knowing the factors, which no process tells.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        # Of the tokens of each block that was seen so far, and the sums of these factors: zeros are tokens, too.
        self._factors = np.empty((0, _SUMS, block_size), np.uint64)
        self._of_zeros = np.empty((0, _SUMS), np.uint64)

    def of_prefix(self, token_ids: "bytes | array[int]", first: int = 0, before: bytes = b"") -> list[bytes]:
        """Hashes of successive full blocks.

        Args:
            token_ids: of these blocks, 32 bits each, native order.
            first: how many blocks are before them.
            before: the hash of the last of these; empty if there are none.
        """
        tokens = np.frombuffer(token_ids, np.uint32)
        sums = np.add.accumulate(self._sums(slice(first, first + len(tokens) // self._size), tokens))
        if before:
            sums += np.frombuffer(before, np.uint64)
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
        sums = self._sums(list(numbers), np.frombuffer(token_ids, np.uint32))
        sums += np.frombuffer(known, np.uint64).reshape(-1, _SUMS)
        return _split(sums)

    def _sums(self, numbers: slice | list[int], tokens: np.ndarray) -> np.ndarray:
        """``[blocks, sums]`` uint64, each of one block's tokens alone."""
        stop = numbers.stop if isinstance(numbers, slice) else max(numbers) + 1
        if stop > len(self._factors):
            self._grow(stop)
        blocks = tokens.astype(np.uint64).reshape(-1, 1, self._size)
        sums: np.ndarray = np.vecdot(self._factors[numbers], blocks)
        sums += self._of_zeros[numbers]
        return sums

    def _grow(self, blocks: int) -> None:
        more = max(blocks - len(self._factors), len(self._factors))
        made = np.frombuffer(os.urandom(more * HASH_BYTES * self._size), np.uint64)
        self._factors = np.concatenate([self._factors, made.reshape(-1, _SUMS, self._size)])
        self._of_zeros = self._factors.sum(axis=2)


def _split(sums: np.ndarray) -> list[bytes]:
    found: list[bytes] = sums.view(_HASH)[:, 0].tolist()
    return found
