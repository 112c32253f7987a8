"""Values of other libraries as Python's own, and texts as they must be."""

from typing import Any

# Types of plain JSON: of texts and names, and of all values without parts.
TEXT = frozenset({str})
SCALARS = frozenset({str, int, float, bool, type(None)})


def plain(value: Any) -> Any:
    """A number or an array of NumPy, or a tensor of PyTorch, as Python's numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_text(value: object) -> bool:
    """Whether a value is a text that UTF-8 has: no half of a surrogate pair, no bytes of a file name."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def dtype_name(dtype: object) -> str:
    """The name of a dtype of PyTorch: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
