"""Rows that ask for embeddings, and the results that hold them."""

from array import array
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rosebatch.config.run import EncodingFormat
from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.fields import Message, plain_message, prompt_options, to_struct
from rosebatch.io.result_names import EMBEDDING_FIELDS, require_no_collision, reserved_names
from rosebatch.io.results import Answer, failure_fields
from rosebatch.io.rows import FailedRow, PromptRow


class _Fields(msgspec.Struct):
    """The known fields of a line. All others are carried through to the result."""

    id: str | int | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
EMBEDDING_REQUEST_FIELDS = frozenset(_Fields.__struct_fields__) - {"id"}


def parse_embedding_row(
    values: object,
    *,
    index: int,
    where: str,
    keep_prompt: bool = False,
    result_column: str | None = None,
) -> PromptRow | FailedRow:
    """Check one line of the input of ``rosebatch embed``; arguments as of ``rosebatch.io.rows.parse_row``."""
    if not isinstance(values, dict):
        error = RowError("invalid_line", f"expected a JSON object, got {type(values).__name__}")
        return FailedRow(index=index, where=where, metadata={}, error=error)
    metadata = carried_by_embedding(values, keep_prompt, result_column)
    try:
        require_no_collision(values, result_column, EMBEDDING_FIELDS)
        line = to_struct(values, _Fields)
        # Nothing answers the chat.
        line.add_generation_prompt = bool(line.add_generation_prompt)
        given = [name for name in _PROMPT_FIELDS if getattr(line, name) is not None]
        if len(given) != 1:
            what = "none" if not given else " and ".join(given)
            raise RowError("missing_prompt", f"expected one of prompt, messages, prompt_token_ids; got {what}")
        if not getattr(line, given[0]):
            raise RowError("empty_prompt", f"{given[0]} is empty")
        chat = line.messages is not None
        known = {name: value for name, value in values.items() if name in EMBEDDING_REQUEST_FIELDS}
        return PromptRow(
            index=index,
            where=where,
            metadata=metadata,
            sampling=GREEDY,
            pooling=pooling_params(line.dimensions, line.prompt_name),
            id=line.id,
            options=prompt_options(line, {"add_generation_prompt": False, **known} if chat else known, chat=chat),
            prompt=line.prompt,
            messages=[plain_message(message) for message in values["messages"]] if chat else None,
            prompt_token_ids=line.prompt_token_ids,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def carried_by_embedding(values: Mapping[str, Any], keep_prompt: bool, result_column: str | None) -> dict[str, Any]:
    """The fields of a row that its result takes over; see ``parse_embedding_row``."""
    dropped = reserved_names(result_column, EMBEDDING_FIELDS)
    dropped = dropped if keep_prompt else dropped | EMBEDDING_REQUEST_FIELDS
    return {name: value for name, value in values.items() if name not in dropped}


def pooling_params(dimensions: int | None, prompt_name: str | None = None) -> PoolingParams:
    """What a request asks for.

    Raises:
        RowError: its dimensions are impossible.
    """
    try:
        return PoolingParams(dimensions=dimensions, prompt_name=prompt_name)
    except ValueError as error:
        raise RowError("invalid_dimensions", str(error)) from None


def encoded(embedding: "array[float]", encoding_format: EncodingFormat) -> list[float] | str:
    """Numbers of fp32, or their bytes, lowest first, as base64. A reader of either gets the same fp32 again."""
    if encoding_format == "float":
        return embedding.tolist()
    return b64encode(np.asarray(embedding, "<f4").tobytes()).decode()


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """The carried fields of the input line and those of ``EMBEDDING_FIELDS``.

    Attributes:
        result_column: see ``rosebatch.io.results.PlainShape``.
        encoding_format: of the vectors.
    """

    result_column: str | None = None
    encoding_format: EncodingFormat = "float"

    def result(self, answer: Answer) -> dict[str, Any]:
        """See ``rosebatch.io.results.Shape``."""
        (embedding,) = answer.embeddings
        own = {"index": answer.index, "embedding": encoded(embedding, self.encoding_format)}
        return self._beside(answer.metadata, {**own, "usage": {"prompt_tokens": answer.prompt_tokens}})

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """See ``rosebatch.io.results.Shape``."""
        return self._beside(row.metadata, failure_fields(row))

    def _beside(self, carried: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        return {**carried, **(own if self.result_column is None else {self.result_column: own})}
