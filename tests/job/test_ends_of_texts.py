"""Where the text of a completion begins and ends: no end token, no lost space, no stop string of thoughts."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.openai.completions import _character_offsets
from rosebatch.llm.llm import LLM
from rosebatch.text.stop_strings import StopStrings
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.marked_spaces import marked_spaces
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.lines import choices_of
from tests.job.test_tools import ROOM, Scripted, run
from tests.job.tool_templates import chat_tokenizer

THOUGHTS = "<think>\nIt is so.\n\nIt is.\n</think>\n\nYes, it is.\n\nYes."


def byte_level(*, special):
    """Bytes; the end token is no special token, as in some tokenizer.json files; then a mark."""
    backend = byte_backend(end="x")
    backend = tokenizers.Tokenizer(models.BPE({**backend.get_vocab(), "<eos>": EOS}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<eos>", special=special, normalized=False)])
    backend.add_special_tokens(["<mark>"])
    return Tokenizer(backend)


def metaspace():
    """Like Llama 2's, whose decoder drops the first space of a text."""
    pieces = ["<unk>", "\u2581a", "\u2581b", "a", "b", "\u2581", *(f"<{n}>" for n in range(6, EOS)), "</s>"]
    return Tokenizer(marked_spaces(pieces, [("\u2581", "a"), ("\u2581", "b")], ["</s>"]))


def scripted(token_ids):
    """Answers each prompt so, then with end tokens."""
    model = FakeModel()

    def next_token(known, prompt, seed):
        at = len(known) - len(prompt)
        return token_ids[at] if at < len(token_ids) else EOS

    model.next_token = next_token
    return model


ENDS = [
    ({}, ("hi", "stop", 3)),
    ({"stop": "zz"}, ("hi", "stop", 3)),
    ({"stop": "<eos>"}, ("hi", "stop", 3)),
    ({"skip_special_tokens": False}, ("hi", "stop", 3)),
    ({"max_tokens": 3}, ("hi", "stop", 3)),
    ({"max_tokens": 2}, ("hi", "length", 2)),
    ({"stop_token_ids": [ord("i")]}, ("h", "stop", 2)),
    ({"stop_token_ids": [ord("i")], "include_stop_str_in_output": True}, ("hi", "stop", 2)),
    ({"stop_token_ids": [ord("i")], "stop": "i", "include_stop_str_in_output": True}, ("hi", "stop", 2)),
    ({"logit_bias": {"300": 1}, "stop": "x"}, ("hi", "stop", 3)),
]


@pytest.mark.parametrize("special", [False, True])
def test_the_token_that_ends_a_completion_is_not_in_its_text(job, special):
    """An end token that the tokenizer does not call special was the end of the text."""
    lines = [{"prompt": "p", "max_tokens": 9, **fields} for fields, _ in ENDS]
    rows = job.results(lines, model=scripted(b"hi"), tokenizer=byte_level(special=special), vocab_size=301)
    found = [(row["text"], row["finish_reason"], row["usage"]["completion_tokens"]) for row in rows]
    assert found == [expected for _, expected in ENDS]


def test_an_end_token_that_ends_nothing(job):
    """With ignore_eos it is text like any other."""
    lines = [{"prompt": "p", "max_tokens": 4, "ignore_eos": True}]
    (row,) = job.results(lines, model=scripted(b"hi"), tokenizer=byte_level(special=False), vocab_size=301)
    assert (row["text"], row["finish_reason"]) == ("hi<eos><eos>", "length")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": "<mark>"}, ("hi", "stop", 3)),
        ({"stop": ["zz", "<mark>"]}, ("hi", "stop", 3)),
        ({"stop": "<mark>", "max_tokens": 3}, ("hi", "stop", 3)),
        ({"stop": "<mark>", "min_tokens": 4}, ("hih", "stop", 5)),
        ({"stop": "<mark>", "skip_special_tokens": False}, ("hi", "stop", 3)),
        (
            {"stop": "<mark>", "skip_special_tokens": False, "include_stop_str_in_output": True},
            ("hi<mark>", "stop", 3),
        ),
    ],
)
def test_a_stop_string_that_is_a_special_token(job, fields, expected):
    """It is not in the text, so it never stopped."""
    line = {"prompt": "p", "max_tokens": 9, **fields}
    model = scripted([*b"hi", 257, *b"h"])
    (row,) = job.results([line], model=model, tokenizer=byte_level(special=True), vocab_size=258)
    assert (row["text"], row["finish_reason"], row["usage"]["completion_tokens"]) == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "It"}, "Yes, it is.\n\nYes."),
        ({"stop": "is"}, "Yes, it "),
        ({"stop": "\n\n"}, "Yes, it is."),
        ({"stop": ["</think>", "<think>"]}, "Yes, it is.\n\nYes."),
        ({"stop": "Yes", "min_tokens": 26}, "Yes, it is.\n\n"),
        ({"stop": "Yes", "min_tokens": 30}, "Yes, it is.\n\n"),
        ({"stop": "Yes", "min_tokens": 25}, ""),
    ],
)
def test_stop_strings_count_in_the_answer(job, fields, text):
    """One in the thoughts, or in the white space behind them, ended a row with an empty answer."""
    line = {"messages": [{"role": "user", "content": "Q1"}], "max_tokens": 400, **fields}
    (row,) = run(job, "hermes", [line], {"Q1": THOUGHTS})
    assert (row["reasoning_content"], row["text"]) == ("It is so.\n\nIt is.", text)
    (completion,) = chat(SamplingParams(max_tokens=400, **fields)).outputs
    whole = f"\nIt is so.\n\nIt is.\n\n\n{text}"
    assert (completion.text, completion.message["content"]) == (whole, text)


