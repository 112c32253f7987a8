"""What a chat means for one model: what its template does not use, and the grammar of its tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from rosebatch.core.errors import RowError
from rosebatch.io.row_names import TEMPLATE_FIELDS
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.texts import template_options
from rosebatch.model.vision.vision import TEXT_ALONE, Sight, no_images
from rosebatch.text.chat_parsers import unknown_calls
from rosebatch.text.tokenizer import Tokenizer

# Beyond any sense. To render more takes a kilobyte of each.
_MAX_MESSAGES = 100_000
# Of all messages together. A template may write each as JSON.
_MAX_CALLS = 50_000
# A name that the template does not read is told in the report.
_MAX_VARIABLES = 10_000
# The fields of all messages.
_OF_ALL = ("role", "content")
# Of these, all is rendered or says nothing: what a server's answer has beside its text is among them.
_SAY_NOTHING = {*_OF_ALL, "id", "tool_calls", "tool_call_id", "annotations", "status", "type"}
# What many templates leave out of a chat by intent: who speaks, what was refused, and earlier thoughts.
_OF_SPEAKERS = ("name", "refusal", "reasoning", "reasoning_content", "thinking")


def for_model(row: Row | FailedRow, tokenizer: Tokenizer | None, sight: Sight = TEXT_ALONE) -> Row | FailedRow:
    """The row as a model serves it; a failed one if the model cannot.

    Args:
        row: as it was read.
        tokenizer: of the model; None if it works on token ids.
        sight: how it sees, or why it does not.
    """
    if not isinstance(row, Row):
        return row
    if row.images and (why := _no_images(row, sight)):
        code = "unsupported_field" if row.messages is None else "invalid_messages"
        return row.failed(RowError(code, f"{row.images[0].where}: {why}"))
    if row.images and row.prompt_token_ids is not None and tokenizer is None:
        return row.failed(RowError("no_tokenizer", "images need a model with a tokenizer"))
    variables = len(row.options.chat_template_kwargs)
    if row.messages is None and row.tool_use is None and not variables:
        # Nearly all prompts that are no chats.
        return row
    if row.messages is not None and (told := _too_many(row.messages)):
        return row.failed(RowError("invalid_messages", f"the chat has {told}"))
    if variables > _MAX_VARIABLES:
        return row.failed(
            RowError("invalid_field", f"chat_template_kwargs has {variables} names, more than {_MAX_VARIABLES}")
        )
    return _with_call_grammar(_with_unread(row, tokenizer), tokenizer)


def _no_images(row: Row, sight: Sight) -> str:
    """Why a row may have no images; empty if it may."""
    is_embedded = row.pooling is not None and row.pooling.task == "embed"
    if not (row.generates or is_embedded):
        return "what is scored or classified has no images"
    return no_images(sight) if isinstance(sight, str) else ""


def _too_many(messages: Sequence[Mapping[str, Any]]) -> str:
    """What of a chat is more than it may have; empty if nothing is."""
    if len(messages) > _MAX_MESSAGES:
        return f"{len(messages)} messages, more than {_MAX_MESSAGES}"
    of_each = [each.get("tool_calls") for each in messages if len(each) > len(_OF_ALL)]
    calls = sum(len(calls) for calls in of_each if isinstance(calls, list))
    return f"{calls} tool calls, more than {_MAX_CALLS}" if calls > _MAX_CALLS else ""


def _with_unread(row: Row, tokenizer: Tokenizer | None) -> Row:
    """The row, with what its chat template does not use among the ignored fields, or among the unclear ones."""
    variables, messages = row.options.chat_template_kwargs, row.messages or ()
    if any(image.detail not in (None, "auto") for image in row.images):
        # Images are as large as the model and --max-pixels have them.
        row = structs.replace(row, ignored=(*row.ignored, "messages.content.detail"))
    if not variables and not messages:
        return row
    further = [name for each in messages if len(each) > len(_OF_ALL) for name in each if name not in _SAY_NOTHING]
    if not variables and not further:
        return row
    template = None if tokenizer is None else tokenizer.chat_template(tools=row.tool_use is not None)
    unread = [name for name in variables if template is None or name not in template.words]
    ignored = [name for name in unread if name in TEMPLATE_FIELDS]
    unclear = [f"chat_template_kwargs.{name}" for name in unread if name not in TEMPLATE_FIELDS]
    if further and template is not None:
        for name in template.unread(list(dict.fromkeys(further)), messages, template_options(row)):
            (ignored if name in _OF_SPEAKERS else unclear).append(f"messages.{name}")
    if not ignored and not unclear:
        return row
    return structs.replace(row, ignored=(*row.ignored, *ignored), unclear=(*row.unclear, *unclear))


def _with_call_grammar(row: Row, tokenizer: Tokenizer | None) -> Row | FailedRow:
    """The row, with a grammar if a tool must be called, or if what it calls must match the schemas.

    If one must be called, this takes the place of any other grammar: no text is wanted.
    """
    use = row.tool_use
    if use is None or use.choice == "none" or tokenizer is None:
        return row
    try:
        if tokenizer.parsers.calls is None and not (use.may_stay_text and use.choice == "auto"):
            raise unknown_calls()
        must_call = use.choice == "required"
        if not must_call and (not use.is_strict or row.sampling.grammar is not None):
            return row
        if not must_call and (not tokenizer.parsers.calls_have_a_token or row.sampling.min_tokens):
            return structs.replace(row, ignored=(*row.ignored, "strict"))
        parallel = use.parallel and use.name is None
        spec = tokenizer.parsers.grammar(use.callable, parallel=parallel, must_call=must_call)
        return structs.replace(row, sampling=replace(row.sampling, grammar=spec))
    except ValueError as error:
        return row.failed(RowError("invalid_sampling", str(error)))
    except RowError as error:
        return row.failed(error)
