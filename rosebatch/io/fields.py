"""The known fields of an input line: their types, and the prompt options they mean.

``rows`` and ``openai`` build their kinds of lines from these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, Literal, TypeVar

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.tools import Tool, ToolChoice, ToolUse, tool_use

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)
# Of ``truncate_prompt_tokens``.
AS_THE_MODEL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What happens to a row's prompt. The names are those of other servers.

    Attributes:
        add_generation_prompt: for chats. Whether the template opens the assistant's answer.
        continue_final_message: for chats. Whether the answer continues the last message.
        chat_template_kwargs: for chats. Further variables of the template.
        truncate_prompt_tokens: keep only this many tokens, the last ones; 0 keeps all, and -1 as many as the model
            takes, if nothing is generated.
        echo: for texts and token ids. Whether the result's text begins with the prompt.
        suffix: for texts. The text after the completion, for models that fill in the middle.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncate_prompt_tokens: int = 0
    echo: bool = False
    suffix: str = ""

    def kept(self, max_model_len: int) -> int:
        """Most tokens that are kept of a prompt; 0 for all."""
        return max_model_len if self.truncate_prompt_tokens == AS_THE_MODEL else self.truncate_prompt_tokens

    @property
    def template(self) -> dict[str, Any]:
        """Keyword arguments of the chat template."""
        own = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        return {**self.chat_template_kwargs, **own}


class Message(msgspec.Struct):
    """A message of a chat. All its other fields go to the chat template."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema as the API wraps it. The other fields have no effect: it is always enforced strictly."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format of an answer, as the API spells it. Other servers take the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The format of an answer, as other servers spell it, with more kinds. At most one field may be set."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct):
    """How to sample a completion, as users write it; None means not given."""

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
    bad_words: tuple[str, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_reasoning_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class RequestFields(SamplingFields):
    """The known fields that all kinds of lines share."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
OPTION_FIELDS = frozenset(option.name for option in fields(PromptOptions))
SAMPLING_FIELDS = frozenset(SamplingFields.__struct_fields__)
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
NO_OPTIONS = PromptOptions()
# Of a field, down to its numbers: a list, its members.
_NUMBERS_LEVELS = 2
# Fields without integers of ours. In a template or a schema, 4.0 is not 4.
_AS_GIVEN = {"messages", "chat_template_kwargs", "response_format", "structured_outputs", *TOOL_FIELDS}


def prompt_options(line: msgspec.Struct, values: Mapping[str, Any], *, chat: bool) -> PromptOptions:
    """The options that a line gives for its prompt.

    Args:
        line: the checked line.
        values: the line as decoded from JSON.
        chat: whether the prompt is a chat.

    Raises:
        RowError: options contradict each other or do not fit the prompt.
    """
    if OPTION_FIELDS.isdisjoint(values):
        return NO_OPTIONS
    given = {name: value for name in values if name in OPTION_FIELDS and (value := getattr(line, name)) is not None}
    if not given:
        return NO_OPTIONS
    for name in ("echo", "suffix") if chat else _CHAT_OPTIONS:
        if given.get(name):
            raise RowError("invalid_field", f"{name} {'cannot be used with' if chat else 'needs'} messages")
    if given.get("continue_final_message"):
        if given.get("add_generation_prompt"):
            message = "add_generation_prompt and continue_final_message cannot be used together"
            raise RowError("invalid_field", message)
        given["add_generation_prompt"] = False
    if given.get("echo") and given.get("suffix"):
        raise RowError("invalid_field", "echo and suffix cannot be used together")
    may_fill = not isinstance(line, SamplingFields)
    if (longest := given.get("truncate_prompt_tokens", 1)) < 1 and not (may_fill and longest == AS_THE_MODEL):
        way = ", or -1 for as many as the model takes" if may_fill else ""
        raise RowError("invalid_field", f"truncate_prompt_tokens must be >= 1{way}")
    return PromptOptions(**given)


def tools_of(line: RequestFields, values: Mapping[str, Any], *, chat: bool) -> ToolUse | None:
    """The tools that a line offers; arguments as for ``prompt_options``.

    Raises:
        RowError: they contradict each other, or there is no chat.
    """
    if TOOL_FIELDS.isdisjoint(values):
        return None
    if line.tools and not chat:
        raise RowError("invalid_field", "tools needs messages")
    return tool_use(line.tools, values.get("tools") or (), line.tool_choice, line.parallel_tool_calls)


def to_struct(values: object, kind: type[FieldsT]) -> FieldsT:
    """Plain values as a struct of typed fields.

    Raises:
        RowError: a field has the wrong type.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeError):
        # Some writers have no integers: 4.0 is 4.
        try:
            return msgspec.convert(_with_own_integers(values), kind)
        except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
            told = str(error).replace("`$.", "`")
            way = next((f"; {way}" for part, way in _WAYS.items() if part in told), "")
            raise RowError("invalid_field", f"{told}{way}") from None


# By what the message of a wrong type has.
_WAYS = {
    "required field `role`": 'a message is {"role": "user", "content": "…"}',
    "got `str` - at `messages`": 'messages are a list such as [{"role": "user", "content": "…"}]',
    "got `array` - at `prompt`": "a row has one prompt: a text, or token ids in prompt_token_ids",
    "got `object` - at `prompt`": 'a row has one prompt: pandas writes rows with orient="records"',
    "got `object` - at `id`": 'a row has one id: pandas writes rows with orient="records"',
}


def _with_own_integers(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: each if name in _AS_GIVEN else _with_integers(each) for name, each in values.items()}


def _with_integers(values: Any, levels: int = _NUMBERS_LEVELS) -> Any:
    """The same with integers in place of floats and decimals that are integral, so many levels deep."""
    if isinstance(values, Decimal):
        values = int(values) if values == values.to_integral_value() else float(values)
    if isinstance(values, float) and values.is_integer():
        return int(values)
    if isinstance(values, list) and levels:
        return [_with_integers(each, levels - 1) for each in values]
    if isinstance(values, dict) and levels:
        return {name: _with_integers(each, levels - 1) for name, each in values.items()}
    return values