def test_the_stop_reason_of_a_special_token():
    """It named no string, as if the model had ended by itself."""
    engine = make_engine(scripted([*b"hi", 257]), vocab_size=258)
    (output,) = LLM.of(launch_fake(engine, byte_level(special=True))).generate("p", SamplingParams(stop="<mark>"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("hi", "<mark>")


def chat(sampling):
    """The library's output, whose text has the thoughts."""
    engine = make_engine(Scripted({"Q1": THOUGHTS}), **ROOM)
    llm = LLM.of(launch_fake(engine, chat_tokenizer("hermes")))
    (output,) = llm.chat([{"role": "user", "content": "Q1"}], sampling)
    return output


def test_texts_go_on_behind_the_prompt(job):
    """A decoder that drops the first space joined prompt and answer, broke patterns, and hid a stop string."""
    lines = [
        {"prompt": "a a", "echo": True, "max_tokens": 2},
        {"prompt": "a a", "max_tokens": 2},
        {"prompt_token_ids": [1, 1], "echo": True, "max_tokens": 2},
        {"prompt": "a a", "max_tokens": 4, "stop": " b"},
        {"prompt": "a a", "max_tokens": 4, "stop": "b b"},
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": " b a"}},
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": [" b", "c"]}},
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["b", "c"]}},
    ]
    rows = job.results(lines, model=scripted([2] * 9), tokenizer=metaspace(), vocab_size=257)
    assert [row.get("text", row) for row in rows] == ["a a b b", " b b", "a a b b", "", " ", " b a", " b", "b"]


def test_watching_agrees_with_the_text_of_such_a_decoder():
    """The stream has to begin as the text does."""
    watcher = StopStrings(metaspace(), [" b"])
    assert [watcher.feed(token_id) for token_id in (1, 3, 2)] == [False, False, True]
    assert StopStrings(metaspace(), [" b"]).feed(2)


def test_a_prompt_that_ends_within_a_character(job):
    """The completion has the rest of it: the echo is decoded as one."""
    line = {"prompt_token_ids": [*b"ab", 0xC3], "echo": True, "max_tokens": 2}
    (row,) = job.results([line], model=scripted([0xA9, ord("c")]))
    assert row["text"] == "abéc"
    body = {"prompt": [*b"a", 0xC3], "echo": True, "max_tokens": 2, "logprobs": 0}
    (answer,) = job.answer(body, model=scripted([0xA9, ord("c")]))
    (choice,) = choices_of(answer)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("aéc", [0, 1, 1, 2])


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"\xe2", b"a", b"b"], [0, 1, 2]),
        ([b"a", b"\xe2", b"\x82", b"\xac", b"b"], [0, 1, 1, 1, 2]),
        ([b"\xe2", b"\x82", b"b"], [0, 0, 1]),
        ([b"\xe2", b"\xe2", b"b"], [0, 1, 2]),
        ([b"\xe2", b"", b"b"], [0, 0, 1]),
        ([b"\xe2x", b"\xff", b"y"], [0, 2, 3]),
        (["\ufffd".encode()[:1], "\ufffd".encode()[1:], b"y"], [0, 0, 1]),
        ([b"\xf0\x9f", b"\x98", b"\x80", "é".encode()], [0, 0, 0, 1]),
    ],
)
def test_offsets_behind_what_is_no_character(pieces, offsets):
    """A token behind half a character began one place too early."""
    assert list(_character_offsets(pieces)) == offsets
    text = b"".join(pieces).decode(errors="replace")
    assert len(b"".join(pieces[:-1]).decode(errors="replace")) == offsets[-1] <= len(text)
