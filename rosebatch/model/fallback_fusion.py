from typing import Any


def fuse(network: Any, ops: Any) -> None: ...
