"""One line of the input -> a checked row, or an error that fails this row only."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.fields import (
    NO_OPTIONS,
    OPTION_FIELDS,
    SAMPLING_FIELDS,
    TOOL_FIELDS,
    PromptOptions,
    RequestFields,
    prompt_options,
    to_struct,
    tools_of,
)
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.images.references import ImageReference
from rosebatch.io.result_names import LISTS_IN_RESULTS, RESULT_FIELDS, is_of_a_result, require_no_collision
from rosebatch.io.row_names import OTHER_NAMES, unclear_names, with_own_names
from rosebatch.io.sampling_fields import given_sampling, sampling_params, split_prompt_only, with_defaults
from rosebatch.io.text_only import NO_TEXT, is_media, require_text
from rosebatch.io.tools import ToolUse


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A valid line. Exactly one of ``prompt``, ``messages``, ``prompt_token_ids``, ``prompts``, ``pairs`` is set.

    A struct, because one is made for every row: a frozen dataclass takes 1.5 µs longer.

    Attributes:
        index: counted from 0, blank lines left out.
        where: the line's place, for messages to people: ``line 7``.
        metadata: the fields that the result takes over.
        sampling: the line's own fields over the run's defaults; its seed is None if the line gives none.
        id: unique in the input, if given.
        options: what happens to the prompt.
        prompts: several texts or token ids, each to be completed.
        pairs: of texts, each of them scored as one prompt.
        images: of a chat, in its order; see ``rosebatch.io.images.messages``.
        tool_use: for chats. The tools that the model may call.
        ignored: fields that change nothing in a local run.
        unclear: fields that look as if they should change something, and do not.
        prompt_only: whether only the prompt's log-probabilities or its echo are wanted, and no completion.
        prediction: what the answer may have in part, which is computed faster then.
        pooling: of a row that is embedded; None if it is not.
        continuations: texts or token ids that are scored after the prompt; none: the prompt's own tokens are scored.
            None for a row that is not scored.
        continuations_name: of the field that has them.
        lora: the name of an adapter; None for the model as the run has it.
        model: what a request of an OpenAI batch names so: an adapter, perhaps.
    """

    index: int
    where: str
    metadata: Mapping[str, Any]
    sampling: SamplingParams
    id: str | int | None = None
    options: PromptOptions = NO_OPTIONS
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    images: tuple[ImageReference, ...] = ()
    tool_use: ToolUse | None = None
    ignored: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    prompt_only: bool = False
    prediction: str = ""
    pooling: PoolingParams | None = None
    continuations: tuple[str | tuple[int, ...], ...] | None = None
    continuations_name: str = "continuations"
    lora: str | None = None
    model: str | None = None

    @property
    def generates(self) -> bool:
        """Whether the prompt is completed."""
        return self.pooling is None and self.continuations is None

    def failed(self, error: RowError) -> "FailedRow":
        """The row as one that could not be served."""
        return FailedRow(index=self.index, where=self.where, metadata=self.metadata, error=error)


class FailedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line that becomes an error row; ``metadata`` holds the fields that could be read."""

    index: int
    where: str
    metadata: Mapping[str, Any]
    error: RowError

    def __post_init__(self) -> None:
        # These would keep the whole line in memory, and the tokens of its prompt.
        self.error.__traceback__ = self.error.__context__ = self.error.__cause__ = None


class _Fields(RequestFields):
    """The known fields of rosebatch's own lines. All others are carried through to the result."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    lora: str | None = None


_RESULT_FIELDS = frozenset(RESULT_FIELDS)
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
REQUEST_FIELDS = OPTION_FIELDS | SAMPLING_FIELDS | TOOL_FIELDS | {*PROMPT_FIELDS, *OTHER_NAMES, "best_of", "lora"}
# Fields of rows that have their prompt in another form, and what to do.
OTHER_FORMS = {
    "conversations": "conversations is ShareGPT's form: write messages with role and content",
    "text_2": "text_1 and text_2 are a pair: use rosebatch score or classify",
    "custom_id": "--prompt-column says which has the prompts; OpenAI requests need no --input-format jsonl",
}
_NEVER_CARRIED = _RESULT_FIELDS | NO_TEXT
_NOT_CARRIED = REQUEST_FIELDS | _NEVER_CARRIED


