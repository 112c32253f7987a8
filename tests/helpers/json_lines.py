"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write a line for each row; the path again."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[Any]:
    """The rows of a file."""
    content = path.read_bytes()
    assert not content or content.endswith(b"\n"), "the last line has an end"
    return [json.loads(line) for line in content.splitlines()]
