"""Values of other libraries as Python's own."""

from typing import Any


def plain(value: Any) -> Any:
    """A number or an array of NumPy, or a tensor of PyTorch, as Python's numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def dtype_name(dtype: object) -> str:
    """The name of a dtype of PyTorch: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
