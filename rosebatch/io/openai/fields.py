"""Which fields of a body are served, which are ignored, and which are refused.

They are those of the public API reference, and other servers' further ones. A field that would change the answer is
served or refused. What is ignored is counted in the report.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import MAX_TOKENS
from rosebatch.io.fields import RequestFields, StructuredOutputs, prompt_options, to_struct, tools_of
from rosebatch.io.row_names import GRAMMARS, SAME_AS, TEMPLATE_FIELDS, needs_messages
from rosebatch.io.sampling_fields import given_sampling, sampling_params, split_prompt_only, with_defaults

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

# The API's defaults: sampled, and as long as the model allows.
_DEFAULTS = {"temperature": 1.0, "max_tokens": MAX_TOKENS}
_MEDIA, _NO_SERVER = "flags say which images are read, and how large they are", "it is about a server and its accounts"
# Fields that change nothing in a local run, and why.
IGNORED = {
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), _MEDIA),
    **dict.fromkeys(("metadata", "moderation", "request_id", "safety_identifier", "service_tier"), _NO_SERVER),
    **dict.fromkeys(("session_id", "store", "user"), _NO_SERVER),
    **dict.fromkeys(("stream_interval", "stream_options"), "a batch has no streams"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), "prefixes are found anyway"
    ),
    "cache_salt": "the cache serves one user",
    "guided_decoding_backend": "there is one",
    "length_penalty": "it weighs beams",
    "priority": "all rows of a file are equal",
    "spaces_between_special_tokens": "special tokens are as the tokenizer writes them",
    "structural_tag_backend": "there is one",
}


class Refused(NamedTuple):
    """A field that would change the answer and is not served.

    Attributes:
        why: it is not, or what to do.
        neutral: values that change nothing; ``null`` never does.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def require_neutral(self, name: str, value: Any) -> None:
        """Check that a body asks for nothing by the field.

        Raises:
            RowError: it does.
        """
        if value is not None and value not in self.neutral:
            raise RowError("unsupported_field", f"{name} is not supported: {self.why}")


REFUSED = {
    "add_special_tokens": Refused("give prompt_token_ids", (True,)),
    "audio": Refused("answers are text"),
    "best_of": Refused("choices are not ranked; use n", (1,)),
    "chat_template": Refused("a run has one template; use --chat-template"),
    "custom_logit_processor": Refused("no code of a request is run"),
    "custom_params": Refused("no code of a request is run", ({},)),
    "documents": Refused("put the documents into messages, or into chat_template_kwargs", ([],)),
    "ebnf": Refused("use structured_outputs with a grammar of Lark, a regex or a JSON schema"),
    # In chats, these two were read as tools before.
    "function_call": Refused("only chats have functions", ("none",)),
    "functions": Refused("only chats have functions", ([],)),
    "guided_whitespace_pattern": Refused("JSON is written on one line"),
    "include_reasoning": Refused("leave reasoning_content unread", (True,)),
    "logits_processors": Refused("no code of a request is run", ([],)),
    "logprob_token_ids": Refused("only the likeliest tokens are reported", ([],)),
    "max_tokens_per_doc": Refused("use truncate_prompt_tokens, which bounds a pair", (0,)),
    "max_tokens_per_query": Refused("use truncate_prompt_tokens, which bounds a pair", (0,)),
    "modalities": Refused("answers are text", (["text"],)),
    "prompt_embeds": Refused("give a prompt as text or token ids"),
    "repetition_detection": Refused("use a penalty"),
    "return_token_ids": Refused("use --return-token-ids", (False,)),
    "return_tokens_as_token_ids": Refused("use --return-token-ids", (False,)),
    "stop_regex": Refused("use stop, or structured_outputs with a regex", ([],)),
    "stream": Refused("a batch has no streams", (False,)),
    "structural_tag": Refused("use structured_outputs with a grammar of Lark"),
    "truncation_side": Refused("the last tokens are kept", ("left",)),
    "use_beam_search": Refused("completions are sampled one by one", (False,)),
    "watermarking": Refused("answers have no marks", (False,)),
    "web_search_options": Refused("nothing is searched"),
}


