"""``check`` says what a file would take, without running it."""

from array import array
from pathlib import Path

import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.engine.metrics.roofline import Floor, Rates, find_floor
from rosebatch.job.check import _summary, check_rows, time_range
from rosebatch.launch.plan import plan_launch
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.job.lines import requests

TOML = Path(__file__).parents[2] / "configs" / "models" / "tiny-llama.toml"
# The fake model's.
VOCAB, LIMIT = 257, 100
RATES = Rates(copy=1e6, matmul=1e8)


@pytest.fixture
def check(job, tokenizer):
    """Checks lines. Returns the counts, and the rows that cannot be served."""

    config = msgspec.structs.replace(
        load_toml(TOML, ModelConfig), vocab_size=VOCAB, max_model_len=LIMIT, eos_token_ids=(EOS,)
    )

    def run(lines=(), rows=None, **defaults):
        failed = []
        rows = job.rows(lines, **defaults) if rows is None else rows
        return check_rows(rows, tokenizer, config, failed.append), failed

    return run


def plan_of(model, dtype, **limits):
    """A plan for a model on a CPU with two sequences at a time."""
    own = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2}
    return plan_launch(RunConfig(model=str(TOML.with_stem(model)), dtype=dtype, **own, **limits))


@pytest.fixture
def plan():
    return plan_of("tiny-llama", "float32")


def summary(checked, plan):
    return dict(_summary(checked, plan, 16, RATES))


def test_rows_fail_as_they_would_in_a_run(check, job):
    """``check`` and a run must give the same codes and messages for the same bad rows."""
    lines = [
        {"prompt": "good", "max_tokens": 5},
        {"prompt": "x" * 100},
        {"prompt_token_ids": [VOCAB]},
        {"prompt": "x", "top_p": 2},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"prompt": "x", "logit_bias": {"257": 1}},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "x", "structured_outputs": {"json": {"type": "objec"}}},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "good", "max_tokens": 200},
    ]
    checked, failed = check(lines)
    rows, tally, _ = job.run(lines, max_model_len=LIMIT)
    errors = [row["error"] for row in rows if "error" in row]
    assert [{"code": r.error.code, "message": f"{r.where}: {r.error.message}"} for r in failed] == errors
    assert checked.errors == tally.errors
    assert list(checked.prompt_lens) == [4, 4]
    assert list(checked.output_lens) == [5, 96], "no longer than the model"


def test_the_flags_defaults_count(check):
    """--max-tokens limits the output of rows that give no limit."""
    checked, _ = check([{"prompt": "a"}, {"prompt": "a", "max_tokens": 3}], max_tokens=7)
    assert list(checked.output_lens) == [7, 3]


def test_several_completions_of_a_prompt(check):
    """The prompt's tokens count once, the output's once for each completion."""
    checked, _ = check([{"prompt": "good", "max_tokens": 5, "n": 3}, {"prompt": "good", "max_tokens": 200, "n": 2}])
    assert list(checked.prompt_lens) == [4, 4]
    assert list(checked.output_lens) == [15, 192]


def test_a_beginning_that_is_there_twice(job, plan):
    """A text that begins with BOS gets a second one: the model answers worse, and nothing said so."""
    backend = byte_backend()
    backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer = Tokenizer(backend, None, {})
    rows = job.rows([{"prompt": "<eos>a"}, {"prompt": "a"}, {"prompt": "a<eos>"}, {"prompt_token_ids": [EOS, 1]}])
    config = msgspec.structs.replace(plan.source.config, vocab_size=VOCAB)
    checked = check_rows(rows, tokenizer, config, pytest.fail)
    assert (checked.beginning, checked.doubled) == ((EOS, "<eos>"), 1)
    told = "1 prompt: the tokenizer adds <eos> to a text that has it already"
    assert summary(checked, plan)["begin twice"] == told
    checked = check_rows(job.rows([{"prompt": "<eos><eos>a"}]), job.tokenizer, config, pytest.fail)
    assert (checked.beginning, checked.doubled) == (None, 0)


def batch(*prompts):
    """Rows of a batch."""
    bodies = ({"prompt": prompt, "max_tokens": 5} for prompt in prompts)
    return requests({"custom_id": f"{index}", "body": body} for index, body in enumerate(bodies))


def test_rows_of_several_prompts(check):
    """Every prompt counts; if one cannot be served, the row is a single failure and none of it counts."""
    checked, failed = check(rows=batch(["a", "bcd"], ["a", "x" * 100, "x" * 100], [[1], [VOCAB]], "good"))
    assert [(row.index, row.error.code) for row in failed] == [(1, "prompt_too_long"), (2, "invalid_token_id")]
    assert list(checked.prompt_lens) == [1, 3, 4]
    assert list(checked.output_lens) == [5, 5, 5]


