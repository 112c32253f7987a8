"""Whole numbers of launches. Triton's functions of these names also serve kernels, and take 3 to 6 µs each."""


def cdiv(number: int, step: int) -> int:
    """How many steps cover the number."""
    return -(-number // step)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
