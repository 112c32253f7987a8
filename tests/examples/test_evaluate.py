"""The script that evaluates a model on questions."""

import csv
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from decimal import Decimal

import pytest

from rosebatch.io.reader import PromptReader
from tests.examples.folder import ENVIRONMENT, EVALUATE
from tests.helpers.forked_jobs import python
from tests.helpers.marks import needs_demo_model


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