def parse_row(
    values: dict[str, Any],
    *,
    index: int,
    where: str,
    defaults: Mapping[str, Any],
    keep_prompt: bool = False,
    result_column: str | None = None,
) -> Row | FailedRow:
    """Check one line.

    Args:
        values: the decoded line.
        index: of the row.
        where: the line's place, for error messages.
        defaults: sampling fields for what the line does not say.
        keep_prompt: carry the known fields through too, because a table keeps its columns.
        result_column: the one field of a result next to the carried ones, see ``rosebatch.io.result_names``.
    """
    metadata = carried_fields(values, keep_prompt, result_column)
    try:
        require_text(values)
        named = with_own_names(values)
        line = _check(named)
        if result_column is not None or not _RESULT_FIELDS.isdisjoint(values):
            require_no_collision(values, result_column)
        values = named
        messages, images = (None, ()) if line.messages is None else messages_with_images(values["messages"])
        own = given_sampling(line, values)
        sampling, prompt_only = split_prompt_only(with_defaults(own, defaults), echo=bool(line.echo))
        return Row(
            index=index,
            where=where,
            metadata=metadata,
            sampling=sampling_params(sampling),
            prompt_only=prompt_only,
            id=line.id,
            options=prompt_options(line, values, chat=line.messages is not None),
            prompt=line.prompt,
            messages=messages,
            images=images,
            prompt_token_ids=line.prompt_token_ids,
            tool_use=tools_of(line, values, chat=line.messages is not None),
            unclear=unclear_names(metadata),
            lora=line.lora,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def carried_fields(values: Mapping[str, Any], keep_prompt: bool, result_column: str | None) -> dict[str, Any]:
    """The fields of a row that its result takes over; see ``parse_row``."""
    if result_column is None:
        dropped = _NEVER_CARRIED if keep_prompt else _NOT_CARRIED
        return {
            name: value for name, value in values.items() if name not in dropped or (value is None and name in NO_TEXT)
        }
    return {
        name: value
        for name, value in values.items()
        if name != result_column
        and (keep_prompt or name not in REQUEST_FIELDS or is_of_a_result(name, value))
        and not is_media(name, value)
    }


def _check(values: dict[str, Any]) -> _Fields:
    requested = values
    if not LISTS_IN_RESULTS.isdisjoint(values):
        requested = {name: value for name, value in values.items() if not is_of_a_result(name, value)}
    line = to_struct(requested, _Fields)
    require_prompt(line, values)
    if line.suffix and line.prompt_token_ids is not None:
        raise RowError("invalid_field", "suffix needs a prompt given as text")
    if values.get("best_of") not in (None, 1):
        raise RowError("unsupported_field", "best_of is not supported: remove it")
    return line


def require_prompt(line: Any, values: Mapping[str, Any], fields: Sequence[str] = PROMPT_FIELDS) -> None:
    """Check that a row has one of the fields of prompts; ``fields`` are those that its task names.

    Raises:
        RowError: it has none, or several, or an empty one.
    """
    given = [name for name in PROMPT_FIELDS if getattr(line, name) is not None]
    if len(given) == 1:
        if not getattr(line, given[0]):
            raise RowError("empty_prompt", f"{given[0]} is empty")
        return
    what = " and ".join(given)
    if not given:
        # Tables have null for what rows of JSONL leave out.
        ways = (way for name, way in OTHER_FORMS.items() if values.get(name) is not None)
        what = f"none; {next(ways, '--prompt-column or --prompt-template says which fields have it')}"
    raise RowError("missing_prompt", f"expected one of {', '.join(fields)}; got {what}")
