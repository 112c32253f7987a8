"""``rosebatch generate`` from files to files, in this process."""

import io
import json
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

import rosebatch.launch.launch
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers import reference
from tests.helpers.command_errors import failed_rows, require_error
from tests.job.lines import codes

CHAT = [{"role": "user", "content": "hi"}]


def test_results_on_stdout(generate):
    """stdout has one line for each row and nothing else; exit code 0 means that all rows completed."""
    result = generate([{"prompt": "hello", "id": 5}, {"messages": CHAT, "id": "c"}], "--max-tokens", 4)
    assert (result.code, result.err) == (0, "")
    assert [list(row) for row in result.rows] == [["id", "index", "text", "finish_reason", "usage"]] * 2
    assert [row["id"] for row in result.rows] == [5, "c"]
    assert [row["usage"]["prompt_tokens"] for row in result.rows] == [5, 5]
    assert [row["usage"]["completion_tokens"] for row in result.rows] == [4, 4]


def test_greedy_tokens_are_transformers_own(generate, model_folder):
    """From end to end, tokenizer, template, engine and stop tokens give what transformers gives."""
    lines = [{"prompt": "hello"}, {"messages": CHAT}, {"prompt_token_ids": [7]}, {"prompt": "hello there"}]
    rows = generate(lines, "--max-tokens", 12, "--return-token-ids", "--dtype", "float32", "--block-size", 4).rows
    tokenizer = Tokenizer.load(model_folder)
    prompts = [*tokenizer.encode(["hello"]), *tokenizer.encode_chats([CHAT]), [7], *tokenizer.encode(["hello there"])]
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    expected, _ = reference.generate(model, prompts, 12)
    assert [row["token_ids"] for row in rows] == expected
    assert [row["text"] for row in rows] == [tokenizer.decode(ids) for ids in expected]


def test_failed_rows(generate):
    """The exit code is 3, the message names the line in the file, and the rows around it are served."""
    result = generate([{"id": text[0], "prompt": text, "max_tokens": 1} for text in ("a", "x" * 400, "b")])
    assert result.code == 3
    assert codes(result.rows) == [None, "prompt_too_long", None]
    assert result.rows[1]["error"]["message"].startswith("line 2: ")


def test_to_jsonl(generate, tmp_path):
    """The file has what stdout would have; no other file is left beside it."""
    lines = [{"prompt": "hello", "max_tokens": 3}, {"prompt": ""}]
    shown = generate(lines)
    result = generate(lines, "-o", tmp_path / "out.jsonl")
    assert (result.code, result.out, result.err) == (3, "", failed_rows())
    assert (tmp_path / "out.jsonl").read_text() == shown.out
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.jsonl.run", "in.jsonl", "out.jsonl"]


def test_parquet_to_parquet(cli, model_folder, tmp_path):
    """All columns are carried with their types, followed by typed results."""
    table = pa.table({"prompt": ["a", None], "score": pa.array([1, None], pa.int8()), "max_tokens": [2, 2]})
    pq.write_table(table, tmp_path / "in.parquet")
    result = cli("generate", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet", "-q", "--model", model_folder)
    assert (result.code, result.out, result.err) == (3, "", failed_rows())
    written = pq.read_table(tmp_path / "out.parquet")
    results = ["index", "text", "finish_reason", "usage", "error"]
    assert written.column_names == ["prompt", "score", "max_tokens", *results]
    assert written.select(table.column_names).equals(table)
    assert written.column("index").to_pylist() == [0, 1]
    good, bad = written.to_pylist()
    assert (good["usage"]["completion_tokens"], good["error"]) == (2, None)
    way = "--prompt-column or --prompt-template says which fields have it"
    message = f"row 2: expected one of prompt, messages, prompt_token_ids; got none; {way}"
    assert bad["error"] == {"code": "missing_prompt", "message": message}


def test_jsonl_to_parquet_and_back(generate, cli, model_folder, tmp_path):
    """One run's results are the next one's input: old results are refused, or kept beside the new ones."""
    generate([{"prompt": "a", "id": 1, "max_tokens": 2, "kept": "a"}, {"prompt": "", "id": 2}], "-o", tmp_path / "1.pq")
    first = pq.read_table(tmp_path / "1.pq")
    assert first.column_names == ["id", "kept", "index", "text", "finish_reason", "usage", "error"]
    again = first.append_column("prompt", pa.array(["x", "y"]))
    pq.write_table(again, tmp_path / "2.pq")
    command = ("generate", tmp_path / "2.pq", "-q", "--model", model_folder, "--max-tokens", 1)
    require_error(cli(*command), 2, "too: index, text, finish_reason, usage, error. Give --result-column NAME")
    result = cli(*command, "--result-column", "again")
    assert result.code == 0
    rows = [json.loads(line) for line in result.out.split("\n")[:-1]]
    assert [list(row) for row in rows] == [[*again.column_names, "again"]] * 2
    assert [list(row["again"]) for row in rows] == [["index", "text", "finish_reason", "usage"]] * 2


def test_stdin(cli, model_folder, monkeypatch):
    """``-`` reads JSONL from a pipe."""
    stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt":"a","max_tokens":1}\n\n{"prompt":"b","max_tokens":1}'))
    monkeypatch.setattr(sys, "stdin", stdin)
    result = cli("generate", "-", "--model", model_folder)
    assert result.code == 0
    assert [json.loads(line)["index"] for line in result.out.split("\n")[:-1]] == [0, 1]
    assert "2 completed, 0 failed" in result.err


def test_an_empty_file(generate):
    """A file without rows is not a failure."""
    result = generate([])
    assert (result.code, result.out, result.err) == (0, "", "")


EMPTY = {"in.jsonl": "", "blank.jsonl": "\n\n", "in.json": "[]", "in.csv": "prompt\n"}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("command", ["generate", "embed"])
def test_an_input_without_rows_loads_no_model(cli, model_folder, tmp_path, monkeypatch, command, name):
    """The model was loaded first, for minutes; then there was nothing to do."""
    monkeypatch.setattr(rosebatch.launch.launch, "load_engine", None)
    (tmp_path / name).write_text(EMPTY[name])
    output, report = tmp_path / "out.jsonl", tmp_path / "r.json"
    result = cli(command, tmp_path / name, "--model", model_folder, "-o", output, "--report", report)
    told = f"rosebatch: {tmp_path / name} has no rows: the output is empty; no report is written\n"
    assert (result.code, result.out, output.read_bytes()) == (0, "", b"")
    assert result.err.endswith(told) and not report.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".out.jsonl.run", name, "out.jsonl"])


