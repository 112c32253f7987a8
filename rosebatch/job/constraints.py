"""What keeps the completions of a prompt to a grammar, a budget of reasoning and the tokens that are allowed."""

from collections.abc import Callable
from functools import partial
from itertools import chain

from rosebatch.core.errors import RowError
from rosebatch.core.request import Constraint, Request
from rosebatch.engine.engine import Engine
from rosebatch.io.rows import Row
from rosebatch.job.prepared import Prepared
from rosebatch.text.reasoning.constraint import ReasoningConstraint
from rosebatch.text.reasoning.parser import ReasoningFormat
from rosebatch.text.token_bans import BanConstraint, find_bans
from rosebatch.text.tokenizer import Tokenizer


def constraint_of(
    engine: Engine, tokenizer: Tokenizer | None, row: Prepared, request: Request
) -> Callable[[], Constraint] | None:
    """What keeps the completions of a prompt to its grammar, its budget of reasoning and its bans; None for none.

    Raises:
        RowError: an allowed token is outside of the model's vocabulary, or the engine cannot serve the prompt.
    """
    sampling = request.sampling
    if row.grammar is None and sampling.max_reasoning_tokens is None and not sampling.bans:
        # Nearly all.
        return None
    inner = _grammar_constraint(engine, tokenizer, row, request)
    if not sampling.bans:
        return inner
    if max(sampling.allowed_token_ids or (0,)) >= engine.vocab_size:
        raise RowError(
            "invalid_token_id", f"allowed_token_ids must be below {engine.vocab_size}, the model's vocabulary"
        )
    ends = engine.eos_token_ids
    bans = find_bans(
        tokenizer,
        sampling.bad_words,
        sampling.allowed_token_ids,
        engine.vocab_size,
        ends,
        frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends),
        sampling.min_tokens,
    )
    return partial(BanConstraint, bans, inner)


def _grammar_constraint(
    engine: Engine, tokenizer: Tokenizer | None, row: Prepared, request: Request
) -> Callable[[], Constraint] | None:
    """What keeps the completions of a prompt to a grammar and to a budget of reasoning; None for neither.

    With a grammar, reasoning takes at most half of the tokens, so that an answer follows. One that only says what a
    call looks like needs none.
    """
    sampling, prompt = request.sampling, request.prompt_token_ids
    budget = sampling.max_reasoning_tokens
    grammar = None if row.grammar is None else row.grammar.start
    form = None if tokenizer is None else tokenizer.parsers.reasoning
    if form is not None and _largest(form) >= engine.vocab_size:
        # The tokenizer has marks of thoughts that the model has no logits for.
        form = None
    if form is None or (budget is None and (grammar is None or row.row.messages is None)):
        return grammar
    # The tokenizer cannot look up what is no token id.
    engine.require_servable(request)
    if form.has_ended(prompt):
        return grammar
    if grammar is not None and not _may_be_text(row.row):
        room = min(sampling.max_tokens, engine.max_model_len - len(prompt)) // 2
        budget = room if budget is None else min(budget, room)
    return partial(
        ReasoningConstraint,
        form,
        prompt,
        budget,
        grammar,
        calls=row.row.tool_use is not None and row.row.tool_use.choice == "required",
        vocab_size=engine.vocab_size,
        end_ids=(*engine.eos_token_ids, *sampling.stop_token_ids),
    )


def _largest(form: ReasoningFormat) -> int:
    """Of the tokens that it names."""
    marks = chain(form.reserved, *form.begin, *form.end, () if form.start is None else (form.start,))
    return max(marks, default=0)


def _may_be_text(row: Row) -> bool:
    """Whether the grammar is one that only says what calls look like."""
    grammar = row.sampling.grammar
    return row.tool_use is not None and row.tool_use.is_strict and grammar is not None and grammar.kind == "lark"
