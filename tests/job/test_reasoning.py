"""Reasoning: told apart, counted by tokens, kept within a budget, and followed by what a grammar asks for."""

import json
import re

import jsonschema
import numpy as np
import pytest

from rosebatch.core.errors import FlagError
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.lines import choices_of, codes, usage
from tests.job.test_tools import ROOM, SUM_TEXT, TOOLS, WIDTH, WRITTEN, Scripted, first_choices, require_valid, run
from tests.job.tool_templates import TEMPLATES, chat_backend, chat_tokenizer

LONG = "abcdefghij" * 5
THOUGHT = {
    "hermes": "<think>\nSo it is.\n</think>\n\n",
    "gpt_oss": "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant",
}
ANSWER = {"hermes": "Yes.", "gpt_oss": "<|channel|>final<|message|>Yes."}
WHOLE = {form: THOUGHT[form] + ANSWER[form] for form in THOUGHT}
NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}


def line(text="Q1", **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 400, **fields}


@pytest.mark.parametrize("form", THOUGHT)
def test_reasoning_is_told_apart(job, form):
    """The answer is the text alone, and white space around the marks belongs to neither."""
    rows = run(job, form, [line(), line("Q2")], {"Q1": WHOLE[form], "Q2": ANSWER[form]})
    assert [(row["text"], row.get("reasoning_content")) for row in rows] == [("Yes.", "So it is."), ("Yes.", None)]
    assert [row["finish_reason"] for row in rows] == ["stop"] * 2


def test_a_prompt_that_opens_the_reasoning(job):
    """Some templates write the first mark themselves; others say that nothing is thought."""
    lines = [line(chat_template_kwargs=each) for each in ({"thinks": True}, {"enable_thinking": False}, {})]
    rows = run(job, "hermes", lines, {"Q1": "Hm.\n</think>\nYes."})
    assert [row.get("reasoning_content") for row in rows] == ["Hm.", None, None]
    assert [row["text"] for row in rows] == ["Yes.", "Hm.\n\nYes.", "Hm.\n\nYes."]


@pytest.mark.parametrize("form", THOUGHT)
def test_reasoning_that_is_cut_by_its_length(job, form):
    """There is no answer, and the reasoning is none."""
    (row,) = run(job, form, [line(max_tokens=30)], {"Q1": THOUGHT[form].partition("So")[0] + LONG})
    assert (row["text"], row["finish_reason"]) == ("", "length")
    assert row["reasoning_content"]
    assert LONG.startswith(row["reasoning_content"])


@pytest.mark.parametrize("form", THOUGHT)
def test_stop_strings(job, form):
    """One ends the answer where it appears. Within the reasoning, it does not count."""
    rows = run(job, form, [line(stop="it"), line(stop="es"), line(stop=["zz"])], {"Q1": WHOLE[form]})
    expected = [("So it is.", "Yes.", "stop"), ("So it is.", "Y", "stop"), ("So it is.", "Yes.", "stop")]
    assert [(row["reasoning_content"], row["text"], row["finish_reason"]) for row in rows] == expected


