"""A task that is defined here alone runs as the tasks of the package do."""

from dataclasses import dataclass
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.tasks.task import Task
from rosebatch.job.config import JobConfig
from rosebatch.job.run import run_job
from rosebatch.llm.llm import LLM
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.fake_model import FakeModel, launch_fake, make_engine


@dataclass(frozen=True)
class Score(Task):
    """One number a row: the mean of the pooled state."""

    name = "score"
    doing = "scoring"
    result_fields = ("index", "score", "error")

    def types(self):
        error = pa.struct([("code", pa.string()), ("message", pa.string())])
        return {"index": pa.int64(), "score": pa.float64(), "error": error}

    def asks(self, line):
        return {**super().asks(line), "pooling": PoolingParams(pooling="mean", normalize=False)}

    def result(self, result):
        return {"index": result.row.index, "score": fmean(result.pooled[0])}


ROWS = [{"prompt": f"row {i} " * 9, "label": i} for i in range(9)]
ROWS[4] = {"prompt": "", "label": 4}


@pytest.fixture
def score(job, tmp_path):
    """Scores ``ROWS`` into a file of this name."""
    source = write_lines(tmp_path / "in.jsonl", ROWS)

    def run(name, before_step=None, **options):
        engine = make_engine(FakeModel(before_step=before_step), seqs=2)
        config = JobConfig(input=str(source), output=str(tmp_path / name), quiet=True, task=Score(), **options)
        return run_job(config, LLM.of(launch_fake(engine, job.tokenizer)))

    return run


def test_a_task_is_a_class(score, tmp_path):
    """A kind of job that generic files name one by one would need a branch in each of them."""
    assert score("out.jsonl").num_failed == 1
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["label"] for line in lines] == list(range(9))
    assert lines[4] == {"label": 4, "index": 4, "error": {"code": "empty_prompt", "message": "line 5: prompt is empty"}}
    assert all(set(line) == {"label", "index", "score"} for line in lines[:4] + lines[5:])
    score("out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("score").type == pa.float64()
    assert table["score"].to_pylist() == [line.get("score") for line in lines]


def test_a_task_resumes(score, tmp_path):
    """Rows that were written before the job was killed keep their numbers."""
    score("whole.jsonl")
    steps = list(range(4))
    with pytest.raises(IndexError):
        score("out.jsonl", lambda plan: steps.pop(), resume=True)
    assert score("out.jsonl", resume=True).report["resumed"] > 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
