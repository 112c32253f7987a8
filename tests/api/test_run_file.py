"""``run_file`` is the whole job: what the command line promises, from Python, with a model that stays loaded."""

import json

import pytest

from rosebatch import SamplingParams, run_file
from rosebatch.core.errors import UserError
from tests.api.conftest import NAME
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": n, "prompt": f"rose {n}", "max_tokens": 4} for n in range(5)] + [{"id": 5, "prompt": ""}]
    return write_lines(tmp_path / "prompts.jsonl", rows)


def test_a_job(prompts, tmp_path):
    """By hub id, without a network; the report names the model as it was asked for, never a cache's hash."""
    target, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    result = run_file(prompts, target, model=NAME, report=report, max_num_seqs=4)
    rows = read_lines(target)
    assert [row["id"] for row in rows] == list(range(6))
    assert rows[5]["error"]["code"] == "empty_prompt" and result.num_failed == 1
    assert result.report["completed"] == 5 and result.report["engine"]["model"] == NAME
    assert json.loads(report.read_text())["engine"]["max_num_seqs"] == 4


def test_a_model_that_stays_loaded(llm, prompts, tmp_path):
    """The same bytes as a job of its own; counters start anew with each file."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one, two = (run_file(prompts, target, model=llm) for target in (first, second))
    assert first.read_bytes() == second.read_bytes()
    assert one.report["steps"] == two.report["steps"] > 0
    assert llm.generate("a", SamplingParams(max_tokens=1)), "and serves other calls after it"
    with pytest.raises(ValueError, match="loaded already"):
        run_file(prompts, tmp_path / "c.jsonl", model=llm, dtype="float32")
    with pytest.raises(ValueError, match=r"^unknown setting prompt_colum; did you mean prompt_column\?$"):
        run_file(prompts, tmp_path / "c.jsonl", model=llm, prompt_colum="q")


def test_sampling_defaults(llm, prompts, tmp_path):
    """As fields of a row, or of SamplingParams those that are not the default; rows win."""
    target = tmp_path / "answers.jsonl"
    run_file(prompts, target, model=llm, sampling={"max_tokens": 2, "ignore_eos": True})
    assert {row["usage"]["completion_tokens"] for row in read_lines(target)[:5]} == {4}
    prompts.write_text('{"prompt": "a"}\n')
    run_file(prompts, target, model=llm, sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    assert read_lines(target)[0]["usage"]["completion_tokens"] == 3
    with pytest.raises(ValueError, match="top_p must be in"):
        run_file(prompts, target, model=llm, sampling={"top_p": 2.0})


def test_what_is_impossible_is_said_before_anything_is_written(llm, prompts, tmp_path):
    """A missing file, a strict run over bad rows, a resume without a file."""
    with pytest.raises(UserError, match="no such file"):
        run_file(tmp_path / "none.jsonl", tmp_path / "a.jsonl", model=llm)
    with pytest.raises(ValueError, match="1 row cannot be served"):
        run_file(prompts, tmp_path / "a.jsonl", model=llm, strict=True)
    with pytest.raises(ValueError, match="--resume needs an output file"):
        run_file(prompts, model=llm, resume=True)
    assert not (tmp_path / "a.jsonl").exists()
    assert llm.generate("a", SamplingParams(max_tokens=1)), "the model is free again"


def test_values_past_the_devices_words_cost_one_row(tmp_path):
    """min_tokens of 2^31 overflowed an int32 tensor: the job ended, and again at each --resume."""
    prompts, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    extremes = [
        {"min_tokens": 2**31, "max_tokens": 2**31},
        {"min_tokens": 2**63, "max_tokens": 2**63, "temperature": 1e300, "top_k": 2**63, "seed": 2**64 - 1},
        {"temperature": 1e-300, "top_p": 1e-300, "min_p": 1, "stop_token_ids": [2**63, 2**31]},
        {"logit_bias": {"5": 1e28, "6": -1e28}, "repetition_penalty": 1e-9, "temperature": 1},
        {"logit_bias": {"5": 1e300}},
        {"logit_bias": {str(2**63): 1}},
        {"repetition_penalty": 1e300},
    ]
    lines = [{"prompt": "a"}, *[{"prompt": "a", **values} for values in extremes], {"prompt": "a"}]
    write_lines(prompts, lines)
    run_file(prompts, target, model=NAME, max_model_len=24, max_num_seqs=4, sampling={"max_tokens": 2})
    first, *rows, last = read_lines(target)
    assert {**first, "index": 8} == last
    assert codes(rows) == [None, None, None, None, "invalid_sampling", "invalid_token_id", "invalid_sampling"]
    assert [rows[i]["usage"]["completion_tokens"] for i in (0, 1)] == [23, 23]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_colum": "a"}, r"^unknown setting prompt_colum; did you mean prompt_column\?$"),
        ({"max_model_length": 5}, r"^unknown setting max_model_length; did you mean max_model_len\?$"),
        ({"input": ["a.jsonl", "b.jsonl"]}, r"^input must be one path: of a file, a folder, or a glob .*; got list$"),
        ({"pipeline_parallel_size": 2}, "^pipeline_parallel_size=2 is not served: use tensor_parallel_size or data"),
    ],
)
def test_parameters_that_are_no_parameters(tmp_path, given, message):
    """One misspelt was compared with settings of the engine alone; a list was a file of that name."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=message):
        run_file(**{"input": tmp_path / "a.jsonl", "output": tmp_path / "o.jsonl", "model": NAME, **given})
