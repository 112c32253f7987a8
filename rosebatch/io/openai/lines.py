"""The batch files of OpenAI's API: one request a line, and the lines that answer them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.fields import to_struct
from rosebatch.io.openai.chat import CHAT
from rosebatch.io.openai.completions import COMPLETIONS
from rosebatch.io.openai.embeddings import EMBEDDINGS
from rosebatch.io.openai.endpoint import Endpoint
from rosebatch.io.openai.pooled import POOLED
from rosebatch.io.openai.responses import RESPONSES
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row

# Errors that no change of the request mends.
OUR_ERRORS = frozenset({"grammar_failed", "non_finite_logits", "unexpected_error", "worker_died"})
# Of all prompts of a line. Beyond any sense: each takes three kilobytes until the last is there.
_MAX_ANSWERS = 16_384
# A version and what follows: some services leave out the /v1, or put something before it.
_PATH = re.compile(r"(?:.*(/v\d+)(?=/))?(/.+)")
_ENDPOINTS = {each.url: each for each in (CHAT, *POOLED, COMPLETIONS, EMBEDDINGS, RESPONSES)}


class _Line(msgspec.Struct):
    custom_id: str
    body: dict[str, Any]
    method: Literal["POST"] | None = None
    url: str | None = None


_FIELDS = frozenset(_Line.__struct_fields__)


def is_request(values: object) -> bool:
    """Whether a decoded line is a request of a batch file."""
    return isinstance(values, dict) and "custom_id" in values and "body" in values


def parse_request(values: object, *, index: int, where: str, defaults: Mapping[str, Any]) -> Row | FailedRow:
    """Check one line; see ``rosebatch.io.rows.parse_row``.

    Args:
        values: the decoded line.
        index: of the row.
        where: the line's place, for error messages.
        defaults: sampling fields for what the body leaves open. They replace the API's own defaults.
    """
    given = values if isinstance(values, dict) else {}
    metadata = {"custom_id": given.get("custom_id")}
    try:
        line = to_struct(values, _Line)
        endpoint = _endpoint(line)
        asked = endpoint.parse(line.body, defaults)
        beside = [name for name, value in given.items() if value is not None and name not in _FIELDS]
        model = line.body.get("model")
        model = model if isinstance(model, str) else None
        row = Row(
            index=index,
            where=where,
            metadata={
                "custom_id": line.custom_id,
                "url": endpoint.url,
                **({} if model is None else {"model": model}),
                **asked.metadata,
            },
            id=line.custom_id,
            model=model,
            **{**asked.fields, "ignored": (*asked.fields["ignored"], *beside)},
        )
        if (answers := len(row.prompts) * row.sampling.n) > _MAX_ANSWERS:
            raise RowError("invalid_field", f"prompts and n make {answers} answers, more than {_MAX_ANSWERS}")
        return row
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def _endpoint(line: _Line) -> Endpoint:
    """The endpoint of a line: that of its URL, else the first whose requests have such a body.

    Raises:
        RowError: the URL is not served, or is missing and needed.
    """
    if not line.url:
        fitting = next((each for each in _ENDPOINTS.values() if each.fits(line.body)), None)
        if fitting is None:
            uses = " or for ".join(sorted(each.of_input for each in _ENDPOINTS.values() if each.of_input))
            raise RowError("unsupported_url", f"url is missing: a body with input may be for {uses}")
        return fitting
    if line.url in _ENDPOINTS:
        return _ENDPOINTS[line.url]
    try:
        path = urlsplit(line.url).path.rstrip("/")
    except ValueError as error:
        raise RowError("unsupported_url", f"url {line.url} is no URL ({error})") from None
    found = _PATH.fullmatch(path)
    url = f"{found[1] or '/v1'}{found[2]}" if found else path
    if url not in _ENDPOINTS:
        raise RowError("unsupported_url", f"url {url} is not supported; use one of {', '.join(_ENDPOINTS)}")
    return _ENDPOINTS[url]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The lines of the output file and the error file.

    Attributes:
        model: the name in every answer, but those of a row's own adapter, which have the adapter's.
        created: the time in every answer, in seconds since 1970.
        echo_model: whether an answer names the model of its request instead.
    """

    model: str
    created: int
    echo_model: bool = False

    def result(self, result: Result) -> dict[str, Any]:
        """The line of a request that was served."""
        row = result.row
        metadata = row.metadata
        ran = row.lora or self.model
        model = metadata.get("model") or ran if self.echo_model else ran
        body = _ENDPOINTS[metadata["url"]].body(result, model, self.created)
        return _line(row.index, metadata["custom_id"], 200, body)

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """The line of a request that failed, as the hosted service writes it."""
        ours = row.error.code in OUR_ERRORS
        error = {
            "message": f"{row.where}: {row.error.message}",
            "type": "server_error" if ours else "invalid_request_error",
            "param": None,
            "code": row.error.code,
        }
        return _line(row.index, row.metadata.get("custom_id"), 500 if ours else 400, {"error": error})


def _line(index: int, custom_id: Any, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{index}", "body": body}
    return {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": None}
