"""What only a separate process can show: imports, pipes, and the streams of the operating system."""

import json

import pytest

BENCH = (
    "$PY -m rosebatch bench --model $MODEL --load-format dummy --json"
    " --input-len 4 --output-len 2 --num-prompts 1 --repeats 1"
)


def test_parsing_flags_imports_nothing_heavy(process):
    """``--help`` and a misspelt flag answer at once; importing torch takes seconds."""
    heavy = ("torch", "transformers", "pyarrow", "numpy", "tokenizers", "triton")
    code = f"import sys, rosebatch.cli.app; print([name for name in {heavy} if name in sys.modules])"
    result = process('$PY -c "$CODE"', CODE=code)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_help_and_mistakes_import_nothing_heavy(process):
    """What typer does to print help or an error must import nothing heavy either."""
    helps = [["--help"], *([command, "--help"] for command in ("generate", "check", "bench", "cache"))]
    calls = [*helps, ["generate", "--help-all"], ["generate", "x", "--max-tokens", "abc"]]
    code = (
        "import sys, rosebatch.cli.app\n"
        f"for args in {calls}:\n"
        "    try: rosebatch.cli.app.main(args)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = process('$PY -c "$CODE"', CODE=code)
    assert result.returncode == 0
    assert result.stdout.count("Usage: ") == len(calls) - 1
    assert result.stderr.count("\n") == 1


def test_a_run_on_a_cpu_imports_what_it_uses(process, toy_toml, tmp_path):
    """Each of these takes 0.05 to 1.5 s of every start, and one import in the wrong place brings it back.

    The bench is for developers: what it needs must neither slow a job down nor break it.
    """
    heavy = (
        "triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers", "jinja2",
        "huggingface_hub", "fsspec", "gguf", "llguidance", "rich", "pandas", "scipy", "pyarrow.dataset", "ray",
        "pyarrow.compute",
        "rosebatch.launch.driver", "rosebatch.launch.group", "rosebatch.job.workers", "rosebatch.llm",
        "rosebatch.bench",
    )  # fmt: skip
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids":[1,2,3],"max_tokens":2}\n')
    code = (
        "import sys, rosebatch.cli.app\n"
        "model = [*sys.argv[1:], '--load-format', 'dummy']\n"
        "def run(*command):\n"
        "    try: rosebatch.cli.app.main([command[0], *model, *command[1:]])\n"
        "    except SystemExit as end: assert not end.code\n"
        "run('generate', '--device', 'cpu', '-q')\n"
        "assert 'rosebatch.job.run' in sys.modules\n"
        f"sys.stderr.write(str([name for name in {heavy} if name in sys.modules]))\n"
        "run('check')\n"
        "sys.stderr.write(str([name for name in sys.modules if name.startswith('rosebatch.bench')]))\n"
    )
    result = process('$PY -c "$CODE" $IN --model $MODEL', CODE=code, IN=tmp_path / "in.jsonl", MODEL=toy_toml)
    assert json.loads(result.stdout.splitlines()[0])["finish_reason"] == "length"
    assert result.stderr == "[][]"


def test_a_pipe_from_end_to_end(process, toy_toml):
    """stdout has the results alone, in order, stderr the report, and the exit code is right."""
    lines = ['{"prompt_token_ids":[1,2,3],"max_tokens":2}', "{", '{"prompt_token_ids":[4],"max_tokens":2}']
    command = 'printf "$LINES_IN" | $PY -m rosebatch generate - --model $MODEL --load-format dummy'
    result = process(command, LINES_IN="\n".join(lines), MODEL=toy_toml)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row.get("finish_reason") for row in rows] == ["length", None, "length"]
    assert rows[1]["error"]["code"] == "invalid_json"
    fit, line, *_ = result.stderr.splitlines()
    assert fit.startswith("rosebatch: tiny-llama fits: ") and line.startswith("Throughput: ")
    assert "Traceback" not in result.stderr
    assert result.returncode == 3


@pytest.mark.thorough
def test_a_reader_that_goes_away(process, toy_toml):
    """``| head -1`` must give no traceback and no "Exception ignored", but an exit code of failure."""
    command = (
        "set -o pipefail; yes '{}' | head -100000"
        " | $PY -m rosebatch generate - --model $MODEL --load-format dummy -q | head -1 | cut -c1-10"
    )
    result = process(command, MODEL=toy_toml)
    assert result.stdout == '{"index":0\n'
    assert result.stderr == ""
    assert result.returncode not in (0, 3)


@pytest.mark.thorough
def test_a_reader_that_goes_away_before_the_report_of_bench(process, toy_toml):
    """Python writes buffered output at its end, when nobody can catch the error."""
    result = process(f"set -o pipefail; {BENCH} | true", MODEL=toy_toml)
    (line,) = result.stderr.splitlines()
    assert line.startswith("rosebatch: tiny-llama fits: ")


@pytest.mark.thorough
def test_a_report_that_cannot_be_written(process, toy_toml):
    """The process must not leave the writing to Python's end, which would hide the error."""
    result = process(f"{BENCH} > /dev/full", MODEL=toy_toml)
    fit, line = result.stderr.splitlines()
    assert (fit[:28], line) == (
        "rosebatch: tiny-llama fits: ",
        "rosebatch: error: stdout, or a temporary file: No space left on device",
    )
    assert result.returncode == 1


@pytest.mark.thorough
def test_the_order_of_columns_does_not_follow_the_hash_seed(process, tmp_path):
    """Each process orders sets of strings anew: the bytes must not depend on that."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from rosebatch.io.parquet import write_parquet\n"
        "row = json.dumps({f'column_{i}': i for i in range(12)} | {'index': 0})\n"
        "write_parquet(Path(sys.argv[1]), lambda: iter([row.encode()]))"
    )
    outputs = []
    for seed in (1, 2):
        out = tmp_path / f"{seed}.parquet"
        result = process('$PY -c "$CODE" $OUT', CODE=code, OUT=out, PYTHONHASHSEED=seed)
        assert (result.returncode, result.stderr) == (0, "")
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]


def test_little_is_imported_before_signals_are_handled(process):
    """Ctrl-C printed a traceback of an import: half of the time until then went into ``typing``."""
    code = "import sys, rosebatch.__main__; print(sorted({'typing', 're', 'importlib'} & set(sys.modules)))"
    result = process('$PY -S -c "$CODE"', CODE=code)
    assert (result.stdout, result.stderr) == ("[]\n", "")
