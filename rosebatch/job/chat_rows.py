"""What a chat means for one model: variables that its template does not use, and the grammar of its tool calls."""

from dataclasses import replace

from msgspec import structs

from rosebatch.core.errors import RowError
from rosebatch.io.row_names import TEMPLATE_FIELDS
from rosebatch.io.rows import FailedRow, Row
from rosebatch.text.chat_parsers import unknown_calls
from rosebatch.text.tokenizer import Tokenizer


def for_model(row: Row | FailedRow | None, tokenizer: Tokenizer | None) -> Row | FailedRow | None:
    """The row as a model serves it; a failed one if the model cannot.

    Args:
        row: as it was read; None is handed on.
        tokenizer: of the model; None if it works on token ids.
    """
    return _with_call_grammar(_with_ignored(row, tokenizer), tokenizer) if isinstance(row, Row) else row


def _with_ignored(row: Row, tokenizer: Tokenizer | None) -> Row:
    """The row, with the fields that its chat template has no use for among the ignored ones."""
    if not row.options.chat_template_kwargs:
        return row
    template = None if tokenizer is None else tokenizer.chat_template(tools=row.tool_use is not None)
    given = [name for name in TEMPLATE_FIELDS if name in row.options.chat_template_kwargs]
    unused = [name for name in given if template is None or name not in template.source]
    return structs.replace(row, ignored=(*row.ignored, *unused)) if unused else row


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
