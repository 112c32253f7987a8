"""One line of the input -> a checked row, or an error that costs this line only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from rosebatch.errors import RowError
from rosebatch.request import GrammarSpec, SamplingParams

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is done with a row's prompt, by the names that other servers use.

    Attributes:
        add_generation_prompt: of a chat, whether the template opens the assistant's answer.
        continue_final_message: of a chat, whether the answer goes on where its last message ends.
        chat_template_kwargs: of a chat, further variables of the template.
        truncate_prompt_tokens: only the last tokens are kept, so many; 0 for all.
        echo: of a text or token ids, whether the result's text begins with the prompt.
        suffix: of a text, what is to follow the completion: for models that fill in the middle.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncate_prompt_tokens: int = 0
    echo: bool = False
    suffix: str = ""

    @property
    def template(self) -> dict[str, Any]:
        """Keyword arguments of a chat template."""
        own = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        return {**self.chat_template_kwargs, **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A line whose shape is right: one of ``prompt``, ``messages``, ``prompt_token_ids``, ``prompts`` is set.

    Attributes:
        index: counted from 0 over the lines that are not blank.
        where: for messages to people: ``line 7``.
        metadata: the fields that are carried through to the result.
        sampling: the run's defaults overlaid with the line's own fields.
        has_seed: whether the line brings its own seed.
        id: unique in the file where it is given.
        options: what is done with the prompt.
        prompts: several texts or token ids, each to be completed.
        prompt_only: whether nothing is to be generated: only the prompt's log-probabilities, or its echo, are wanted.
    """

    index: int
    where: str
    metadata: Mapping[str, Any]
    sampling: SamplingParams
    has_seed: bool
    id: str | int | None = None
    options: PromptOptions = PromptOptions()
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A line that becomes an error row; ``metadata`` is what could be read of it."""

    index: int
    where: str
    metadata: Mapping[str, Any]
    error: RowError


class ScoredToken(NamedTuple):
    """A token with its log-probability, None for a prompt's first.

    Its bytes need be no whole text; a special token's are its name, which stands in no text.
    """

    token_id: int
    raw: bytes
    logprob: float | None
    top: tuple["ScoredToken", ...] = ()
    special: bool = False

    @property
    def text(self) -> str:
        """The bytes as text."""
        return self.raw.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of a row.

    Attributes:
        text: None for a model without a tokenizer.
        token_ids: None where they are not asked for.
        logprobs: of each token; None where they are not asked for.
        prompt_logprobs: of each token of the prompt.
        echo: whether the text begins with the prompt.
    """

    text: str | None
    finish_reason: str
    token_ids: list[int] | None = None
    logprobs: list[ScoredToken] | None = None
    prompt_logprobs: list[ScoredToken] | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a row; ``index`` and ``metadata`` are the row's, tokens are counted over all choices."""

    index: int
    metadata: Mapping[str, Any]
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Shape(Protocol):
    """How results are written."""

    def result(self, answer: Answer) -> dict[str, Any]:
        """The output line of a row that was served."""
        ...

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """The line of one that was not."""
        ...


class PlainShape:
    """Fields of the input line beside those of ``RESULT_FIELDS``; of several completions, a list of ``choices``."""

    def result(self, answer: Answer) -> dict[str, Any]:
        """See ``Shape``. How much of the prompt was cached is left out: it may differ when a run is resumed."""
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        first, *others = answer.choices
        row: dict[str, Any] = {**answer.metadata, "index": answer.index}
        if others:
            choices = [{"index": i, **_text(choice), **_details(choice)} for i, choice in enumerate(answer.choices)]
            row |= {"choices": choices, "usage": usage}
        else:
            row |= {**_text(first), "usage": usage, **_details(first)}
        if first.prompt_logprobs is not None:
            row["prompt_logprobs"] = scored_tokens(first.prompt_logprobs)
        return row

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """See ``Shape``."""
        message = f"{row.where}: {row.error.message}"
        return {**row.metadata, "index": row.index, "error": {"code": row.error.code, "message": message}}


def _text(choice: Choice) -> dict[str, Any]:
    return {"text": choice.text, "finish_reason": choice.finish_reason}