def test_the_summary_counts_rows(check, plan):
    """Good and bad rows must add up to the lines of the file."""
    checked, _ = check(rows=batch(["a", "bcd"], ["a", "x" * 100], "good"))
    assert summary(checked, plan)["rows"] == "2 can be served, 1 cannot (1 prompt_too_long)"


def test_the_summary_of_several_prompts_a_row(check, plan):
    """A middle of all prompts by the number of rows was too low: here, that of the shortest one."""
    checked, _ = check(rows=batch(["a", "bcd", "x" * 10]))
    assert summary(checked, plan)["prompt tokens"] == "14 (1 to 10 a prompt, median 3, p90 10)"


def test_the_summary(check, plan):
    """Figures worked out by hand: blocks of 16 tokens, with a spare one for each of the two longest rows."""
    lines = [{"prompt": "x" * n, "max_tokens": m} for n, m in ((1, 4), (20, 12), (40, 8), (3, 2))]
    checked, _ = check([*lines, {}])
    config = plan.source.config
    block = 2 * config.num_layers * config.num_kv_heads * 16 * config.head_dim * 4
    rows = summary(checked, plan)
    assert rows["rows"] == "4 can be served, 1 cannot (1 missing_prompt)"
    assert rows["prompt tokens"] == "64 (1 to 40 a prompt, median 3, p90 40)"
    assert rows["output tokens"] == "at most 26 (2 to 12 a prompt, median 4, p90 12)"
    assert rows["KV cache"].startswith(f"at most {((3 + 1) + (2 + 1)) * block / 2**20:.1f} MiB for the 2 longest rows")
    bars = [rows[f"prompts of {name} tokens"] for name in ("1-1", "2-3", "4-7", "16-31", "32-63")]
    one = "1 " + "#" * 40
    assert bars == [one, one, "0", one, one]
    floor = find_floor(config, 4, [1, 20, 40, 3], [4, 12, 8, 2], max_num_seqs=2, rates=RATES)
    assert rows["time"] == time_range(floor, "cpu")


def test_the_range_of_time():
    """A floor alone was read as an estimate: 13 to 15 s were promised, and the run took 47."""
    floor = Floor(prefill_s=1.7, decode_s=10.3)
    rest = " if all reach their limits; the hardware's limit is 12 s"
    assert time_range(floor, "cuda") == f"3 to 15 s to start, then 2.0 s if answers end at once, 48 s{rest}"
    assert time_range(floor, "cpu") == f"1 to 8 s to start, then 2.4 s if answers end at once, 80 s{rest}"


def test_the_time_of_a_tiny_job():
    """It was 1 s if answers end at once, 9 s if they reach their limits, but only the start made the difference."""
    told = "1 to 8 s to start, then under 0.1 s if answers end at once, 0.5 s if all reach their limits"
    assert time_range(Floor(prefill_s=0.02, decode_s=0.06), "cpu") == f"{told}; the hardware's limit is under 0.1 s"


def test_the_time_of_embeddings():
    """Nothing is generated: no answer can end early."""
    assert time_range(Floor(prefill_s=1.7, decode_s=0), "cuda") == (
        "3 to 15 s to start, then 2.0 s to 6.8 s; the hardware's limit is 1.7 s"
    )


def test_the_summary_of_a_model_with_states(check):
    """They lie beside the KV cache, whose blocks are those of a quarter of the layers."""
    checked, _ = check([{"prompt": "x", "max_tokens": 4}] * 3)
    rows = summary(checked, plan_of("qwen3.5-9b", "bfloat16"))
    assert (
        rows["states"]
        == f"{2 * 51_904_512 / 2**20:.1f} MiB for 2 rows at once, 0.19 GiB for 4 snapshots of shared beginnings"
    )
    assert rows["KV cache"].startswith(f"at most {2 * 2 * 16 * 32_768 / 2**20:.1f} MiB")


def test_the_summary_of_a_model_with_windows(check):
    """Layers with a window counted whole sequences: six times the memory that such rows take."""
    plan = plan_of("gemma-3-4b", "bfloat16", max_num_batched_tokens=512)
    checked, _ = check([{"prompt": "x" * 5, "max_tokens": 4}] * 2)
    checked.prompt_lens[:] = array("L", [8000, 8000])
    rows = summary(checked, plan)
    windows, layer = plan.source.config.kv_windows, 2 * 16 * 4 * 256 * 2
    whole, window = 2 * (8004 // 16 + 2), 2 * (1024 // 16 + 2) + 512 // 16 + 2
    blocks = windows.count(0) * whole + windows.count(1024) * window
    assert windows.count(0) + windows.count(1024) == 34
    assert rows["KV cache"].startswith(f"at most {blocks * layer / 2**30:.2f} GiB for the 2 longest rows")


def test_a_file_without_a_good_row(check, plan):
    """The median of no rows must not raise."""
    checked, failed = check([{}, {}])
    assert _summary(checked, plan, 16, RATES) == [("rows", "0 can be served, 2 cannot (2 missing_prompt)")]
    assert len(failed) == 2
