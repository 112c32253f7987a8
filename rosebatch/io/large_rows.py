"""What a large row keeps while it waits. As Python's values, numbers take five to twenty times their bytes of JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rosebatch.core.token_ids import packed
from rosebatch.io.rows import FailedRow, Row

# A smaller row is kept as it is: to write its fields early would take longer than it saves.
LARGE_ROW = 1 << 20
_CONTAINERS = {dict, list, tuple}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def compact(row: Row | FailedRow) -> Row | FailedRow:
    """The same row: carried lists and objects are the JSON that its result will have, token ids have 32 bits."""
    if not _CONTAINERS.isdisjoint(map(type, row.metadata.values())):
        row = replace(row, metadata=_written(row.metadata))
    if isinstance(row, Row) and row.prompt_token_ids is not None:
        return replace(row, prompt_token_ids=packed(row.prompt_token_ids))
    return row


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: msgspec.Raw(_encode(value)) if type(value) in _CONTAINERS else value for name, value in fields.items()
    }
