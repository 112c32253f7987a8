"""One line of the output, and the same line as a later run's input."""

import msgspec
import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.result_names import RESULT_FIELDS
from rosebatch.io.results import Choice, PlainShape
from rosebatch.io.rows import FailedRow, Row, parse_row
from rosebatch.io.scored_tokens import ScoredToken
from tests.helpers.results import make_result
from tests.helpers.scored import packed


def scored(token, logprob, *top):
    return ScoredToken(ord(token), token.encode(), logprob, tuple(ScoredToken(i, bytes([i]), v) for i, v in top))


CHOICE = Choice(
    text="ab",
    finish_reason="stop",
    token_ids=[97, 98],
    logprobs=packed([scored("a", -0.5, (97, -0.5), (98, -1.5)), scored("b", -0.25, (98, -0.25), (97, -2.5))]),
    prompt_logprobs=packed([scored("x", None), scored("y", -3.5, (122, -1.0))]),
)


def result(*choices, **metadata):
    """The line of an answer."""
    counts = {"prompt_tokens": 2, "completion_tokens": 2 * len(choices), "cached_tokens": 1}
    line = PlainShape().result(make_result(index=0, metadata=metadata, choices=list(choices), **counts))
    return msgspec.json.decode(msgspec.json.encode(line))


def test_the_line_of_one_completion():
    """Log-probabilities are beside the text, the prompt's too. Bytes of half a character do not break the line."""
    half = ScoredToken(0xC3, b"\xc3", -0.75)
    assert result(CHOICE, id="a") == {
        "id": "a",
        "index": 0,
        "text": "ab",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        "token_ids": [97, 98],
        "logprobs": [
            {
                "token": "a",
                "token_id": 97,
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "a", "token_id": 97, "logprob": -0.5},
                    {"token": "b", "token_id": 98, "logprob": -1.5},
                ],
            },
            {
                "token": "b",
                "token_id": 98,
                "logprob": -0.25,
                "top_logprobs": [
                    {"token": "b", "token_id": 98, "logprob": -0.25},
                    {"token": "a", "token_id": 97, "logprob": -2.5},
                ],
            },
        ],
        "prompt_logprobs": [
            {"token": "x", "token_id": 120, "logprob": None, "top_logprobs": []},
            {
                "token": "y",
                "token_id": 121,
                "logprob": -3.5,
                "top_logprobs": [{"token": "z", "token_id": 122, "logprob": -1.0}],
            },
        ],
    }
    (token,) = result(Choice(text="", finish_reason="length", logprobs=packed([half])))["logprobs"]
    assert token == {"token": "\ufffd", "token_id": 0xC3, "logprob": -0.75, "top_logprobs": []}


def test_the_line_of_several_completions():
    """``choices`` replaces the text. What concerns the prompt is there only once."""
    line = result(CHOICE, Choice(text="cd", finish_reason="length"))
    assert list(line) == ["index", "choices", "usage", "prompt_logprobs"]
    assert line["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
    first, second = line["choices"]
    assert list(first) == ["index", "text", "finish_reason", "token_ids", "logprobs"]
    assert second == {"index": 1, "text": "cd", "finish_reason": "length"}
    assert line["prompt_logprobs"] == result(CHOICE)["prompt_logprobs"]


@pytest.mark.parametrize("choices", [[CHOICE], [CHOICE, CHOICE]])
def test_the_results_of_an_earlier_run_as_input(choices):
    """Their fields were lost without a word. In a result column they stay, and old lists request nothing."""
    earlier = {**result(*choices, id="a", topic="t"), "prompt": "x", "max_tokens": 3}
    refused = parse_row(earlier, index=0, where="line 1", defaults={})
    assert (refused.error.code, refused.metadata) == ("name_collision", {"id": "a", "topic": "t"})
    row = parse_row(earlier, index=0, where="line 1", defaults={}, result_column="again")
    assert isinstance(row, Row)
    assert (row.sampling, row.metadata) == (SamplingParams(max_tokens=3), result(*choices, id="a", topic="t"))


def test_a_table_of_an_earlier_runs_results_as_input():
    """The same for Parquet, whose own columns are carried through."""
    earlier = {**result(CHOICE), "prompt": "x", "n": 2}
    assert parse_row(earlier, index=0, where="row 1", defaults={}, keep_prompt=True).error.code == "name_collision"
    row = parse_row(earlier, index=0, where="row 1", defaults={}, keep_prompt=True, result_column="again")
    assert isinstance(row, Row)
    assert (row.sampling, row.metadata) == (SamplingParams(n=2), earlier)


def test_a_result_in_one_field():
    """Carried fields of all names are beside it, in results and in error rows."""
    shape = PlainShape("out")
    carried = dict.fromkeys(RESULT_FIELDS, "old")
    counts = {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 1}
    line = shape.result(make_result(index=0, metadata=carried, choices=[CHOICE], **counts))
    assert msgspec.json.decode(msgspec.json.encode(line)) == {**carried, "out": result(CHOICE)}
    failed = FailedRow(index=7, where="line 8", metadata=carried, error=RowError("some_code", "no"))
    error = {"code": "some_code", "message": "line 8: no"}
    assert shape.failure(failed) == {**carried, "out": {"index": 7, "error": error}}
