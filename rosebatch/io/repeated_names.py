"""Names that an object of a line has twice. The last one wins, as in every parser of JSON that people use."""

import json
from contextlib import suppress
from typing import Any


def repeated_names(line: bytes) -> list[str]:
    """These names, at any depth of a line that was parsed before.

    Python's parser takes some ten times as long as the one that reads rows.
    """
    found: dict[str, None] = {}

    def note(pairs: list[tuple[str, Any]]) -> None:
        if len(pairs) != len({name for name, _ in pairs}):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    found[name] = None
                seen.add(name)

    # A deep line; numbers may have more digits than Python's own parser takes.
    with suppress(RecursionError):
        json.loads(line, object_pairs_hook=note, parse_int=len, parse_float=len, strict=False)
    return list(found)
