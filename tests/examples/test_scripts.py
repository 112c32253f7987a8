"""The scripts among the examples run, and their answers are right."""

import csv
import json
import os
import re
import subprocess
from io import StringIO

import jsonschema
import pytest

from tests.examples.folder import ENVIRONMENT, FOLDER
from tests.helpers.checkout import ROOT, environment, python_path
from tests.helpers.forked_jobs import python
from tests.helpers.marks import needs_demo_model
from tests.helpers.seeing import seeing_model
from tests.helpers.small_llama import save_llama, save_tokenizer


@pytest.fixture
def bash(tmp_path):
    """Runs a script that calls ``rosebatch``."""
    (tmp_path / "rosebatch").write_text(f'#!/bin/sh\nexec "{python()}" -m rosebatch "$@"\n')
    (tmp_path / "rosebatch").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = ENVIRONMENT | {"PATH": path, "OUT": str(tmp_path / "out"), "FLAGS": "--device cpu"}
    return lambda script, **own: subprocess.run(
        ["bash", str(script)], env=environment | own, capture_output=True, text=True, check=False
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
def test_parquet(tmp_path):
    """The folder of parts is read back as one table, with the column that was carried through."""
    command = [python(), str(FOLDER / "parquet.py"), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"3 files, 10 answers of \d+ tokens in all, 10 right\n", done.stdout)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"prompts.parquet", "answers"}
    assert len(list((tmp_path / "answers").iterdir())) == 3


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
        cwd=ROOT,
        env=environment(PYTHONPATH=python_path(tmp_path), HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = [line.split("|")[5].strip() for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert metrics == ["acc", "acc_norm", "exact_match", "bits_per_byte", "byte_perplexity"]


@pytest.fixture
def seeing(bash, tmp_path):
    """Runs a script with a random model that takes images."""
    model = tmp_path / "model"
    model.mkdir()
    seeing_model("Qwen3VLForConditionalGeneration", model)
    config = json.loads((model / "config.json").read_text())
    # A grammar needs an end token: the one behind all bytes.
    config["text_config"] |= {"max_position_embeddings": 8192, "eos_token_id": 256}
    (model / "config.json").write_text(json.dumps(config))

    def run(name, flags):
        done = bash(FOLDER / name, MODEL=str(model), FLAGS=f"--device cpu --quiet {flags}")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_captions(seeing):
    """A row for each image of a folder, with its path; the second run has nothing to do."""
    printed = seeing("captions.sh", "--max-tokens 8")
    rows = list(csv.DictReader(StringIO(printed)))
    photos = sorted((FOLDER / "photos").iterdir())
    assert len(photos) == 3 and all(photo.stat().st_size < 2000 for photo in photos)
    assert [row["id"] for row in rows] == list(map(str, photos))
    assert len({row["text"] for row in rows}) == 3
    assert seeing("captions.sh", "--max-tokens 8") == printed


@pytest.mark.thorough
def test_receipts(seeing):
    """Pages become JSON of the schema, also by a model that reads nothing."""
    rows = [json.loads(line) for line in seeing("receipts.sh", "--max-tokens 6000").splitlines()]
    assert [row["id"].rpartition("/")[2] for row in rows] == ["bakery.png", "hardware.png"]
    schema = json.loads((FOLDER / "receipts" / "schema.json").read_text())
    for row in rows:
        assert row["finish_reason"] == "stop"
        jsonschema.validate(json.loads(row["text"]), schema)


def test_nearest(chat_model, tmp_path):
    """A text is nearest to itself; an empty line ended the script, for it has no vector."""
    texts = tmp_path / "texts.txt"
    texts.write_text("a rose\n\nthe engine\na tulip\n")
    command = [python(), str(FOLDER / "nearest.py"), str(texts), "the engine", "a tulip", "--top", "1"]
    done = subprocess.run(
        [*command, "--model", str(chat_model)], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "the engine\n  1.000  the engine\na tulip\n  1.000  a tulip\n"


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
