"""Traces: what is read, which prompts share a beginning, and how files of others are told apart."""

import json
from itertools import pairwise
from runpy import run_path

import pytest

from rosebatch.bench.trace import equal_steps, load_trace
from rosebatch.bench.workload import Workload
from rosebatch.core.errors import FlagError, UserError
from tests.helpers.checkout import ROOT
from tests.helpers.json_lines import write_lines

LINES = [(5.0, 3, 2), (2.5, 7, 1), (9.25, 1, 4)]


def block_lines(size, unit=1.0):
    """Requests of 2.5 blocks, all of which begin with block 0; the second shares two of the first."""
    ids = [(0, 1, 2), (0, 1, 3), (0, 4)]
    lengths = [2 * size + size // 2, 2 * size + size // 2, 2 * size]
    return [
        {"timestamp": unit * at, "input_length": n, "output_length": 3, "hash_ids": each, "chat_id": at, "type": "text"}
        for at, (n, each) in enumerate(zip(lengths, ids, strict=True))
    ]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl"])
def test_requests_by_time(tmp_path, name):
    """Lines need not be in order, the first one need not be at zero, and other columns do not matter."""
    path = tmp_path / name
    if name.endswith(".csv"):
        rows = "".join(f"{at},x,{n},{m}\n" for at, n, m in LINES)
        path.write_text("\ufefftimestamp,model,input_length,output_length\n" + rows, encoding="utf-8")
    else:
        lines = [{"timestamp": at, "model": "x", "input_length": n, "output_length": m} for at, n, m in LINES]
        write_lines(path, lines)
    found = load_trace(path, 1000)
    assert (found.name, found.shares_prefixes) == ("trace", False)
    assert list(found.times) == [0.0, 2.5, 6.75]
    workload = found.workload(1)
    assert (workload.prompt_lens, workload.output_lens) == ([7, 3, 1], [1, 2, 4])
    assert found.workload(1) == workload
    assert found.workload(2).prompts != workload.prompts, "a second run would find its prompts in the prefix cache"
    assert list(load_trace(path, 1000, limit=2).times) == [0.0, 2.5]
    assert {token for prompt in workload.prompts for token in prompt} <= set(range(100, 700))


@pytest.mark.parametrize(("size", "unit"), [(16, 1.0), (64, 1.0), (512, 1000.0)])
def test_blocks_that_prompts_share(tmp_path, size, unit):
    """Equal ids are equal tokens. The public collection with blocks of 512 tokens counts milliseconds."""
    found = load_trace(write_lines(tmp_path / "t.jsonl", block_lines(size, unit)), 5000)
    assert found.shares_prefixes
    assert list(found.times) == [0.0, 1.0, 2.0]
    first, second, third = found.workload(1).prompts
    assert [len(each) for each in (first, second, third)] == [2 * size + size // 2] * 2 + [2 * size]
    assert first[: 2 * size] == second[: 2 * size]
    assert first[2 * size :] != second[2 * size :]
    assert first[:size] == third[:size]
    assert first[size : 2 * size] != third[size:]
    assert found.workload(2).prompts[0][:size] != first[:size]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", "", "the trace has no requests"),
        ("t.csv", "timestamp,input_length,output_length\n", "the trace has no requests"),
        ("t.jsonl", "{broken\n", "line 1 is no JSON"),
        ("t.jsonl", '{"timestamp":1,"input_length":3}\n', "line 1: .*output_length"),
        ("t.csv", "timestamp,input_length,output_length\n0,3,4\n1,x,4\n", "line 3: "),
        ("t.jsonl", '{"timestamp":1,"input_length":0,"output_length":1}\n', "line 1: lengths must be at least 1"),
        ("t.csv", "timestamp,input_length,output_length\nnan,3,4\n", "line 2: .* the time finite"),
        ("t.jsonl", '{"timestamp":1,"input_length":9,"output_length":1,"hash_ids":[1,2,3]}\n', "fit no blocks"),
        ("t.jsonl", b"\xff\xfe", "unreadable trace"),
    ],
)
def test_broken_traces(tmp_path, name, content, message):
    """One line for people that names the place."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load_trace(path, 1000)


def test_a_missing_trace(tmp_path):
    """A wrong flag, exit code 2."""
    with pytest.raises(FlagError, match="no such file"):
        load_trace(tmp_path / "none.jsonl", 1000)


def test_equal_steps():
    """A request each so many milliseconds is a trace too."""
    workload = Workload([[1], [2], [3]], [4, 5, 6])
    found = equal_steps("x", 0.25, lambda run: workload)
    assert list(found.times) == [0.0, 0.25, 0.5]
    assert found.workload(3) is workload


def test_the_example():
    """The trace beside its script is what the script makes: bursts, long tails, shared beginnings."""
    folder = ROOT / "examples"
    made = list(run_path(str(folder / "make_trace.py"))["requests"](40, 4.0, 480, 0))
    lines = [json.dumps(line, separators=(",", ":")) for line in made]
    assert lines == (folder / "trace.jsonl").read_text().splitlines()
    found = load_trace(folder / "trace.jsonl", 5000)
    prompts = found.workload(1).prompts
    assert len(prompts) == 40
    assert len({tuple(prompt[:64]) for prompt in prompts}) < 30, "many begin alike"
    waits = [later - earlier for earlier, later in pairwise(found.times)]
    assert max(waits) > 5 * sorted(waits)[len(waits) // 2], "bursts, and pauses between them"
    workload = found.workload(1)
    assert max(map(sum, zip(workload.prompt_lens, workload.output_lens, strict=True))) <= 480
