"""The examples of the README and of ``make demo``."""

import csv
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml
from openai.types.responses import Response
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel

from rosebatch.cli.app import main
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import Row
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.score import Score
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.checkout import environment, python_path
from tests.helpers.forked_jobs import python
from tests.helpers.json_lines import read_lines
from tests.helpers.marks import needs_demo_model
from tests.helpers.small_llama import save_llama, save_tokenizer
from tests.job.tool_templates import TEMPLATES, chat_backend

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = FOLDER / "prompts.jsonl"
TINY = FOLDER.parent / "configs" / "models" / "tiny-llama.toml"
EVALUATE = FOLDER / "evaluate"
ENVIRONMENT = environment()


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("prompts.jsonl", False),
        ("openai_batch.jsonl", True),
        ("responses.jsonl", True),
        ("regression.jsonl", False),
        ("structured_output.jsonl", False),
        ("tools.jsonl", False),
    ],
)
def test_every_example_is_a_good_row(name, is_batch):
    """The first thing that anyone tries must not fail."""
    reader = PromptReader(str(FOLDER / name), {})
    assert reader.is_batch is is_batch
    rows = list(reader)
    assert len(rows) >= 3
    assert [row for row in rows if not isinstance(row, Row)] == []


def test_the_examples_show_each_kind_of_row():
    """A chat, a plain prompt, a stop string, sampling of its own, and a field that is carried."""
    rows = list(PromptReader(str(EXAMPLES), {}))
    assert any(row.messages for row in rows)
    assert any(row.prompt for row in rows)
    assert any(row.sampling.stop for row in rows)
    assert any(row.sampling.seed is not None and not row.sampling.greedy for row in rows)
    assert any(set(row.metadata) - {"id"} for row in rows)
    assert len({row.metadata["id"] for row in rows}) == len(rows)


@pytest.fixture
def bash(tmp_path):
    """Runs a script that calls ``rosebatch``."""
    (tmp_path / "rosebatch").write_text(f'#!/bin/sh\nexec "{python()}" -m rosebatch "$@"\n')
    (tmp_path / "rosebatch").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = ENVIRONMENT | {"PATH": path, "OUT": str(tmp_path / "out"), "FLAGS": "--device cpu"}
    return lambda script: subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
