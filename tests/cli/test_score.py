"""``rosebatch score``: from files of prompts and continuations to files of scores."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes

ROWS = [
    {"id": "labels", "prompt": "abc", "continuations": ["d", "e"], "gold": 1},
    {"prompt_token_ids": [5, 6, 7], "choices": [[8, 9, 10], [8]]},
    {"prompt": "a whole text"},
    {"prompt_token_ids": [5, 6, 7], "logprob_token_ids": [9, 8]},
    {"messages": [{"role": "user", "content": "a"}], "continuations": ["yes"]},
]
BAD = [
    {"prompt": "a", "continuations": []},
    {"prompt": "a", "continuations": ["b", ""]},
    {"prompt": "a", "continuations": ["b"], "choices": ["c"]},
    {"prompt": "a", "continuations": "b"},
    {"prompt": "a"},
    {"prompt": "a", "logprob_token_ids": [300]},
    {"prompt": "x" * 300, "continuations": ["b"]},
    {"prompt": "a", "continuations": ["b"] * 1025},
]
CODES = [*["invalid_field"] * 4, "nothing_to_score", "invalid_token_id", "prompt_too_long", "invalid_field"]


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", [*ROWS, *BAD])


@pytest.fixture
def score(cli, source, model_folder, tmp_path):
    """Runs ``score`` on the source; gives the output's path."""

    def run(name="out.jsonl", *flags, code=3):
        target = tmp_path / name
        result = cli("score", source, "-o", target, "--model", model_folder, "--dtype", "float32", *flags)
        assert result.code == code, result.err
        return target

    return run


def test_scores_are_those_of_transformers(score, model_folder):
    """The tokens of a prompt, of another continuation, or none of the context would be other numbers."""
    rows = read_lines(score())
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def right(tokens, start):
        with torch.inference_mode():
            every = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        own = [
            (every[at - 1, tokens[at]].item(), every[at - 1].argmax() == tokens[at]) for at in range(start, len(tokens))
        ]
        return {
            "logprob": pytest.approx(sum(value for value, _ in own), abs=2e-5),
            "num_tokens": len(own),
            "is_greedy": all(greedy for _, greedy in own),
        }

    assert rows[1] == {
        "index": 1,
        "scores": [right([5, 6, 7, 8, 9, 10], 3), right([5, 6, 7, 8], 3)],
        "usage": {"prompt_tokens": 3, "scored_tokens": 4},
    }
    assert rows[3]["scores"] == [right([5, 6, 7, 9], 3), right([5, 6, 7, 8], 3)]
    assert rows[0] == {"id": "labels", "gold": 1, "index": 0, "scores": rows[0]["scores"], "usage": rows[0]["usage"]}
    assert [len(row["scores"]) for row in rows[: len(ROWS)]] == [2, 2, 1, 2, 1]
    assert rows[2]["scores"][0]["num_tokens"] == len("a whole text") - 1


def test_bad_rows_are_error_rows(score):
    """Each keeps its place and says what is wrong; the others are served."""
    rows = read_lines(score())
    assert codes(rows) == [*[None] * len(ROWS), *CODES]


def test_a_table(score):
    """Lists of structs, and null for a row that failed."""
    table = pq.read_table(score("out.parquet"))
    struct = pa.struct([("logprob", pa.float64()), ("num_tokens", pa.int64()), ("is_greedy", pa.bool_())])
    assert table.schema.field("scores").type == pa.list_(struct)
    lines = read_lines(score("again.jsonl"))
    assert table["scores"].to_pylist() == [line.get("scores") for line in lines]


def test_a_chat_is_answered_by_continuations(score, source):
    """Scored after the user's turn, and not as the assistant's; a chat that is scored itself has no open answer."""
    chat = [{"role": "user", "content": "a"}]
    write_lines(
        source, [{"messages": chat, "continuations": ["yes"], "add_generation_prompt": x} for x in (None, True)]
    )
    first, second = read_lines(score(code=0))
    assert first["scores"] == second["scores"]
    write_lines(source, [{"messages": chat}, {"messages": chat, "add_generation_prompt": True}])
    first, second = (row["usage"]["scored_tokens"] for row in read_lines(score("b.jsonl", code=0)))
    assert first < second


def test_check_of_rows_to_score(cli, source, model_folder):
    """Rows of ``score`` passed for completions of 512 tokens."""
    result = cli("check", source, "--model", model_folder, "--score")
    assert result.code == 3
    assert f"rows: {len(ROWS)} can be served, {len(BAD)} cannot" in result.out
    assert "output tokens" not in result.out
    require_error(cli("check", source, "--model", model_folder, "--score", "--embed"), 2, "cannot be used together")


def test_no_flags_of_completions(cli, source, model_folder):
    """A temperature would change nothing."""
    require_error(cli("score", source, "--model", model_folder, "--temperature", 1), 2, "--temperature")


def test_continuations_of_csv(cli, model_folder, tmp_path):
    """A cell with a list was a text, which failed its row."""
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    rows = [{"prompt": "abc", "continuations": ["d", "e"]}, {"prompt": "abc", "logprob_token_ids": [100, 101]}]
    source.write_text('prompt,continuations,logprob_token_ids\nabc,"[""d"", ""e""]",\nabc,,"[100, 101]"\n')
    assert cli("score", source, "-o", target, "--model", model_folder, "--columns", "").code == 0
    found = read_lines(target)
    assert cli("score", write_lines(tmp_path / "in.jsonl", rows), "-o", target, "--model", model_folder).code == 0
    assert found == read_lines(target)
