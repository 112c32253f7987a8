"""Rows of several completions and of several prompts, over the fake model."""

import json

import openai.types
import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.job.report.progress import Progress
from tests.job.fake_model import FakeModel
from tests.job.lines import choices_of, codes, texts, usage


def sample_seeds(seed, n):
    """The seeds of a row's completions."""
    request = Request(0, (1,), SamplingParams(seed=seed))
    states = [SequenceState.start(request, id=0, max_model_len=9, sample=number) for number in range(n)]
    return [state.sampling.seed for state in states]


def test_choices_of_one_prompt(job):
    """Completions are in order with their own random numbers; the prompt is computed and counted once."""
    prompt = "0123456789"
    rows, tally, engine = job.run([{"prompt": prompt, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 6}])
    expected = [FakeModel().complete(prompt, 6, seed=seed) for seed in sample_seeds(5, 3)]
    assert len(set(expected)) == 3
    choices = [{"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(expected)]
    assert rows == [{"index": 0, "choices": choices, "usage": usage(10, 18)}]
    # Each further choice computes only the prompt's last token again; then 5 tokens of each choice are computed.
    assert engine.stats.computed_tokens == 10 + 2 + 3 * 5
    assert (tally.prompt_tokens, tally.output_tokens, tally.cached_tokens) == (10, 18, 0)


def test_greedy_choices_are_alike(job):
    """Only random numbers may make completions of one prompt differ."""
    rows, _, _ = job.run([{"prompt": "x", "n": 4, "max_tokens": 5}])
    assert texts(rows[0]) == [FakeModel().complete("x", 5)] * 4


def test_choices_end_each_for_itself(job):
    """Completions end at different times for different reasons; the row waits for the last."""
    line = {"prompt": "x", "n": 20, "temperature": 1, "seed": 1, "max_tokens": 12, "stop": "e"}
    rows, tally, _ = job.run([line, {"prompt": "y", "max_tokens": 1}])
    wholes = [FakeModel().complete("x", 12, seed=seed) for seed in sample_seeds(1, 20)]
    assert texts(rows[0]) == [whole.partition("e")[0] for whole in wholes]
    reasons = ["stop" if "e" in whole else "length" for whole in wholes]
    assert [choice["finish_reason"] for choice in rows[0]["choices"]] == reasons
    assert 2 < reasons.count("stop") < 18
    assert tally.finish_reasons == {"stop": reasons.count("stop"), "length": reasons.count("length") + 1}


@pytest.mark.parametrize("blocks", [64, 8], ids=["roomy", "preempted"])
def test_rows_with_different_numbers_of_choices(job, blocks):
    """Every row gets its own completions, in input order, even if memory cannot hold them all at once."""
    counts = [1 + i * 7 % 5 for i in range(30)]
    lines = [
        {"prompt": f"row {i}", "n": n, "temperature": 1, "seed": i, "max_tokens": 1 + i * 5 % 13}
        for i, n in enumerate(counts)
    ]
    rows, tally, engine = job.run(lines, blocks=blocks)
    assert [row["index"] for row in rows] == list(range(30))
    assert [texts(row) for row in rows] == [
        [FakeModel().complete(line["prompt"], line["max_tokens"], seed=s) for s in sample_seeds(line["seed"], n)]
        for line, n in zip(lines, counts, strict=True)
    ]
    assert (engine.stats.preemptions > 0) == (blocks == 8)
    assert tally.completed == 30
    assert tally.finish_reasons == {"length": sum(counts)}


def test_more_choices_than_seats(job):
    """A row may have more completions than the batch and the queue have room for."""
    rows, _, engine = job.run([{"prompt": "x", "n": 50, "temperature": 1, "seed": 3, "max_tokens": 3}], seqs=4)
    assert texts(rows[0]) == [FakeModel().complete("x", 3, seed=seed) for seed in sample_seeds(3, 50)]
    assert engine.stats.max_running == 4


def test_choices_do_not_depend_on_the_rest_of_the_file(job):
    """With --seed, a row gives the same alone and among others, in every run."""
    lines = [{"prompt": f"row {i % 3}", "id": i, "n": 1 + i % 3, "temperature": 1, "max_tokens": 8} for i in range(9)]
    rows, _, _ = job.run(lines, seed=1)
    found = [texts(row) for row in rows]
    assert len({text for row in found for text in row}) == sum(map(len, found))
    assert [texts(row) for row in job.run(lines[::-1], seed=1)[0]] == found[::-1]
    assert texts(job.run(lines[5:6], seed=1)[0][0]) == found[5]


def test_token_ids_and_echo_of_each_choice(job):
    """Each choice has its own token ids, and the prompt before its text."""
    line = {"prompt": "abc", "n": 2, "temperature": 1, "max_tokens": 2, "echo": True}
    rows, _, _ = job.run([line], return_token_ids=True)
    for choice in rows[0]["choices"]:
        assert choice["text"] == "abc" + bytes(choice["token_ids"]).decode()
    assert "token_ids" not in rows[0]


def test_rows_and_tokens_are_counted_apart(job, monkeypatch):
    """A row counts once in progress and rates, its tokens over all completions; failed rows have no tokens."""
    told = []
    monkeypatch.setattr(Progress, "advance", lambda self, **what: told.append(what))
    lines = [{"prompt": "ab", "n": 3, "max_tokens": 4}, {"prompt": "c", "max_tokens": 2}, {"prompt": "d", "n": 0}]
    _, tally, _ = job.run(lines)
    assert sorted(told, key=str) == [{"failed": True}, {"tokens": 12}, {"tokens": 2}]
    assert (tally.completed, tally.failed, tally.prompt_tokens, tally.output_tokens) == (2, 1, 3, 14)
    assert tally.finish_reasons == {"length": 4}
    assert (len(tally.ttft), len(tally.tpot), len(tally.e2e)) == (4, 4, 4)


def test_several_prompts(job):
    """All completions of the first prompt come before those of the next; tokens are counted over all prompts."""
    (line,) = job.answer({"prompt": ["one", "two words", list(b"ids")], "n": 2, "max_tokens": 3})
    prompts = ["one", "one", "two words", "two words", "ids", "ids"]
    assert [choice["text"] for choice in choices_of(line)] == [FakeModel().complete(p, 3) for p in prompts]
    assert [choice["index"] for choice in choices_of(line)] == list(range(6))
    counts = line["response"]["body"]["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (3 + 9 + 3, 18, 33)


def test_several_prompts_in_input_order(job):
    """A request's prompts must not be mixed with those of its neighbours in the batch."""
    bodies = [{"prompt": [f"{i} {j}" for j in range(1 + i % 4)], "max_tokens": 1 + i % 5} for i in range(20)]
    answers = job.answer(*bodies)
    for body, line in zip(bodies, answers, strict=True):
        expected = [FakeModel().complete(prompt, body["max_tokens"]) for prompt in body["prompt"]]
        assert [choice["text"] for choice in choices_of(line)] == expected


def test_the_same_prompt_twice_in_a_request(job):
    """It gets two different answers, like a prompt on two lines of the file."""
    (line,) = job.answer({"prompt": ["x"] * 5, "temperature": 1, "max_tokens": 12})
    assert len({choice["text"] for choice in choices_of(line)}) == 5


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("x" * 300, "prompt_too_long"),
        ([257], "invalid_token_id"),
        ([-1], "invalid_token_id"),
        ("\ud800", "invalid_prompt"),
    ],
)
def test_one_prompt_that_cannot_be_served(job, bad, code):
    """The whole request fails and none of its prompts runs; its neighbours are served."""
    begun = set()
    model = FakeModel(before_step=lambda plan: begun.update(bytes([*s.prompt_token_ids]) for s in plan.started))
    good = {"prompt": ["good", "day"], "max_tokens": 2}
    after = {"prompt": ["good", "bye"], "max_tokens": 2}
    answers = job.answer(good, {"prompt": ["fine", bad, "fine too"], "n": 2}, after, model=model)
    assert codes(answers) == [None, code, None]
    assert begun == {b"good", b"day", b"bye"}
    assert [len(choices_of(line)) for line in (answers[0], answers[2])] == [2, 2]


def test_every_answer_is_the_clients_type(job):
    """The official client must parse choices, log-probabilities and several prompts, strictly."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answers = job.answer(
        {**chat, "n": 3, "temperature": 1, "logprobs": True, "top_logprobs": 3},
        {**chat, "logprobs": True},
        {"prompt": ["a", "bc"], "n": 2, "logprobs": 3},
        {"prompt": "a", "n": 2},
        {**chat, "response_format": {"type": "json_object"}, "n": 2, "logprobs": True, "max_tokens": 90},
        return_token_ids=True,
    )
    kinds = {"chat.completion": openai.types.chat.ChatCompletion, "text_completion": openai.types.Completion}
    bodies = [line["response"]["body"] for line in answers]
    bodies = [kinds[body["object"]].model_validate(body, strict=True) for body in bodies]
    assert [len(body.choices) for body in bodies] == [3, 1, 4, 2, 2]
    assert [[choice.index for choice in body.choices] for body in bodies] == [list(range(n)) for n in (3, 1, 4, 2, 2)]
    content = bodies[0].choices[2].logprobs.content
    assert "".join(token.token for token in content) == bodies[0].choices[2].message.content
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs == [] for token in bodies[1].choices[0].logprobs.content)
    for choice in bodies[2].choices:
        pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(choice.text.startswith(token, offset) for token, offset in pairs)
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in bodies[4].choices)
