"""A batch file as people write it: good lines are served, bad ones refused, and the client reads each answer."""

import openai.types
import openai.types.chat
import openai.types.responses
import pytest

from rosebatch.io.openai.lines import BatchShape
from tests.job.lines import requests
from tests.job.realistic_lines import bad_lines, good_lines

TYPES = {
    "chat.completion": openai.types.chat.ChatCompletion,
    "text_completion": openai.types.Completion,
    "response": openai.types.responses.Response,
}


@pytest.fixture(scope="module")
def answers(module_job):
    """The answers to all lines, good and bad ones in turn."""
    good, bad = good_lines(), bad_lines()
    lines = [line for number, each in enumerate(good) for line in ([bad.pop(), each] if number % 5 == 0 else [each])]
    assert not bad
    return module_job.results(rows=requests(lines, max_tokens=8), shape=BatchShape("toy", 5))


def test_good_lines_are_served_and_bad_ones_refused(answers):
    """Of 117 such lines 53 were refused once, 33 of them without need."""
    refused = [line["custom_id"] for line in answers if line["response"]["status_code"] == 400]
    assert len(answers) == 120
    assert {line["response"]["status_code"] for line in answers} == {200, 400}
    assert sorted(refused) == sorted(line["custom_id"] for line in bad_lines())
    assert all(line["error"] is None for line in answers)


def test_every_body_is_the_clients(answers):
    """Strictly: a null where its type has none, or a number as text, breaks a program that reads the answers."""
    bodies = [line["response"]["body"] for line in answers if line["response"]["status_code"] == 200]
    assert len(bodies) == 100
    for body in bodies:
        TYPES[body["object"]].model_validate(body, strict=True)


def test_every_error_is_told(answers):
    """A line number, a code for programs and a sentence for people."""
    errors = [line["response"]["body"]["error"] for line in answers if line["response"]["status_code"] == 400]
    for error in errors:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("line ")
