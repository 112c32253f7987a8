"""Other tools' names of a row's fields: served where they mean something certain, and told where they are carried."""

import tracemalloc

import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.io import parsed_size
from rosebatch.io.parse import Record, RowParser
from rosebatch.io.row_names import unclear_names, with_own_names
from rosebatch.io.rows import FailedRow
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.score import Score


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_new_tokens": 7}, "max_tokens", 7),
        ({"max_new_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
        ({"max_new_tokens": None, "max_tokens": 7}, "max_tokens", 7),
        ({"min_new_tokens": 2}, "min_tokens", 2),
        ({"stop_strings": ["a"]}, "stop", ("a",)),
        ({"num_return_sequences": 3.0}, "n", 3),
        ({"max_output_tokens": 7}, "max_tokens", 7),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"sampling_seed": 7}, "seed", 7),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"thinking_token_budget": 7}, "max_reasoning_tokens", 7),
        ({"no_stop_trim": True, "stop": "a"}, "include_stop_str_in_output", True),
        ({"guided_choice": ["a", "b"]}, "grammar", GrammarSpec("choice", '["a","b"]')),
        ({"guided_regex": "a+"}, "grammar", GrammarSpec("regex", "a+")),
        ({"regex": "a+"}, "grammar", GrammarSpec("regex", "a+")),
        ({"sampling_params": {"guided_regex": "a+"}}, "grammar", GrammarSpec("regex", "a+")),
        ({"sampling_params": {"temperature": 0.5}}, "temperature", 0.5),
        ({"sampling_params": {"max_new_tokens": 9}}, "max_tokens", 9),
        ({"sampling_params": {"temperature": 0.5}, "temperature": 1}, "temperature", 1),
        ({"sampling_params": {"temperature": 0.5}, "temperature": None}, "temperature", 0.5),
        ({"max_tokens": None, "max_new_tokens": 7}, "max_tokens", 7),
        ({"sampling_params": {"max_tokens": None, "max_new_tokens": 7}}, "max_tokens", 7),
        ({"sampling_params": {"max_tokens": 5}, "max_new_tokens": 7}, "max_tokens", 7),
        ({"sampling_params": {"max_new_tokens": 5}, "max_tokens": 7}, "max_tokens", 7),
        ({"sampling_params": {"foo": None, "max_tokens": 7}}, "max_tokens", 7),
        ({"sampling_params": None, "max_tokens": 7}, "max_tokens", 7),
        # Of tables: JSON text, and the null of a column of numbers.
        ({"sampling_params": '{"max_tokens": 7}'}, "max_tokens", 7),
        ({"sampling_params": float("nan"), "max_tokens": 7}, "max_tokens", 7),
    ],
)
def test_other_names(parse, values, field, expected):
    """A row written for another tool was carried through, and ran with the defaults; nulls made it an error row."""
    row = parse({"prompt": "x", **values})
    assert (getattr(row.sampling, field), row.metadata, row.unclear) == (expected, {}, ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 7, "max_tokens": 8}, "max_new_tokens is another name of max_tokens: keep one of them"),
        ({"max_new_tokens": 7, "max_completion_tokens": 8}, "another name of max_tokens"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params: temprature is no sampling field"),
        ({"sampling_params": {"max_new_tokens": 7, "max_tokens": 8}}, "another name of max_tokens"),
        ({"sampling_params": "greedy"}, "sampling_params: expected an object, got str"),
        ({"regex": "a", "guided_choice": ["a"]}, "one grammar: keep one of guided_choice, regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "one grammar: keep one of regex, response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort needs messages"),
    ],
)
def test_names_that_contradict(parse, values, message):
    """Which one was meant is not for us to guess; ``sampling_params`` that was no object was ignored."""
    row = parse({"prompt": "x", **values})
    assert isinstance(row, FailedRow)
    assert (row.error.code, message in row.error.message) == ("invalid_field", True)