class _TextPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Prediction(msgspec.Struct):
    content: str | list[_TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class GenerationBody(RequestFields):
    """The known fields of bodies that ask for text. Those of the second half are other servers' names."""

    model: str | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: _Prediction | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    sampling_seed: int | None = None
    thinking_token_budget: int | None = None


# The names of rows that bodies have too. The field itself wins, except over the API's own newer name.
_SAME_AS = {name: meaning for name, meaning in SAME_AS.items() if name in GenerationBody.__struct_fields__}
_TEMPLATE_FIELDS = tuple(name for name in TEMPLATE_FIELDS if name in GenerationBody.__struct_fields__)


def checked(values: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """A body as a struct of typed fields.

    Raises:
        RowError: a field is unknown, is refused, or has the wrong type.
    """
    body = to_struct(values, kind)
    known = _known(kind)
    # In the order of the line: a set's would be another one in each process.
    for name in values:
        if name in known:
            continue
        if name not in REFUSED:
            unknown = sorted(set(values) - known - REFUSED.keys())
            raise RowError("unknown_field", f"unknown fields in the body: {', '.join(unknown)}")
        if name != "best_of" or values[name] != values.get("n"):
            REFUSED[name].require_neutral(name, values[name])
    return body


@cache
def _known(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields of a body that are served or ignored."""
    return frozenset({*kind.__struct_fields__, *IGNORED})


def generation_fields(
    body: GenerationBody, values: Mapping[str, Any], defaults: Mapping[str, Any], *, chat: bool
) -> dict[str, Any]:
    """The fields of a row that say how its text is generated.

    Args:
        body: the checked body.
        values: the body as decoded from JSON.
        defaults: the run's sampling fields. They replace the API's own defaults.
        chat: whether the prompt is a chat.

    Raises:
        RowError: a value is impossible.
    """
    own = given_sampling(body, values)
    if body.max_completion_tokens is not None:
        own["max_tokens"] = body.max_completion_tokens
    for name, meaning in _SAME_AS.items() if not _SAME_AS.keys().isdisjoint(values) else ():
        if (value := getattr(body, name)) is not None:
            own.setdefault(meaning, value)
    if not GRAMMARS.keys().isdisjoint(values):
        _add_grammar(own, body)
    if own.get("seed") is not None:
        # The API allows negative seeds.
        own["seed"] %= 2**64
    sampling = with_defaults(own, {**_DEFAULTS, **defaults})
    if body.echo and sampling.get("logprobs") is not None:
        sampling = {"prompt_logprobs": sampling["logprobs"], **sampling}
    sampling, prompt_only = split_prompt_only(sampling, echo=bool(body.echo))
    options = prompt_options(body, values, chat=chat)
    if body.reasoning_effort or body.verbosity:
        for_template = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(body, name))}
        if not chat:
            raise needs_messages(next(iter(for_template)))
        options = replace(options, chat_template_kwargs={**for_template, **options.chat_template_kwargs})
    return {
        "sampling": sampling_params(sampling),
        "prompt_only": prompt_only,
        "options": options,
        "tool_use": tools_of(body, values, chat=chat),
        "prediction": body.prediction.text if body.prediction is not None else "",
        "ignored": ignored_fields(values),
    }


def ignored_fields(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a body that ``IGNORED`` has."""
    if IGNORED.keys().isdisjoint(values):
        return ()
    return tuple(name for name, value in values.items() if name in IGNORED and value is not None)


def _add_grammar(own: dict[str, Any], body: GenerationBody) -> None:
    """Read other servers' names of grammars.

    Raises:
        RowError: there are several grammars.
    """
    given = {name: value for name in GRAMMARS if (value := getattr(body, name)) is not None}
    if not given:
        return
    if len(given) > 1 or "structured_outputs" in own:
        raise RowError("invalid_field", f"an answer can have one grammar: keep one of {', '.join(given)}")
    ((name, value),) = given.items()
    own["structured_outputs"] = StructuredOutputs(**{GRAMMARS[name]: value})
