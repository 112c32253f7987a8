"""Inputs of runs that are killed and resumed: rows of all kinds, which finish in another order than they began.

Each function writes an input into a folder, and returns its path and the options of ``killable_job.main``.
"""

import csv
import gzip
import random
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.json_lines import write_lines
from tests.job.tool_templates import tool

ROWS = 100
_NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}


def write_jsonl(folder):
    """Rows of all kinds, greedy and sampled, with ids, and one that is no JSON."""
    rng = random.Random(0)
    lines = [
        {**_text(i), "max_tokens": rng.randint(1, 60), "temperature": i % 2, "id": f"id {i}", "i": [i]}
        for i in range(ROWS)
    ]
    for i in range(0, ROWS, 10):
        lines[i + 3] |= {"n": 2 + i % 3, "logprobs": 1, "max_tokens": rng.randint(1, 15)}
        lines[i + 6] |= {"structured_outputs": {"regex": "[0-9]{1,9}(é|!)"}, "n": 1 + i % 2}
    lines[7], lines[8] = {"prompt": ""}, {"prompt": "x of line 8", "id": "id 3"}
    path = _save(folder, lines)
    path.write_text(path.read_text() + "{broken\n")
    return path, {}


def write_parquet(folder):
    """Rows with types that JSON lacks, and an output folder of several files."""
    rng = random.Random(3)
    rows = [{**_text(i), "max_tokens": rng.randint(1, 60), "day": date(2024, 1, 1 + i % 28)} for i in range(ROWS)]
    rows[7]["prompt"] = ""
    return _save_table(folder, rows), {"rows_per_file": 22}


def write_gzip(folder):
    """The rows of ``write_jsonl``, compressed in two members; errors in a compressed file of their own."""
    path, _ = write_jsonl(folder)
    lines = path.read_bytes()
    packed = folder / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(lines[:2999], mtime=0) + gzip.compress(lines[2999:], mtime=0))
    return packed, {"errors": "failed.jsonl.gz"}


def write_csv(folder):
    """The rows of ``write_jsonl``, whose nested and missing values become cells."""
    return write_jsonl(folder)


def write_template(folder):
    """CSV whose columns become prompts and settings, with line breaks and quotes in cells, and a cell that is empty."""
    rng = random.Random(7)
    path = folder / "in.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "note", "max_tokens"])
        rows.writerows([f"id {i}", f'line {i},\n"{i % 50}"\r\né' * (i != 7), rng.randint(1, 60)] for i in range(ROWS))
    return path, {"prompt_template": "Sum up: {note}", "keep_prompt": True}


def write_documents(folder):
    """Questions to documents that come again far behind: rows are begun in another order than the input's."""
    rng = random.Random(8)
    lines = [
        {"prompt": f"{i % 9} " * 60 + f"row {i}", "max_tokens": rng.randint(1, 60), "temperature": i % 2, "id": i}
        for i in range(ROWS)
    ]
    return _save(folder, lines), {}


def write_hive(folder):
    """The rows of ``write_jsonl`` in files whose folders have keys, which the prompts name."""
    path, _ = write_jsonl(folder)
    lines = path.read_text().splitlines(keepends=True)[:-1]
    for day in range(4):
        part = folder / f"in/lang=a%2Fb/day={day}/a.jsonl"
        part.parent.mkdir(parents=True)
        part.write_text("".join(lines[day::4]))
    return path.parent / "in", {"prompt_template": "{lang} of {day}: {prompt}", "rows_per_file": 22, "columns": "day"}