def _details(choice: Choice) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if choice.token_ids is not None:
        details["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        details["logprobs"] = scored_tokens(choice.logprobs)
    return details


def scored_tokens(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Log-probabilities as they stand in a row."""

    def one(token: ScoredToken) -> dict[str, Any]:
        return {"token": token.text, "token_id": token.token_id, "logprob": token.logprob}

    return [{**one(token), "top_logprobs": [one(other) for other in token.top]} for token in tokens]


class Message(msgspec.Struct):
    """A message of a chat; any other field is for the chat template."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class JsonSchema(msgspec.Struct):
    """A schema as the API wraps it; its name changes nothing, and it is kept to strictly whether asked or not."""

    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct):
    """What the API asks of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The same and more, by the names of other servers; exactly one of them."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct):
    """How a completion is sampled, as users write it; None where nothing is said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class RequestFields(SamplingFields):
    """The fields with a meaning that all kinds of lines share, and their types."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class _Fields(RequestFields):
    """Those of our own lines; any other is carried through."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


# The fields of a result: an input field of such a name is not carried through.
RESULT_FIELDS = (
    "index", "text", "finish_reason", "choices", "usage", "token_ids", "logprobs", "prompt_logprobs", "error",
)  # fmt: skip

_GRAMMAR_FIELDS = ("response_format", "structured_outputs")
_LOGPROB_FIELDS = ("logprobs", "top_logprobs")
_BOTH = {"logprobs", "prompt_logprobs"}
_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_OPTION_FIELDS = frozenset(option.name for option in fields(PromptOptions))
_SAMPLING_FIELDS = frozenset(SamplingFields.__struct_fields__)
_RESULT_FIELDS = frozenset(RESULT_FIELDS)
_NOT_CARRIED = _RESULT_FIELDS | _OPTION_FIELDS | _SAMPLING_FIELDS | {*_PROMPT_FIELDS, "best_of"}
_NO_OPTIONS = PromptOptions()
_MOST_CACHED = 1024


def parse_row(
    values: object, *, index: int, where: str, defaults: Mapping[str, Any], keep_prompt: bool = False
) -> PromptRow | FailedRow:
    """Check one line.

    Args:
        values: the decoded line.
        index: of the row.
        where: for error messages.
        defaults: sampling fields for where the line is silent.
        keep_prompt: carry all fields through, not only those without a meaning (a table keeps its columns).
    """
    if not isinstance(values, dict):
        error = RowError("invalid_line", f"expected a JSON object, got {type(values).__name__}")
        return FailedRow(index=index, where=where, metadata={}, error=error)
    dropped = _RESULT_FIELDS if keep_prompt else _NOT_CARRIED
    metadata = {name: value for name, value in values.items() if name not in dropped}
    try:
        line = _check(values)
        own = given_sampling(line, values)
        sampling, prompt_only = split_prompt_only(with_defaults(own, defaults), echo=bool(line.echo))
        return PromptRow(
            index=index,
            where=where,
            metadata=metadata,
            sampling=sampling_params(sampling),
            prompt_only=prompt_only,
            has_seed="seed" in own,
            id=line.id,
            options=prompt_options(line, values, chat=line.messages is not None),
            prompt=line.prompt,
            messages=None if line.messages is None else [plain_message(m) for m in values["messages"]],
            prompt_token_ids=line.prompt_token_ids,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def given_sampling(line: SamplingFields, values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that a line has: checked, and as it was decoded."""
    return {name: value for name in values if name in _SAMPLING_FIELDS and (value := getattr(line, name)) is not None}


def with_defaults(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A line's sampling fields over those that hold where it is silent; fields about one thing go together."""
    if not own:
        return dict(defaults)
    for together in (_GRAMMAR_FIELDS, _LOGPROB_FIELDS):
        if any(name in own for name in together):
            defaults = {name: value for name, value in defaults.items() if name not in together}
    return {**defaults, **own}


def split_prompt_only(sampling: dict[str, Any], *, echo: bool) -> tuple[dict[str, Any], bool]:
    """The fields with which the engine can serve a row, and whether its completion is then of no interest.

    That is ``max_tokens`` 0 where the prompt is to be echoed or scored: the engine generates one token at least.
    """
    wanted = echo or sampling.get("prompt_logprobs") is not None
    if sampling.get("max_tokens") != 0 or not wanted:
        return sampling, False
    return {**sampling, "max_tokens": 1}, True


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from fields as users write them: one stop string or several, ``top_k`` -1 for all.

    Raises:
        RowError: a value is impossible.
    """
    # Most lines of a file say the same. Types count: True and 1 are not the same request for log-probabilities.
    key = tuple((name, type(value), value) for name, value in given.items())
    try:
        return _cached_params(key)
    except TypeError:
        # A value without a hash.
        return _params(given)


@lru_cache(_MOST_CACHED)
def _cached_params(key: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return _params({name: value for name, _, value in key})


def _params(given: Mapping[str, Any]) -> SamplingParams:
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    values["logprobs"] = _logprobs(values.get("logprobs"), values.pop("top_logprobs", None))
    structured = values.pop("structured_outputs", None)
    if isinstance(structured, dict):
        structured = convert(structured, StructuredOutputs)
    values["grammar"] = _grammar(values.pop("response_format", None), structured)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise RowError("invalid_sampling", str(error)) from None


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token_id), bias) for token_id, bias in given.items())
    except ValueError:
        raise RowError("invalid_sampling", "the keys of logit_bias must be token ids") from None


def _logprobs(logprobs: bool | int | None, top_logprobs: int | None) -> int | None:
    """Likeliest tokens to report: a number, or, as in chats, whether to and how many."""
    if type(logprobs) is int:
        if top_logprobs is not None:
            raise RowError("invalid_sampling", "top_logprobs goes with logprobs: true, not with a number of them")
        return logprobs
    if top_logprobs and not logprobs:
        raise RowError("invalid_sampling", "top_logprobs needs logprobs: true")
    return (top_logprobs or 0) if logprobs else None


def _grammar(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> GrammarSpec | None:
    specs: list[GrammarSpec] = []
    if response_format is not None and response_format.type == "json_object":
        specs.append(GrammarSpec("json_object"))
    if response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema is None:
            raise RowError("invalid_field", "response_format of type json_schema has no json_schema.schema")
        specs.append(GrammarSpec("json_schema", _json(response_format.json_schema.schema)))
    if structured is not None:
        if structured.json is not None:
            given = structured.json
            specs.append(GrammarSpec("json_schema", given if isinstance(given, str) else _json(given)))
        if structured.regex is not None:
            specs.append(GrammarSpec("regex", structured.regex))
        if structured.choice is not None:
            specs.append(GrammarSpec("choice", _json(structured.choice)))
        if structured.json_object:
            specs.append(GrammarSpec("json_object"))
    if len(specs) > 1:
        raise RowError("invalid_field", f"one grammar is possible for an answer, {len(specs)} are given")
    return specs[0] if specs else None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def prompt_options(line: RequestFields, values: Mapping[str, Any], *, chat: bool) -> PromptOptions:
    """The options among a line's fields.

    Args:
        line: checked.
        values: the line as it was decoded.
        chat: whether the prompt is one.

    Raises:
        RowError: they do not go together, or not with the prompt.
    """
    given = {name: value for name in values if name in _OPTION_FIELDS and (value := getattr(line, name)) is not None}
    if not given:
        return _NO_OPTIONS
    for name in ("echo", "suffix") if chat else _CHAT_OPTIONS:
        if given.get(name):
            raise RowError("invalid_field", f"{name} {'has no meaning for' if chat else 'needs'} messages")
    if given.get("continue_final_message"):
        if given.get("add_generation_prompt"):
            raise RowError("invalid_field", "add_generation_prompt and continue_final_message exclude each other")
        given["add_generation_prompt"] = False
    if given.get("echo") and given.get("suffix"):
        raise RowError("invalid_field", "echo and suffix exclude each other")
    if given.get("truncate_prompt_tokens", 1) < 1:
        raise RowError("invalid_field", "truncate_prompt_tokens must be >= 1")
    return PromptOptions(**given)


def convert(values: object, kind: type[FieldsT]) -> FieldsT:
    """Values as the fields of a line.

    Raises:
        RowError: one has another type.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RowError("invalid_field", str(error).replace("`$.", "`")) from None


def _check(values: dict[str, Any]) -> _Fields:
    asked = values
    if not _BOTH.isdisjoint(values):
        # Results of an earlier run have fields of these names too.
        asked = {n: v for n, v in values.items() if n not in _BOTH or not isinstance(v, list)}
    line = convert(asked, _Fields)
    given = [name for name in _PROMPT_FIELDS if getattr(line, name) is not None]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise RowError("missing_prompt", f"expected one of prompt, messages, prompt_token_ids; got {what}")
    if line.suffix and line.prompt_token_ids is not None:
        raise RowError("invalid_field", "suffix needs prompt, a text")
    if values.get("best_of") not in (None, 1):
        raise RowError("unsupported_field", "best_of is not supported")
    if not getattr(line, given[0]):
        raise RowError("empty_prompt", f"{given[0]} is empty")
    return line


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one string: text parts are joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    if len(texts) != len(content):
        raise RowError("invalid_messages", "message content may hold text parts only")
    return {**message, "content": "\n".join(texts)}
