"""Numbers in sentences for people."""


def counted(number: int, noun: str) -> str:
    """The number with its noun, which gets an s: ``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
