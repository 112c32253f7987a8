"""What the prompt of a row begins with, before anybody parses the row."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.columns import Columns
from rosebatch.io.image_column import images_of
from rosebatch.io.images.references import ends_of
from rosebatch.io.parse import Content
from rosebatch.io.rows import PROMPT_FIELDS
from rosebatch.io.whole_order import COMPARED, FRONT


class _Prompt(msgspec.Struct):
    """The fields of a row or a request that make its prompt, in the order in which templates have them."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


# The adapter comes last here, and first in a beginning: what one computes of a prompt is no other's, and not all may be
# on the device.
class _Row(_Prompt):
    lora: msgspec.Raw = msgspec.Raw()


class _Body(_Prompt):
    model: msgspec.Raw = msgspec.Raw()


class _Request(msgspec.Struct):
    body: _Body


_ROW, _REQUEST = msgspec.json.Decoder(_Row), msgspec.json.Decoder(_Request)
_FIELDS, _VALUES = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(dict[str, Any])


def values_of(content: Content) -> Mapping[str, Any]:
    """The values of a row, as far as they can be read, by the names of its columns or fields.

    Raises:
        MsgspecError, UnicodeError, RecursionError: it is a line of no JSON object.
    """
    if isinstance(content, bytes):
        return _VALUES.decode(content)
    return content if isinstance(content, dict) else content.values


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Finds the prompts of rows that are not parsed yet, as bytes that are alike where prompts are.

    Attributes:
        is_batch: whether lines are requests of an OpenAI batch.
        columns: what the names of columns or fields mean.
    """

    is_batch: bool
    columns: Columns

    def __call__(self, content: Content) -> bytes:
        """The prompt of a row; nothing if it has none that can be read."""
        try:
            if self.columns.makes_prompt or self.columns.image_field is not None or not isinstance(content, bytes):
                return self._of_values(values_of(content))
            if self.columns.prompt is not None:
                return bytes(_FIELDS.decode(content).get(self.columns.prompt, b""))
            found = _REQUEST.decode(content).body if self.is_batch else _ROW.decode(content)
        except (msgspec.MsgspecError, RowError, UnicodeError, RecursionError, TypeError):
            return b""
        *prompt, adapter = msgspec.structs.astuple(found)
        return b"".join((_front(bytes(adapter)), *prompt))

    def _of_values(self, values: Mapping[str, Any]) -> bytes:
        field = self.columns.image_field
        image = b"" if field is None else _image(values.get(field))
        prompt: Any = self.columns.made_prompt(values)
        if prompt is None:
            names = PROMPT_FIELDS if self.columns.prompt is None else (self.columns.prompt,)
            prompt = next((values[name] for name in names if values.get(name) is not None), "")
        # What is not compared is not copied.
        return (
            _front(str(values.get("lora") or "").encode(errors="replace"))
            + image
            + (prompt[:COMPARED].encode() if isinstance(prompt, str) else msgspec.json.encode(prompt, enc_hook=str))
        )


def _front(adapter: bytes) -> bytes:
    """An adapter's name, as long as is compared at once."""
    return adapter.ljust(-(-len(adapter) // FRONT) * FRONT)


def _image(value: Any) -> bytes:
    """Both ends of the first image of a column."""
    for each in images_of(value):
        return ends_of(each) if isinstance(each, str | bytes | Path) else b""
    return b""
