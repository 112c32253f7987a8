"""One uniform number for each (seed, position): Philox-4x32-10, a counter-based generator.

A number depends on nothing but its key: not on the batch, the slot or earlier draws. Source: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011).
"""

_MASK = 0xFFFFFFFF


def philox(seed: int, counter: int) -> int:
    """The first 32-bit word of Philox-4x32-10 for a 64-bit ``seed`` and a 32-bit ``counter``."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter & _MASK, 0, 0, 0
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ key0, p1 & _MASK, (p0 >> 32) ^ c3 ^ key1, p0 & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), never either end."""
    return (philox(seed, position) + 0.5) / 2**32