def test_a_stdin_without_rows_loads_no_model(cli, model_folder, monkeypatch):
    """As a file without rows."""
    monkeypatch.setattr(rosebatch.launch.launch, "load_engine", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    result = cli("generate", "-", "--model", model_folder)
    assert (result.code, result.out) == (0, "") and result.err.endswith("- has no rows: the output is empty\n")


def test_the_report_on_stderr(cli, model_folder, tmp_path):
    """On stdout it would be among the results."""
    (tmp_path / "in.jsonl").write_text('{"prompt":"a"}\n{}\n')
    result = cli("generate", tmp_path / "in.jsonl", "--model", model_folder, "--max-tokens", 2, "--no-prefix-cache")
    assert result.code == 3
    assert len(result.out.split("\n")[:-1]) == 2
    first, second, *_ = result.err.splitlines()
    assert first.startswith(f"rosebatch: {model_folder.name} fits: ") and second.startswith("Throughput: ")
    told = {"requests: 1 completed, 1 failed (1 missing_prompt)", "finished by: 1 length", "output tokens: 2"}
    told |= {"prompt tokens: 1 (0.0% from the prefix cache)", "switched off: prefix-cache"}
    assert told <= {*result.err.splitlines()}


def test_the_report_as_json(generate, model_folder, tmp_path):
    """It holds the input's counts, the decisions and the results."""
    lines = [{"prompt": "hello there", "max_tokens": 3}] * 2 + [{}]
    flags = ["--max-num-seqs", 1, "--block-size", 4, "--kv-cache-memory", "64KiB", "--dtype", "float32"]
    reports = ["--report", tmp_path / "report.json", "--report", tmp_path / "report.html"]
    result = generate(lines, *reports, "--no-chunked-prefill", *flags)
    assert (result.code, result.err) == (3, failed_rows())
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    report = json.loads((tmp_path / "report.json").read_text())
    expected = {"requests": 3, "completed": 2, "failed": 1, "errors": {"missing_prompt": 1}, "preemptions": 0}
    expected |= {"prompt_tokens": 22, "cached_tokens": 8, "output_tokens": 6, "max_running": 1}
    expected |= {"finish_reasons": {"length": 2}}
    assert {name: report[name] for name in expected} == expected
    assert set(report["startup_s"]) == {"import", "load", "first token"}
    assert set(report["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    engine = report["engine"]
    block_bytes = 2 * 2 * 2 * 8 * 4 * 4
    expected = {"model": model_folder.name, "load_format": "auto", "device": "cpu", "dtype": "float32"}
    expected |= {"max_model_len": 256, "max_num_seqs": 1, "block_size": 4}
    expected |= {"kv_cache_blocks": 64 * 1024 // block_bytes, "kv_cache_bytes": 64 * 1024}
    assert {name: engine[name] for name in expected} == expected
    assert (engine["toggles"]["chunked_prefill"], engine["toggles"]["prefix_cache"]) == (False, True)


def test_a_lines_own_sampling_wins_over_flags(generate):
    """Flags apply only to lines without the field."""
    lines = [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}, {"prompt": "a", "ignore_eos": False}]
    result = generate(lines, "--max-tokens", 5, "--ignore-eos")
    assert [row["usage"]["completion_tokens"] for row in result.rows][:2] == [5, 2]


def test_sampling_flags_reach_the_rows(generate):
    """Each flag has its effect: top_k 1, top_p near 0 and min_p 1 are greedy, temperature alone is not."""
    lines = [{"prompt": "hello", "seed": 5, "ignore_eos": True}]

    def text(*flags):
        return generate(lines, "--max-tokens", 12, *flags).rows[0]["text"]

    greedy, sampled = text(), text("--temperature", 1.5)
    assert sampled != greedy
    assert text("--temperature", 0) == greedy
    for flags in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]):
        assert text("--temperature", 1.5, *flags) == greedy
    assert text("--temperature", 1.5, "--top-k", -1, "--top-p", 1, "--min-p", 0) == sampled


def test_stop_flags(generate):
    """The flag may be repeated; the match that comes first in the text counts."""
    whole = generate([{"prompt": "hello"}], "--max-tokens", 20, "--ignore-eos").rows[0]["text"]
    second, third = whole[5:7], whole[9:11]
    assert whole.find(second) > 0
    result = generate([{"prompt": "hello"}], "--max-tokens", 20, "--ignore-eos", "--stop", third, "--stop", second)
    assert result.rows[0]["text"] == whole[: min(whole.find(second), whole.find(third))]
    assert result.rows[0]["finish_reason"] == "stop"


def test_rows_do_not_depend_on_each_other(generate):
    """With --seed a sampled row has the same tokens alone, in the file and in the file reversed, with any limits."""
    lines = [{"prompt": f"row {i % 5}", "id": i, "max_tokens": 5 + i} for i in range(12)]
    flags = ["--temperature", 1, "--seed", 3, "--return-token-ids"]

    def token_ids(lines, *more):
        rows = generate(lines, *flags, *more).rows
        return {row["id"]: row["token_ids"] for row in rows}

    together = token_ids(lines)
    assert len({tuple(ids) for ids in together.values()}) == 12
    assert token_ids(lines[::-1]) == together
    assert token_ids(lines[7:8]) == {7: together[7]}
    limits = ["--max-num-seqs", 3, "--max-num-batched-tokens", 4, "--block-size", 2, "--kv-cache-memory", "16KiB"]
    assert token_ids(lines, *limits) == together
    assert generate(lines, *flags).out == generate(lines, *flags).out


@pytest.mark.parametrize("sampling", [["--seed", 4], []], ids=["seed", "no-seed"])
def test_repeated_prompts(generate, sampling):
    """Without --seed equal lines give different answers, with it the same one."""
    rows = generate([{"prompt": "a"}] * 6, "--temperature", 1.5, "--max-tokens", 8, *sampling).rows
    assert len({row["text"] for row in rows}) == (1 if sampling else 6)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-hp1"])
def test_a_model_of_shapes_alone(model, cli, toy_toml, tmp_path):
    """Without a tokenizer token ids go in and out, and rows with text fail."""
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids":[1,2],"max_tokens":3}\n{"prompt":"a"}\n')
    flags = ["--model", toy_toml.with_name(f"{model}.toml"), "--load-format", "dummy", "--return-token-ids", "--quiet"]
    result = cli("generate", tmp_path / "in.jsonl", *flags)
    good, bad = map(json.loads, result.out.split("\n")[:-1])
    assert (result.code, good["text"], len(good["token_ids"]), bad["error"]["code"]) == (3, None, 3, "no_tokenizer")


def test_random_weights_for_a_folder(generate):
    """The folder's tokenizer is still used."""
    result = generate([{"prompt": "a"}], "--load-format", "dummy", "--max-tokens", 3)
    assert result.code == 0
    assert isinstance(result.rows[0]["text"], str)


def test_from_url_to_url(cli, model_folder, tmp_path, monkeypatch):
    """Results are complete at the URL, and nothing stays in the working directory."""
    monkeypatch.chdir(tmp_path)
    with fsspec.open("memory://bucket/in.jsonl", "wb") as file:
        file.write(b'{"prompt":"a","max_tokens":2}\n{}\n')
    for name in ("out.jsonl", "out.parquet"):
        command = ["generate", "memory://bucket/in.jsonl", "-o", f"memory://bucket/{name}", "--model", model_folder]
        assert cli(*command, "-q", "--resume").code == 3
    with fsspec.open("memory://bucket/out.jsonl", "rb") as file:
        assert [row["index"] for row in map(json.loads, file)] == [0, 1]
    with fsspec.open("memory://bucket/out.parquet", "rb") as file:
        assert pq.read_table(file).column("index").to_pylist() == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_parquet_files(cli, model_folder, tmp_path):
    """All files of the folder become one output file."""
    (tmp_path / "data").mkdir()
    for part in range(3):
        pq.write_table(pa.table({"prompt": ["a", "b"], "part": [part, part]}), tmp_path / "data" / f"{part}.parquet")
    out = tmp_path / "out.parquet"
    assert cli("generate", tmp_path / "data", "-o", out, "--model", model_folder, "--max-tokens", 2, "-q").code == 0
    table = pq.read_table(out)
    assert table.column("part").to_pylist() == [0, 0, 1, 1, 2, 2]
    assert table.column("index").to_pylist() == list(range(6))