@needs_demo_model
def test_the_pipeline(bash, tmp_path):
    """Exit code 0 where all answers are as expected, 1 where one is not, and what it was."""
    for name in ("pipeline.sh", "regression.jsonl"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    done = bash(tmp_path / "pipeline.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("3 of 3 answers are as expected\n")
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {"answers.jsonl", "report.json", "report.html"}
    # What it makes of another answer, and of rosebatch's exit code, takes no model.
    answers = tmp_path / "out" / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rows[1]["expected"] = "Osaka"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rosebatch").write_text("#!/bin/sh\n")
    done = bash(tmp_path / "pipeline.sh")
    assert done.returncode == 1
    assert "japan: expected 'Osaka', got " in done.stdout
    (tmp_path / "rosebatch").write_text("#!/bin/sh\nexit 3\n")
    done = bash(tmp_path / "pipeline.sh")
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.thorough
@needs_demo_model
def test_the_rows_of_the_readme(tmp_path):
    """Its answer was that of fp32; where the demo model runs in bfloat16, pasted rows got another one."""
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(re.search(r'```\n((?:{"[^\n]*\n){3})```', page)[1])
    command = [python(), "-m", "rosebatch", "generate", str(tmp_path / "prompts.jsonl"), "-q", "--max-tokens", "8"]
    for dtype in ("float32", "bfloat16"):
        answers = subprocess.check_output([*command, "--dtype", dtype], env=ENVIRONMENT, text=True).splitlines()
        assert answers[1] == re.search(r'```\n({"id":"france".*)\n```', page)[1]


@pytest.mark.thorough
@needs_demo_model
def test_compressed_files(bash):
    """Two formats in one folder; the second run knows that the answers are finished, and changes nothing."""
    first, again = bash(FOLDER / "compressed.sh"), bash(FOLDER / "compressed.sh")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    assert len(rows) == 4
    assert [rows[0]["id"], set(rows[0])] == ["haiku", {"id", "index", "text", "finish_reason", "usage"}]
    assert again.stdout == first.stdout
    assert again.stderr.endswith("answers.jsonl.gz is already finished: 4 rows, 0 failed, nothing to do\n")


@pytest.mark.thorough
@needs_demo_model
def test_structured_output():
    """Every answer has the form that its row asks for."""
    source = FOLDER / "structured_output.jsonl"
    command = [python(), "-m", "rosebatch", "generate", str(source), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["person", "review", "cities", "date", "sky"]
    assert {row["finish_reason"] for row in rows.values()} == {"stop"}
    assert set(json.loads(rows["person"]["text"])) == {"name", "born", "city"}
    assert json.loads(rows["review"]["text"])["mood"] in ("positive", "neutral", "negative")
    assert len(json.loads(rows["cities"]["text"])["cities"]) == 3
    assert re.fullmatch("1945-[0-9]{2}-[0-9]{2}", rows["date"]["text"])
    assert rows["sky"]["text"] in ("red", "green", "blue")


@pytest.fixture
def chat_model(tmp_path):
    """A random model whose template has tools and reasoning."""
    folder, backend = tmp_path / "model", chat_backend()
    save_llama(folder, vocab_size=backend.get_vocab_size(), max_position_embeddings=4096, initializer_range=0.02)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    return folder


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_tools(chat_model, tmp_path, seed):
    """Forced calls match their schemas whatever the model is, and reasoning keeps to its budget."""
    source, target = FOLDER / "tools.jsonl", tmp_path / "out.jsonl"
    command = ["generate", str(source), "-o", str(target), "--model", str(chat_model), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--seed", str(seed), "--temperature", "1"])
    assert ended.value.code == 0
    rows = {row["id"]: row for row in map(json.loads, target.read_text().splitlines())}
    asked = {row["id"]: row for row in map(json.loads, source.read_text().splitlines())}
    for name in ("any-call", "one-tool"):
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in asked[name]["tools"]}
        assert rows[name]["finish_reason"] == "tool_calls"
        for call in rows[name]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert rows["thinks"]["text"] in ("yes", "no")
    assert "text" in rows["after-a-call"]


def test_responses(chat_model, tmp_path):
    """Every answer is one that the client reads; a form and a call that were asked for are there."""
    source, target = FOLDER / "responses.jsonl", tmp_path / "out.jsonl"
    command = ["generate", str(source), "-o", str(target), "--model", str(chat_model), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--seed", "1"])
    assert ended.value.code == 0
    lines = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    bodies = {name: Response.model_validate(line["response"]["body"], strict=True) for name, line in lines.items()}
    assert list(bodies) == ["text", "items", "form", "call"]
    assert json.loads(bodies["form"].output_text)["answer"] in ("yes", "no")
    call = bodies["call"].output[-1]
    assert (call.type, call.name, json.loads(call.arguments)["city"] in ("Paris", "Rome")) == (
        "function_call",
        "weather",
        True,
    )


@pytest.mark.thorough
@needs_demo_model
def test_parquet(tmp_path):
    """The folder of parts is read back as one table, with the column that was carried through."""
    command = [python(), str(FOLDER / "parquet.py"), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"3 files, 10 answers of \d+ tokens in all, 10 right\n", done.stdout)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"prompts.parquet", "answers"}
    assert len(list((tmp_path / "answers").iterdir())) == 3


@pytest.fixture
def shards(tmp_path):
    """A folder of 150 rows, one of them bad, and a ``PATH`` on which ``rosebatch`` writes down its arguments."""
    rows = [{"prompt_token_ids": [1 + i % 7, 2], "max_tokens": 2} for i in range(149)] + [{}]
    (tmp_path / "in put.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bin").mkdir()

    def command(name, text):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    command("rosebatch", """printf '%s\\0' "$@" >> calls; echo >> calls; [ "$1" = merge ] || exit 3""")

    def run(*arguments, **variables):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path)} | variables
        done = subprocess.run(
            ["bash", *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")

    def serve(monkeypatch):
        """Serve the shards by the arguments that were written down, on one process each."""
        monkeypatch.chdir(tmp_path)
        codes = []
        for call in (tmp_path / "calls").read_text().splitlines():
            arguments = call.split("\0")[:-1]
            if arguments[0] == "generate":
                arguments += ["--device", "cpu", "--load-format", "dummy", "--data-parallel-size", "1"]
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            codes.append(ended.value.code)
        return codes

    def indices(name):
        return [json.loads(row)["index"] for row in (tmp_path / name).read_text().splitlines()]

    return SimpleNamespace(folder=tmp_path, command=command, run=run, serve=serve, indices=indices)


def test_slurm(shards, monkeypatch):
    """The array serves every row once, and the last job joins the shards, also where rows failed."""
    shards.command(
        "sbatch",
        """echo "$@" >> submitted
        case "$*" in
            *--wrap*) bash -c "${@: -1}" ;;
            *) for i in 2 3 1; do SLURM_ARRAY_TASK_ID=$i SLURM_ARRAY_TASK_COUNT=3 bash "${@:3}"; done; echo 77 ;;
        esac""",
    )
    shards.run(str(FOLDER / "slurm.sh"), "in put.jsonl", "out put.jsonl", "--model", str(TINY), SHARDS="3")
    submitted = (shards.folder / "submitted").read_text().splitlines()
    assert [line.split()[:2] for line in submitted] == [
        ["--parsable", "--array=1-3"],
        ["--dependency=afterok:77", "--job-name=rosebatch-merge"],
    ]
    assert shards.serve(monkeypatch) == [0, 3, 0, 3]
    assert shards.indices("out put.jsonl") == list(range(150))


def test_skypilot(shards, monkeypatch):
    """Ranks begin at 0, and shards at 1: a share of the rows was served by nobody."""
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    for rank in range(2):
        variables = {"INPUT": "in put.jsonl", "OUTPUT": "out.jsonl", "MODEL": str(TINY)}
        assert variables.keys() == task["envs"].keys()
        shards.run("-c", task["run"], SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NUM_NODES="2", **variables)
    (merge,) = re.findall("'(rosebatch merge .*)'", (FOLDER / "skypilot.yaml").read_text())
    shards.run(
        "-c", merge.replace(task["envs"]["INPUT"], "'in put.jsonl'").replace(task["envs"]["OUTPUT"], "out.jsonl")
    )
    assert shards.serve(monkeypatch) == [3, 0, 3]
    assert shards.indices("out.jsonl") == list(range(150))


@pytest.fixture(scope="module")
def evaluate():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("evaluate", EVALUATE / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7 pears.\n#### 7\n", "7"),
        ("It costs $1,200.50.", "1200.50"),
        ("1,234,567 people", "1234567"),
        ("the numbers 12,34", "34"),
        ("not grouped: 1,2345", "2345"),
        ("5km and 2.5kg", "2.5"),
        ("That is 25%.", "25"),
        ("half, or .5", "0.5"),
        ("**8**", "8"),
        ("$42$", "42"),
        ("Rs.500", "500"),
        ("$5/hour", "5"),
        ("-5 degrees", "-5"),
        ("\N{MINUS SIGN}5 degrees", "-5"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("--5", "-5"),
        ("-$-5", "-5"),
        ("pages 5-10", "10"),
        ("(3)-2", "2"),
        ("8 cups, then 3/4", "8"),
        ("8 cups, then -3/4", "8"),
        ("8 cups, then 1 1/2", "8"),
        ("5 on 3/4/2025", "5"),
        ("12 / 4 = 3", "3"),
        ("1/3", None),
        ("CO2", None),
        ("none at all.", None),
        ("", None),
    ],
)
def test_the_last_number(evaluate, text, number):
    """A right answer counted as wrong because of a comma, a unit, a sign or a full stop; 3/4 counted as 4."""
    assert evaluate.last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("name", ["questions.jsonl", "shots.jsonl"])
def test_the_reference_answers_are_right(evaluate, name):
    """A slip in a reference answer would count right answers as wrong."""
    rows = evaluate.read_rows(EVALUATE / name)
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        calculations = re.findall(r"([0-9. */+-]*[0-9]) = (-?[0-9.]*[0-9])", row["answer"])
        assert len(calculations) == row["answer"].count("=") > 0
        for calculation, result in calculations:
            assert eval(calculation) == float(result), row
        assert evaluate.expected_number(row) == Decimal(calculations[-1][1]), row


def test_the_questions_are_graded(evaluate):
    """A model too small for all but the easiest still has some to get right."""
    steps = [row["answer"].count("=") for row in evaluate.read_rows(EVALUATE / "questions.jsonl")]
    assert steps == sorted(steps)
    assert (len(steps), steps[0], steps.count(1), steps[-1]) == (40, 1, 17, 5)


def test_the_prompts_share_their_beginning(evaluate, tmp_path):
    """Shots after the question, or in another order, would leave the prefix cache nothing to find."""
    questions, shots = (evaluate.read_rows(EVALUATE / name) for name in ("questions.jsonl", "shots.jsonl"))
    rows = evaluate.make_prompts(questions, shots, 256)
    shared = rows[0]["prompt"].removesuffix(f"{questions[0]['question']}\nAnswer:")
    assert shared.endswith("\n#### 8\n\nQuestion: ")
    assert all(shot["answer"] in shared for shot in shots)
    for row, question in zip(rows, questions, strict=True):
        assert row["prompt"] == f"{shared}{question['question']}\nAnswer:"
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = list(PromptReader(str(path), {}))
    assert {(row.sampling.greedy, row.sampling.max_tokens, row.sampling.stop) for row in read} == {
        (True, 256, ("\nQuestion:",))
    }


@pytest.mark.parametrize(("right", "low", "high"), [(10, 0.0552, 0.1744), (0, 0, 0.0370), (100, 0.9630, 1)])
def test_the_confidence_interval(evaluate, right, low, high):
    """Known values for 100 questions. The plain normal interval has no width at 0 and at 100."""
    assert evaluate.confidence_interval(right, 100) == pytest.approx((low, high), abs=1e-4)


def run_evaluate(evaluate, folder, monkeypatch, code, results):
    """The command line of rosebatch that ``main`` runs, where rosebatch writes these results."""
    rows = [{"question": f"Q{i}?", "answer": f"<<2*{i}={2 * i}>>.\n#### {2 * i}"} for i in range(3)]
    # gsm8k's own form, with a blank line at its end.
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    commands = []

    def run(command, check):
        commands.append(command)
        carried = zip(rows, results, strict=False)
        (folder / "out" / "answers.jsonl").write_text("".join(json.dumps(r | result) + "\n" for r, result in carried))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    arguments = ["--questions", str(folder / "questions.jsonl"), "--out", str(folder / "out"), "--max-tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments, "--model", "path/to/model", "--quiet"])
    evaluate.main()
    return commands[0]


def test_a_table_of_wrong_answers(evaluate, tmp_path, monkeypatch, capsys):
    """A row that failed is wrong, with its reason; flags of rosebatch are its own, and a killed run is continued."""
    results = [{"text": "It is 0.0."}, {"text": "It is\n1, or so"}, {"error": {"code": "x", "message": "too long"}}]
    command = run_evaluate(evaluate, tmp_path, monkeypatch, 3, results)
    assert command[1:4] == ["-m", "rosebatch", "generate"]
    assert command[-5:] == ["--resume", "--return-token-ids", "--model", "path/to/model", "--quiet"]
    table = tmp_path / "out" / "wrong.csv"
    shown = f"1 of 3 right: 33.3% (95 % interval 6.1% to 79.2%); wrong ones: {table}\n"
    assert capsys.readouterr().out == shown
    with table.open(newline="") as file:
        assert list(csv.reader(file))[1:] == [["Q1?", "2", "1", "It is\n1, or so"], ["Q2?", "4", "", "too long"]]
    assert {row["max_tokens"] for row in evaluate.read_rows(tmp_path / "out" / "prompts.jsonl")} == {9}


def test_error_rows_elsewhere_are_wrong_too(evaluate, tmp_path, monkeypatch, capsys):
    """With ``--errors FILE`` they are not among the answers: the accuracy would be 100 %."""
    run_evaluate(evaluate, tmp_path, monkeypatch, 3, [{"text": "0"}])
    assert capsys.readouterr().out.startswith("1 of 3 right: 33.3%")


def test_an_aborted_run_has_no_accuracy(evaluate, tmp_path, monkeypatch, capsys):
    """Answers of an earlier run would be counted in its place."""
    with pytest.raises(SystemExit) as ended:
        run_evaluate(evaluate, tmp_path, monkeypatch, 1, [])
    assert (ended.value.code, capsys.readouterr().out) == (1, "")


@pytest.mark.thorough
@needs_demo_model
def test_evaluation_equals_transformers(evaluate, tmp_path, transformers, monkeypatch, capsys):
    """In fp32 the answers to two questions are transformers' token by token; a changed token is found."""
    rows = evaluate.read_rows(EVALUATE / "questions.jsonl")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(rows[i]) + "\n" for i in (4, 18)))
    out = tmp_path / "out"
    command = [python(), str(EVALUATE / "evaluate.py"), "--out", str(out), "--questions"]
    command += [str(tmp_path / "questions.jsonl"), "--device", "cpu", "--dtype", "float32", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # Every token of the two leads by 0.06 or more in logit. On another CPU the answers are the same.
    assert done.stdout.startswith("1 of 2 right: 50.0%")

    def compare():
        """The exit code and the output of the other script, without a process that imports all of it again."""
        monkeypatch.setattr(sys, "argv", ["against_transformers.py", "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EVALUATE / "against_transformers.py"), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    monkeypatch.setitem(sys.modules, "evaluate", evaluate)
    code, told = compare()
    assert (code, re.sub("[0-9]+ tokens", "", told)) == (0, "2 of 2 answers are equal ()\n")

    for name in ("prompts.jsonl", "answers.jsonl"):
        (row,) = evaluate.read_rows(out / name)[:1]
        if "token_ids" in row:
            row["token_ids"][2] += 1
        (out / name).write_text(json.dumps(row) + "\n")
    code, told = compare()
    assert code == 1
    assert told.startswith("prompt 1 differs from token 2 on:\n")
    assert "0 of 1 answers are equal" in told


@pytest.mark.thorough
def test_the_harness(tmp_path):
    """The command runs a task of each kind, whose files are found from the repository's root."""
    model = tmp_path / "model"
    save_llama(model)
    save_tokenizer(model)
    command = [python(), "-m", "rosebatch.llm.harness", "--model", "rosebatch", "--device", "cpu"]
    command += ["--model_args", f"pretrained={model},dtype=float32", "--include_path", str(FOLDER / "harness")]
    # It reads the files of some ten thousand tasks of its own first.
    (tmp_path / "sitecustomize.py").write_text(
        "from functools import partialmethod\n"
        "from lm_eval.tasks import TaskManager\n"
        "TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)\n"
    )
    done = subprocess.run(
        [*command, "--tasks", "capitals,texts,sums"],
        cwd=FOLDER.parent,
        env=environment(PYTHONPATH=python_path(tmp_path), HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = [line.split("|")[5].strip() for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert metrics == ["acc", "acc_norm", "exact_match", "bits_per_byte", "byte_perplexity"]


def test_nearest(chat_model, tmp_path):
    """A text is nearest to itself."""
    texts = tmp_path / "texts.txt"
    texts.write_text("a rose\nthe engine\na tulip\n")
    command = [python(), str(FOLDER / "nearest.py"), str(texts), "the engine", "a tulip", "--top", "1"]
    done = subprocess.run(
        [*command, "--model", str(chat_model)], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "the engine\n  1.000  the engine\na tulip\n  1.000  a tulip\n"


@pytest.mark.parametrize(
    ("task", "name", "field", "shape"),
    [
        (Embed(), "embeddings", "embedding", "tiny-llama"),
        (Embed(), "embeddings", "embedding", "all-minilm-l6"),
        (Score(), "scores", "scores", "tiny-llama"),
    ],
)
def test_the_examples_of_what_generates_nothing(tmp_path, task, name, field, shape):
    """The first vectors and scores that anyone makes must not fail."""
    rows = list(PromptReader(str(FOLDER / f"{name}.jsonl"), {}, task=task))
    assert [type(row) for row in rows] == [Row] * 3
    target = tmp_path / "vectors.jsonl"
    model = TINY.with_stem(shape)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--quiet", "-o", str(target)]
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    with pytest.raises(SystemExit) as end:
        main([task.name, str(source), *flags])
    assert end.value.code == 0
    assert json.loads(target.read_text())[field]


HEADS = {
    "classes": (BertForSequenceClassification, 2),
    "entities": (BertForTokenClassification, 3),
    "pairs": (BertForSequenceClassification, 1),
    "embeddings": (BertModel, 2),
}


@pytest.fixture
def with_head(tmp_path):
    """The folder of a tiny encoder for an example."""

    def made(name):
        kind, labels = HEADS[name]
        sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 2}
        kind(BertConfig(**sizes, vocab_size=300, num_labels=labels)).save_pretrained(tmp_path / "model")
        byte_backend().save(str(tmp_path / "model" / "tokenizer.json"))
        return tmp_path / "model"

    return made


@pytest.mark.parametrize(
    ("command", "name", "field"),
    [
        ("classify", "classes", "label"),
        ("classify", "entities", "tokens"),
        ("score", "pairs", "relevance"),
        ("embed", "embeddings", "embedding"),
    ],
)
def test_the_examples_of_encoders(with_head, tmp_path, command, name, field):
    """All of their rows are served."""
    target = tmp_path / "out.jsonl"
    flags = ["--model", str(with_head(name)), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as end:
        main([command, str(FOLDER / f"{name}.jsonl"), "-o", str(target), *flags])
    assert end.value.code == 0
    rows = read_lines(target)
    assert len(rows) == 3
    assert all(row[field] for row in rows)
    if name == "entities":
        given = read_lines(FOLDER / "entities.jsonl")
        for row, own in zip(rows, given, strict=True):
            # The tokenizer has a token for each letter.
            assert [own["prompt"][t["start"] : t["end"]] for t in row["tokens"]] == list(own["prompt"])


def test_rerank(with_head, tmp_path):
    """The best text comes first."""
    texts = tmp_path / "texts.txt"
    texts.write_text("a rose\nthe engine\na tulip\n")
    command = [python(), str(FOLDER / "rerank.py"), str(texts), "roses", "--top", "2"]
    done = subprocess.run(
        [*command, "--model", str(with_head("pairs"))], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    scores = [float(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