def test_variables_of_a_chat_template(parse):
    """Rows of reasoning models have them as fields; they were carried, and the model thought as ever."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    row = parse({**chat, "enable_thinking": False, "reasoning_effort": "low", "verbosity": None})
    assert row.options.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    row = parse({**chat, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}})
    assert (row.options.chat_template_kwargs, row.metadata) == ({"reasoning_effort": "high"}, {})


def test_what_looks_like_a_setting_is_told():
    """A misspelt temperature is carried through, and nobody would hear of it."""
    clear = ["topic", "label", "n_shots", "stopped", "source", "prompts", "message", "temperature_c", "seeds", "model"]
    unclear = [
        "top_K",
        "topP",
        "Temperature",
        "temprature",
        "max_token",
        "maxTokens",
        "stream",
        "do_sample",
        "ignore-eos",
        "use_beam_search",
        "no_repeat_ngram_size",
        "generation_config",
        "parameters",
    ]
    assert unclear_names(dict.fromkeys([*clear, *unclear, "temperature"], 1)) == tuple(unclear)


def test_carried_fields_are_told(parse):
    """They are carried as ever."""
    row = parse({"prompt": "x", "top_K": 5, "label": "a"})
    assert (row.unclear, row.metadata, row.sampling.top_k) == (("top_K",), {"top_K": 5, "label": "a"}, 0)


@pytest.mark.parametrize("others", [{}, dict.fromkeys(map(str, range(300)), 1)], ids=["few", "many"])
def test_a_null_sets_nothing(parse, others):
    """A table has each column in all rows: those without the setting were listed too, and refused by ``--strict``."""
    assert parse({"prompt": "x", "top_K": None, **others, "stream": None}).unclear == ()


def test_settings_of_another_task_are_told():
    """Rows for embed carried what only completions have: tools were missing in the prompt, and no line said so."""
    carried = {
        "max_tokens": 3,
        "tools": [],
        "continue_final_message": True,
        "dimension": 4,
        "encoding_format": "base64",
    }
    values = {"prompt": "x", "dimensions": 4, "truncate_prompt_tokens": 9, "label": "a", **carried}
    row = Embed().parse(values, index=0, where="line 1", defaults={}, keep_prompt=True)
    assert row.unclear == tuple(carried)
    assert row.metadata == values


@pytest.mark.parametrize("name", ["image", "images", "image_url", "audio", "input_audio", "video", "multi_modal_data"])
def test_inputs_that_are_not_text(parse, name):
    """They were carried, and the text alone was answered. A null is none."""
    row = parse({"prompt": "What is on it?", name: "cat.png"})
    assert isinstance(row, FailedRow) and row.error.code == "unsupported_field"
    ways = {name: f"or in a column: --image-column {name}" for name in ("image", "images", "image_url")}
    ways["multi_modal_data"] = "or in a column: --image-column NAME"
    assert row.error.message.startswith(f"{name}: ")
    assert row.error.message.endswith(ways.get(name, "only texts and images are served"))
    # A picture was repeated in base64.
    assert row.metadata == {}
    assert parse({"prompt": "a", name: None}).metadata == {name: None}


def test_inputs_that_are_not_text_of_other_tasks():
    """Images of files are embedded; no flag makes others of rows that are scored."""
    ways = {
        Embed: "images of rows are parts of messages, or in a column: --image-column image",
        Score: "rows of score are texts",
    }
    for task, way in ways.items():
        row = task().parse(
            {"prompt": "x", "image": "cat.png", "a": 1}, index=0, where="", defaults={}, keep_prompt=True
        )
        assert row.error.message == f"image: {way}"
        assert row.metadata == {"prompt": "x", "a": 1}


def test_a_row_of_very_many_names():
    """Each was compared with all known names: a row of a million took minutes, and all others waited."""
    names = [f"column_{number}" for number in range(300)]
    names = ["temprature", *names, "temprture", "top_K", "stream"]
    assert unclear_names(dict.fromkeys(names, 1)) == ("temprature", "top_K", "stream")


@pytest.mark.parametrize("name", ["system", "instruction", "context", "input"])
def test_texts_beside_the_prompt(parse, name):
    """Data sets keep a part of the prompt there: the model answered without it, and nobody said so."""
    row = parse({"prompt": "a", name: "b"})
    assert (row.unclear, row.metadata) == ((name,), {name: "b"})


@pytest.mark.parametrize(
    ("line", "repeated"),
    [
        ('{"prompt":"a","id":1,"prompt":"b"}', ("prompt (twice)",)),
        (
            '{"messages":[{"role":"user","content":"a","content" : "b"}],"x":{"y":1,"y":1,"y":2}}',
            ("content (twice)", "y (twice)"),
        ),
        ('{"prompt":"a","x":{"prompt":1},"y":[{"x":1},{"x":1}],"n1":' + "9" * 300 + "}", ()),
        ('{"prompt":"a","x":' + "[" * 599 + "]" * 599 + "}", ()),
        ('{"prompt":"a\\u0009\\ud83c\\udf39"}', ()),
    ],
)
def test_names_that_a_line_has_twice(line, repeated):
    """One of two prompts was dropped without a word. The last one counts; that there are two is listed."""
    row = RowParser(False, {}).parse(Record(0, "line 1", line.encode(), len(line)))
    assert row.unclear == repeated


@pytest.mark.parametrize(
    ("number", "size", "closely", "found"),
    [(63, 9, False, 1), (64, 9, False, 0), (64, 9, True, 1), (0, 1 << 17, False, 0), (0, 1 << 17, True, 1)],
)
def test_a_run_searches_its_first_rows_for_repeated_names(number, size, closely, found):
    """Of all rows, it would take a tenth of the time that reading takes; ``check`` has that time."""
    parser = RowParser(False, {}, looks_closely=closely)
    row = parser.parse(Record(number, "line 1", b'{"prompt":"a","prompt":"b"}', size))
    assert (len(row.unclear), row.prompt) == (found, "b")


def test_a_long_name_is_compared_with_none():
    """One of 30 MB took 1.4 GB: whoever compares two texts makes a list of the places of each letter."""
    name = "temperatur" + "e" * 100_000
    tracemalloc.start()
    try:
        assert unclear_names({name: 1}) == ()
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_sampling_params_that_take_more_than_their_text(monkeypatch):
    """21 MB of empty lists in a text took 550 MB."""
    monkeypatch.setattr(parsed_size, "SHORT_LINE", 1000)
    monkeypatch.setattr(parsed_size, "VALUE_BYTES", 50_000)
    with pytest.raises(RowError, match=r"^its values would take more than 50000 bytes in memory$"):
        with_own_names({"prompt": "a", "sampling_params": "[" + "[]," * 600 + "0]"})
