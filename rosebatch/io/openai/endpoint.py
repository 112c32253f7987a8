"""What an endpoint of the API knows: how a body is read, and how an answer is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rosebatch.io.results import Answer


class Asked(NamedTuple):
    """What a body asks for.

    Attributes:
        fields: of ``rosebatch.io.rows.PromptRow``: the prompt, its sampling and options.
        metadata: what ``Endpoint.body`` has to know of the request, beside the answer.
    """

    fields: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One URL of the API.

    Attributes:
        url: as a line names it.
        parse: the checked body, from the decoded one and the run's sampling fields. Raises RowError.
        body: the answer's body, from the answer, the model's name and the time in seconds since 1970.
    """

    url: str
    parse: Callable[[dict[str, Any], Mapping[str, Any]], Asked]
    body: Callable[[Answer, str, int], dict[str, Any]]