def write_openai(folder):
    """Chats and completions, some of which fail, with errors in a file of their own."""
    rng = random.Random(4)
    lines = []
    for i in range(ROWS):
        body = {**_text(i), "max_tokens": rng.randint(1, 60), "n": 1 + i % 3 // 2}
        if i % 4 == 0:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if i % 40 == 3:
            body["stream"] = True
        kind = "completions" if i % 4 else "chat/completions"
        lines.append({"custom_id": f"id {i}", "method": "POST", "url": f"/v1/{kind}", "body": body})
    return _save(folder, lines), {}


def write_n(folder):
    """Several completions for every row, greedy and sampled, with log-probabilities."""
    rng = random.Random(5)
    lines = [{**_text(i), "n": 2 + i % 4, "max_tokens": rng.randint(1, 20), "temperature": i % 2} for i in range(ROWS)]
    for line in lines[::7]:
        line["logprobs"] = 2
    return _save(folder, lines), {}


def write_structured(folder):
    """Answers that match patterns, schemas and lists of choices."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    kinds = [{"regex": "[0-9]{1,9}(é|!)"}, {"json": schema}, {"choice": ["yes", "no", "perhaps"]}]
    lines = [
        {**_text(i), "structured_outputs": kinds[i % 3], "n": 1 + i % 2, "max_tokens": 60, "temperature": 1}
        for i in range(ROWS)
    ]
    lines[9]["structured_outputs"] = {"regex": "("}
    return _save(folder, lines), {}


def write_tools(folder):
    """Chats whose answers are calls, thoughts with a budget, or both, beside plain ones."""
    tools = [tool("f", _NUMBER | {"additionalProperties": False})]
    kinds = [
        {"tools": tools, "tool_choice": "required", "max_reasoning_tokens": 5},
        {"chat_template_kwargs": {"thinks": True}, "max_reasoning_tokens": 9},
        {"tools": tools, "parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {},
    ]
    same = {"max_tokens": 90, "temperature": 1}
    lines = [
        {"messages": [{"role": "user", "content": f"row {i}"}], "n": 1 + i % 2, **same, **kinds[i % 4]}
        for i in range(ROWS // 2)
    ]
    return _save(folder, lines), {"form": "hermes"}


def write_responses(folder):
    """Responses with calls, thoughts and forms, beside bad ones."""
    function = {"type": "function", "name": "f", "parameters": _NUMBER | {"additionalProperties": False}}
    kinds = [
        {"tools": [function], "tool_choice": "required", "max_reasoning_tokens": 5},
        {"chat_template_kwargs": {"thinks": True}, "max_reasoning_tokens": 9},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": _NUMBER}}},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"instructions": "Be terse.", "top_logprobs": 1},
    ]
    bodies = [{"input": f"row {i}", "max_output_tokens": 90, "seed": i, **kinds[i % 5]} for i in range(ROWS // 2)]
    lines = [{"custom_id": f"{i}", "url": "/v1/responses", "body": body} for i, body in enumerate(bodies)]
    return _save(folder, lines), {"form": "hermes"}


def write_embeddings(folder):
    """Prompts of all lengths for vectors of several lengths; some rows fail."""
    return _save(folder, _embeddings()), {"task": "embed"}


def write_embedding_tables(folder):
    """The same as Parquet, into a folder."""
    return _save_table(folder, _embeddings()), {"task": "embed", "rows_per_file": 22}


def write_scores(folder):
    """Continuations of prompts, many with the same beginning; prompts alone; some rows fail."""
    rng = random.Random(7)
    lines = [
        {"prompt": f"about {i % 7} " * 9, "continuations": ["x" * rng.randint(1, 30), "y", "z"][: 1 + i % 3], "i": i}
        for i in range(ROWS)
    ]
    lines[7]["prompt"] = ""
    for line in lines[::9]:
        del line["continuations"]
    return _save(folder, lines), {"task": "score"}


def _embeddings():
    rng = random.Random(6)
    lines = [{"prompt": f"line {i} " + "x" * rng.randint(0, 150), "dimensions": 1 + i % 9, "i": i} for i in range(ROWS)]
    lines[7]["prompt"] = ""
    return lines


def _text(i):
    return {"prompt": f"row {i % 50} of line {i}"}


def _save(folder, lines):
    return write_lines(folder / "in.jsonl", lines)


def _save_table(folder, rows):
    path = folder / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