@pytest.mark.parametrize("form", THOUGHT)
def test_reasoning_tokens_are_counted(job, form):
    """By tokens, without the marks: the text has white space cut off."""
    (answer,) = job.answer(line(), model=Scripted({"Q1": WHOLE[form]}), tokenizer=chat_tokenizer(form), **ROOM)
    message = choices_of(answer)[0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "So it is.")
    details = answer["response"]["body"]["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 11 if form == "hermes" else 9}


def test_parsers_by_name(job):
    """None leaves the text as it is without marks; a form whose tokens are missing is refused at once."""
    tokenizer = chat_tokenizer("hermes")
    tokenizer.parsers = tokenizer.choose_parsers("none")
    (row,) = run(job, "hermes", [line()], {"Q1": WHOLE["hermes"]}, tokenizer=tokenizer)
    assert (row["text"], row.get("reasoning_content")) == ("\nSo it is.\n\n\nYes.", None)
    with pytest.raises(FlagError, match="no token <think>"):
        Tokenizer(byte_backend(), TEMPLATES["hermes"]).choose_parsers("think")
    assert Tokenizer(byte_backend(), TEMPLATES["hermes"]).parsers.reasoning is None


@pytest.mark.parametrize("form", THOUGHT)
def test_prompts_that_are_no_chats_are_left_alone(job, form):
    """Their text is what it was, but for special tokens."""
    (row,) = run(job, form, [{"prompt": "Q1", "max_tokens": 400}], {"Q1": WHOLE[form]})
    plain = chat_backend().decode(chat_backend().encode(WHOLE[form]).ids)
    assert (row["text"], "reasoning_content" in row) == (plain, False)


@pytest.mark.parametrize("blocks", [600, 13], ids=["roomy", "preempted"])
@pytest.mark.parametrize("form", THOUGHT)
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget(job, form, budget, blocks):
    """After so many tokens the end is forced, and the answer goes on to its own end; a shorter thought is free."""
    head = THOUGHT[form].partition("So")[0].removesuffix("\n")
    lines = [line("Q1", max_reasoning_tokens=budget, n=3, temperature=1), line("Q2", max_reasoning_tokens=50)]
    answers = {"Q1": head + LONG, "Q2": WHOLE[form]}
    options = {"blocks": blocks, "block_size": 8, "max_model_len": 300, "return_token_ids": True}
    model, tokenizer = Scripted(answers), chat_tokenizer(form)
    rows, _, engine = job.run(lines, model=model, tokenizer=tokenizer, vocab_size=WIDTH, **options)
    assert (engine.stats.preemptions > 0) == (blocks == 13)
    ids = chat_backend().encode(head + LONG[:budget] + THOUGHT[form].partition("is.")[2].strip()).ids
    for choice in rows[0]["choices"]:
        assert (choice.get("reasoning_content") or "") == LONG[:budget]
        assert choice["token_ids"][: len(ids)] == ids
        assert len(choice["token_ids"]) > len(ids)
        assert choice["finish_reason"] == "stop"
    assert (rows[1]["text"], rows[1]["reasoning_content"]) == ("Yes.", "So it is.")


def test_a_budget_beside_rows_without_one(job):
    """Rows with a budget, with a grammar, with both and with none share a step."""
    choice = {"structured_outputs": {"choice": ["no", "never"]}}
    kinds = [{"max_reasoning_tokens": 3}, choice, {"max_reasoning_tokens": 3, **choice}, {}]
    lines = [line("Q1", **kinds[i % 4]) for i in range(8)] + [{"prompt": "x", **choice}]
    rows = run(job, "hermes", lines, {"Q1": "<think>" + LONG + "</think>Yes."}, seqs=9)
    assert [row.get("reasoning_content") for row in rows] == [LONG[:3], LONG, LONG[:3], LONG] * 2 + [None]
    assert {row["text"] for row in rows[1::2]} <= {"no", "never", "Yes."}
    assert all(row["text"] in ("no", "never") for row in (*rows[1::4], *rows[2::4], rows[8]))


@pytest.mark.parametrize("form", THOUGHT)
def test_a_grammar_begins_where_the_reasoning_ends(job, form):
    """Not before: the model would be kept from thinking. Thoughts that do not end leave half of the tokens for it."""
    bare = {"Q1": WHOLE[form], "Q2": THOUGHT[form].partition("So")[0].strip() + LONG * 10}
    rows = run(job, form, [line(response_format=FORMAT), line("Q2", response_format=FORMAT)], bare)
    rows += run(job, form, [line("Q2", response_format=FORMAT, max_reasoning_tokens=5)], bare)
    for row in rows:
        jsonschema.validate(json.loads(row["text"]), NUMBER)
        assert row["finish_reason"] == "stop"
    assert [row["reasoning_content"] for row in rows] == ["So it is.", (LONG * 10)[:200], LONG[:5]]


def test_an_answer_without_reasoning_matches_its_grammar_too(job):
    """Whether it thinks is left to the model, where the prompt does not say."""
    lines = [line("Q0", response_format=FORMAT), line(response_format=FORMAT, chat_template_kwargs={"thinks": True})]
    lines += [line("Q0", response_format=FORMAT, chat_template_kwargs={"enable_thinking": False})]
    rows = run(job, "hermes", lines, {"Q1": "Hm.</think>", "Q0": "{"})
    for row in rows:
        jsonschema.validate(json.loads(row["text"]), NUMBER)
    assert [row.get("reasoning_content") for row in rows] == [None, "Hm.", None]


@pytest.mark.parametrize("form", THOUGHT)
def test_calls_behind_reasoning(job, form):
    """Free ones are told apart from it; forced ones begin behind it, also if it has a budget."""
    forced = {"tool_choice": "required", "max_reasoning_tokens": 6, "n": 2, "temperature": 1}
    lines = [line("Q1", tools=TOOLS), line("Q2", tools=TOOLS, **forced)]
    head = THOUGHT[form].partition("So")[0].removesuffix("\n")
    rows = run(job, form, lines, {"Q1": THOUGHT[form] + WRITTEN[form], "Q2": head + LONG})
    assert (rows[0]["reasoning_content"], rows[0]["text"]) == ("So it is.", "")
    assert [call["function"] for call in rows[0]["tool_calls"]] == [{"name": "add", "arguments": SUM_TEXT}]
    for choice in rows[1]["choices"]:
        assert (choice["reasoning_content"], choice["text"]) == (LONG[:6], "")
        for call in choice["tool_calls"]:
            require_valid(call)


def test_a_budget_that_nobody_can_keep(job):
    """A model whose reasoning is not told apart would think on."""
    rows = job.results([{"prompt": "x", "max_reasoning_tokens": 5}, {"prompt": "y", "max_tokens": 2}])
    assert codes(rows) == ["unsupported_field", None]
    assert rows[1]["usage"] == usage(1, 2)


def test_a_budget_of_a_batch_by_its_other_name(job):
    """Other servers' clients send thinking_token_budget."""
    (choice,) = first_choices(job, "hermes", [line(thinking_token_budget=4)], {"Q1": "<think>" + LONG})
    assert choice["message"]["reasoning_content"] == LONG[:4]


def test_no_end_token_within_the_reasoning_of_a_grammar():
    """The completion would end without its answer."""
    from rosebatch.text.reasoning.constraint import ReasoningConstraint
    from tests.engine.constraint import EveryThird

    tokenizer = chat_tokenizer("hermes")
    start = tokenizer.backend.token_to_id("<think>")
    form = tokenizer.parsers.reasoning
    free = ReasoningConstraint(form, [1], 9, None, calls=False, vocab_size=WIDTH, end_ids=[256])
    bound = ReasoningConstraint(form, [1], 9, lambda: EveryThird(WIDTH), calls=False, vocab_size=WIDTH, end_ids=[256])
    for constraint in (free, bound):
        constraint.feed(start)
    # Whatever they held before.
    masks = np.full((2, -(-WIDTH // 32)), -1, np.int32)
    ReasoningConstraint.fill_all([free, bound], masks)
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert allowed[0].nonzero()[0].tolist() == list(range(WIDTH))
    assert allowed[1].nonzero()[0].tolist() == [i for i in range(WIDTH) if i not in (256, start)]


def test_marks_of_thoughts_that_the_model_lacks(job):
    """The tokenizer alone has them: a mark was forced for which there are no logits."""
    line = {"prompt": "ABC", "max_tokens": 6, "max_reasoning_tokens": 1, "structured_outputs": {"regex": "[ab]{3}"}}
    (row,) = job.results([line], tokenizer=chat_tokenizer("gpt_oss"), vocab_size=257)
    assert re.fullmatch("[ab]{3}", row.get("text", "")), row


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63])
@pytest.mark.parametrize("form", THOUGHT)
def test_prompts_of_no_token_ids(job, form, token_id):
    """Whether they end in thoughts was asked before anybody checked them: each ended the job, with a budget or not."""
    ids = {"prompt_token_ids": [1, token_id], "max_tokens": 2}
    lines = [ids, {**ids, "max_reasoning_tokens": 3}, {**ids, "structured_outputs": {"choice": ["a"]}}, line("Q1")]
    assert codes(run(job, form, lines, {"Q1": "Yes."})) == ["invalid_token_id"] * 3 + [None]
