"""``LLM.score``: continuations of prompts, and prompts themselves."""

import math

import pytest

from rosebatch import PoolingParams, SamplingParams, run_file
from tests.helpers.json_lines import read_lines, write_lines

PROMPTS = ["The rose is", [7, 8, 9], {"prompt": "Roses are"}]


def prompt_logprobs(llm, prompt):
    """Of the tokens of a prompt, from the second on, by another way."""
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    return [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]


def test_the_same_as_log_probabilities_of_the_whole_text(llm):
    """A continuation that is encoded alone has other tokens; one that is scored at another place has other numbers."""
    outputs = llm.score(["The rose is", "Roses are"], [" red", " blue, and so on"])
    for prompt, output in zip(["The rose is", "Roses are"], outputs, strict=True):
        for text, score in zip([" red", " blue, and so on"], output.scores, strict=True):
            right = prompt_logprobs(llm, prompt + text)[-score.num_tokens :]
            assert score.num_tokens == len(text)
            assert score.logprob == pytest.approx(sum(right), abs=1e-4)
            assert not score.is_greedy
        assert output.best == max(range(2), key=lambda i: output.scores[i].logprob)


def test_the_likeliest_tokens_are_greedy(llm):
    """What the model itself writes is what it finds likeliest, token by token."""
    (written,) = llm.generate([[7, 8, 9]], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0))
    tokens = written.outputs[0].token_ids
    (output,) = llm.score([[7, 8, 9]], [tokens, [*tokens[:4], (tokens[4] + 1) % 300]])
    assert [score.is_greedy for score in output.scores] == [True, False]
    assert output.scores[0].logprob == pytest.approx(written.outputs[0].cumulative_logprob, abs=1e-4)


def test_prompts_themselves(llm):
    """Without continuations: all tokens but the first."""
    outputs = llm.score(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (score,) = output.scores
        right = prompt_logprobs(llm, prompt)
        assert score.num_tokens == len(right)
        assert score.logprob == pytest.approx(sum(right), abs=1e-4)
        assert math.exp(-score.logprob / score.num_tokens) > 1


def test_continuations_of_each_prompt(llm):
    """A list of lists was taken for continuations of token ids."""
    one, two = llm.score(["a", "b"], [[" x", [5, 6]], [[7]]])
    assert [len(one.scores), len(two.scores)] == [2, 1]
    assert one.scores[1] == llm.score("a", [[5, 6]])[0].scores[0]
    assert llm.score([[1, 2]], [[3], [4]])[0].scores[1] == llm.score([[1, 2]], [[[4]]])[0].scores[0]


@pytest.mark.parametrize(
    ("prompts", "continuations", "told"),
    [
        (["a", "b"], [["x"]], "1 list for 2 prompts"),
        (["a"], "x", "must be a list"),
        (["a"], {"x": 1}, "must be a list"),
        (["a"], 3, "must be a list"),
        (["a"], ["x", ""], "empty one"),
        ([[1, 2]], ["x"], "lists of token ids"),
        (["a"], [[[-1]]], "token id of no model"),
        (["a"], [[[9000]]], "token ids of continuations"),
        (["a"], [["x", 1.5]], "a text or token ids"),
    ],
)
def test_what_are_no_continuations(llm, prompts, continuations, told):
    """One line says what is wrong."""
    with pytest.raises(ValueError, match=told):
        llm.score(prompts, continuations)


def test_errors_are_returned(llm):
    """One prompt that cannot be scored cost the others theirs."""
    bad, good = llm.score(["", "ab"], on_error="return")
    assert (bad.error_code, bad.scores) == ("empty_prompt", [])
    assert good.error is None
    assert len(good.scores) == 1


def test_calls_of_another_kind(llm):
    """vLLM's parameters that ask for nothing are taken."""
    assert llm.score("ab", [" c"], lora_request=None)[0].scores
    with pytest.raises(TypeError, match="temperature is a field of SamplingParams"):
        llm.score("ab", [" c"], temperature=1)


def test_a_file(llm, tmp_path):
    """The same scores as of the call; two tasks at once are refused."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "ab", "continuations": [" c", "d"]}])
    assert run_file(source, tmp_path / "out.jsonl", model=llm, task="score").num_failed == 0
    (row,) = read_lines(tmp_path / "out.jsonl")
    assert row["scores"] == [each._asdict() for each in llm.score("ab", [" c", "d"])[0].scores]
    for options, told in (
        ({"task": "rank"}, "one of generate, score, classify"),
        ({"task": "score", "pooling": PoolingParams()}, "leave"),
    ):
        with pytest.raises(ValueError, match=told):
            run_file(source, model=llm, **options)
