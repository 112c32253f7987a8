"""Processor time of a row: it means something only if each row goes all the way. No test measures time."""

import json
import sys

import pytest

from benchmarks import host_time
from benchmarks.batch_works import Texts
from rosebatch import LLM, SamplingParams
from tests.helpers.small_llama import save_tokenizer


@pytest.mark.parametrize("runner", [lambda _: host_time.NoModel(), host_time.without_kernels])
@pytest.mark.parametrize("kind", ["list", "numpy", "torch", "arrow"])
def test_each_prompt_is_completed(toy, kind, runner):
    case = host_time.Case(rows=5, shared=100, own=20, generated=11)
    prompts = host_time.prompts_of(case, kind, 0)
    with LLM(toy, load_format="dummy", device="cpu") as llm, llm.exclusive() as launched:
        outputs = host_time.without_model(launched, runner(launched), 1600).generate(
            prompts, SamplingParams(max_tokens=11, ignore_eos=True)
        )
    assert [output.prompt_token_ids for output in outputs] == [[*map(int, prompt)] for prompt in map(list_of, prompts)]
    assert [output.outputs[0].token_ids for output in outputs] == [[7] * 11] * 5
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 64, 64, 64, 64]


def list_of(prompt):
    return prompt if isinstance(prompt, list) else prompt.tolist()


def test_all_are_measured(toy, tmp_path, monkeypatch, capsys):
    save_tokenizer(tmp_path)
    real = host_time.launch
    monkeypatch.setattr(
        host_time,
        "launch",
        lambda config: real(config.of(str(toy), tokenizer=str(tmp_path), load_format="dummy", device="cpu")),
    )
    # The tokenizer has no words.
    monkeypatch.setattr(host_time, "Texts", lambda _, seed: Texts(["\u0120a", "\u0120b"], seed))
    monkeypatch.setattr(sys, "argv", ["host_time", "--kinds", "list", "--files", "--scale", "0.001", "--repeats", "1"])
    host_time.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    files = [f"{name}, {kind}" for name in host_time.CASES for kind in ("JSONL", "Parquet")]
    texts = ["texts of a file", "texts, choices the same", "texts, choices of each row"]
    assert list(found) == [*(f"{name}, list" for name in host_time.CASES), *files, *texts]
    assert all(value > 0 for value in found.values())
