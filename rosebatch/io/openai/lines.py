"""The batch files of OpenAI's API: one request a line, and the lines that answer them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rosebatch.errors import RowError
from rosebatch.io.fields import to_struct
from rosebatch.io.openai.chat import CHAT
from rosebatch.io.openai.completions import COMPLETIONS
from rosebatch.io.openai.embeddings import EMBEDDINGS
from rosebatch.io.openai.endpoint import Endpoint
from rosebatch.io.results import Answer
from rosebatch.io.rows import FailedRow, PromptRow

_ENDPOINTS = {each.url: each for each in (CHAT, COMPLETIONS, EMBEDDINGS)}


class _Line(msgspec.Struct):
    custom_id: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"
    url: str | None = None


def is_request(values: object) -> bool:
    """Whether a decoded line is a request of a batch file."""
    return isinstance(values, dict) and "custom_id" in values and "body" in values


def parse_request(values: object, *, index: int, where: str, defaults: Mapping[str, Any]) -> PromptRow | FailedRow:
    """Check one line; see ``rosebatch.io.rows.parse_row``.

    Args:
        values: the decoded line.
        index: of the row.
        where: the line's place, for error messages.
        defaults: sampling fields for what the body does not say. They replace the API's own defaults.
    """
    metadata = {"custom_id": values.get("custom_id") if isinstance(values, dict) else None}
    try:
        line = to_struct(values, _Line)
        endpoint = _endpoint(line)
        asked = endpoint.parse(line.body, defaults)
        return PromptRow(
            index=index,
            where=where,
            metadata={"custom_id": line.custom_id, "url": endpoint.url, **asked.metadata},
            id=line.custom_id,
            **asked.fields,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def _endpoint(line: _Line) -> Endpoint:
    """Where a line is sent to. Without a URL, the body tells.

    Raises:
        RowError: it is not served.
    """
    if not line.url:
        if line.body.get("messages") is not None:
            return CHAT
        return COMPLETIONS if line.body.get("input") is None else EMBEDDINGS
    # Some services leave out the /v1.
    url = line.url if line.url.startswith("/v1") else f"/v1{line.url}"
    if url not in _ENDPOINTS:
        raise RowError("unsupported_url", f"url {url} is not supported; use one of {', '.join(_ENDPOINTS)}")
    return _ENDPOINTS[url]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The lines of the output file and the error file.

    Attributes:
        model: the name in every answer.
        created: the time in every answer, in seconds since 1970.
    """

    model: str
    created: int

    def result(self, answer: Answer) -> dict[str, Any]:
        """The line of a request that was served."""
        body = _ENDPOINTS[answer.metadata["url"]].body(answer, self.model, self.created)
        response = {"status_code": 200, "request_id": f"req_{answer.index}", "body": body}
        return _line(answer.index, answer.metadata["custom_id"], response, None)

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """The line of a request that failed."""
        error = {"code": row.error.code, "message": f"{row.where}: {row.error.message}"}
        return _line(row.index, row.metadata.get("custom_id"), None, error)


def _line(index: int, custom_id: Any, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}
