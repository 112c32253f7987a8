"""A run that is killed and resumed ends like one that was never killed."""

import gzip
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.part_file import PartFile
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from tests.helpers.forks import FORKS, in_fork
from tests.helpers.json_lines import write_lines
from tests.job import killable_job, resumed_inputs
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.resumed_inputs import ROWS


@pytest.fixture
def source(tmp_path):
    path, _ = resumed_inputs.write_jsonl(tmp_path)
    return path


# What writes the input, and the output's name.
KINDS = [("jsonl", "out.jsonl"), ("parquet", "answers"), ("gzip", "out.jsonl.gz"), ("embedding_tables", "answers")]
KINDS += [("csv", "out.csv"), ("csv", "out.tsv.gz")]
KINDS += [("template", "out.csv.zst"), ("hive", "answers")]
KINDS += [
    (kind, "out.jsonl")
    for kind in ("documents", "openai", "n", "structured", "tools", "responses", "embeddings", "scores")
]


@pytest.mark.parametrize(
    ("kind", "name", "max_kills"),
    [
        (*KINDS[0], 3),
        ("documents", "out.jsonl", 2),
        *(pytest.param(*each, 9, marks=pytest.mark.thorough) for each in KINDS),
    ],
)
def test_killed_many_times(tmp_path, kind, name, max_kills):
    """Killed at random moments, from before the first row to the final rename, the output has the same bytes."""
    given, options = getattr(resumed_inputs, f"write_{kind}")(tmp_path)
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    target = runs / name

    def arguments(folder):
        """The input and the output, and the options."""
        path = f"{folder / name}/" if name == "answers" else str(folder / name)
        return (str(given), path), options | (
            {"errors": str(folder / options["errors"])} if "errors" in options else {}
        )

    def run(*kill):
        """Whether the job is killed, so long after its part file grew by so many bytes."""
        args, more = arguments(runs)
        job = FORKS.Process(target=killable_job.main, args=(*args, kill), kwargs=more)
        job.start()
        job.join()
        assert job.exitcode in (0, -signal.SIGPROF)
        return job.exitcode != 0

    def contents(folder):
        """All files. A break may change the prefix cache's share of a prompt, and with it hashes; nothing else."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        changes = rb'"cached_tokens":\d+|"(output|errors)": "\w+"'
        return {path: re.sub(changes, b"", content) for path, content in files.items()}

    whole.mkdir()
    runs.mkdir()
    args, more = arguments(whole)
    took = in_fork(killable_job.main, *args, **more)
    expected = contents(whole)
    written = sum(len(each) for each in expected.values())
    if kind == "jsonl":
        assert expected[name].count(b"\n") == ROWS + 1
    elif kind == "gzip":
        assert sorted(expected) == [f".{name}.run", "failed.jsonl.gz", name]
        assert [gzip.decompress(expected[each]).count(b"\n") for each in sorted(expected)[1:]] == [3, ROWS - 2]
    elif kind == "parquet":
        assert sorted(expected) == [".answers.run", *(f"answers/part-0000{i}.parquet" for i in range(5))]
    elif kind == "openai":
        assert sorted(expected) == [".out.jsonl.run", "out.errors.jsonl", "out.jsonl"]
        assert expected["out.errors.jsonl"].count(b"\n") == 3
    elif kind == "tools":
        assert expected[name].count(b'"finish_reason":"tool_calls"') == 25
    elif kind == "embeddings":
        # Of 8 dimensions there are 9 lengths to ask for.
        assert expected[name].count(b'"embedding":[') == ROWS - ROWS // 9 - 1
    elif kind == "scores":
        assert expected[name].count(b'"scores":[') == ROWS - 1
    rng, kills, rounds = random.Random(1), 0, 0
    while kills < max_kills or not rounds:
        # One in five comes at any time at all; the start-up has its share of them.
        anywhere = rng.random() < 0.2
        if run(0 if anywhere else rng.uniform(1, written / 3), rng.uniform(0.0, took if anywhere else 0.02)):
            kills += 1
            if target.is_file():
                assert contents(runs)[name] == expected[name]
            continue
        rounds += 1
        assert contents(runs) == expected
        shutil.rmtree(runs)
        runs.mkdir()


def test_a_disk_that_fills_up(source, tmp_path):
    """At any byte of the part file the error is clear and no result is lost."""
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"

    def run(path, max_bytes):
        return in_fork(killable_job.with_full_disk, str(source), str(path), max_bytes)

    assert run(whole, 2**30) is None
    rng, size = random.Random(2), whole.stat().st_size
    kept = 0
    for share in (0.1, 0.3, 0.6, 0.95):
        limit = int(size * share) + rng.randrange(100)
        assert "File too large; earlier rows are saved; rerun with --resume to continue" in run(target, limit)
        assert not target.exists()
        assert kept < part.stat().st_size <= limit
        kept = part.stat().st_size
    assert run(target, 2**30) is None
    assert target.read_bytes() == whole.read_bytes()


def test_a_resumed_run_computes_only_what_is_missing(job, source, tmp_path):
    """Finished rows, error rows included, must not be tokenized or generated again."""

    class StopError(Exception):
        """Ends the first run."""

    steps, begun = 0, set()

    def before_step(plan):
        nonlocal steps
        steps += 1
        begun.update(int(bytes([*spec.prompt_token_ids]).split()[-1]) for spec in plan.started)
        if steps == 75:
            raise StopError

    def run():
        begun.clear()
        model = FakeModel(before_step=before_step)
        return job.run_file(source, tmp_path / "out.jsonl", model=model, limits={"seqs": 8}, resume=True)

    with pytest.raises(StopError):
        run()
    part = PartFile.reopen(tmp_path / "out.jsonl.part")
    done = {index for index in range(ROWS + 1) if index in part}
    part.close()
    result, _ = run()
    assert 10 < len(done) < 90
    assert begun.isdisjoint(done)
    assert result.report["resumed"] == len(done)
    assert result.report["resumed_exactly"]
    assert result.report["completed"] + result.report["failed"] == ROWS + 1 - len(done)
    assert result.num_failed == 3
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == ROWS + 1


@pytest.fixture
def break_and_resume(job, tmp_path):
    """Runs rows with a changed plan, breaks off after some steps and resumes; the report, and how to run once more."""

    def call(rows, steps, change, *, pooling=None, **options):
        source, left = write_lines(tmp_path / "in.jsonl", rows), list(range(steps))

        def run(before_step=None, **options):
            launched = launch_fake(make_engine(FakeModel(before_step=before_step), seqs=2), job.tokenizer)
            llm = LLM.of(replace(launched, plan=change(launched.plan)))
            return run_file(source, tmp_path / "out.jsonl", model=llm, pooling=pooling, **options)

        with pytest.raises(IndexError):
            run(lambda plan: left.pop())
        report = run(**options).report
        assert report["resumed"] > 0
        return report, run

    return call


@pytest.mark.parametrize(
    ("device", "switches", "options", "exact"),
    [
        ("cpu", {}, {"resume": True}, True),
        ("cpu", {"batch_invariant": False}, {"resume": True}, False),
        ("cuda", {}, {"resume": True}, False),
        ("cuda", {"batch_invariant": True}, {"resume": True}, True),
        ("cuda", {"batch_invariant": True, "paged_attention": False}, {"resume": True}, False),
        ("cpu", {}, {"force_resume": True}, True),
        ("cpu", {}, {"force_resume": True, "seed": 1}, False),
    ],
)
def test_whether_a_resumed_run_is_exact(break_and_resume, device, switches, options, exact):
    """On a GPU a row computed again runs in another batch and may differ: the report must not hide it."""
    rows = [{"prompt": f"row {i}", "max_tokens": 5} for i in range(9)]
    changes = {"device": torch.device(device), "switches": Switches.resolve(switches, device)}
    report, run = break_and_resume(rows, 9, lambda plan: replace(plan, **changes), **options)
    assert report["resumed_exactly"] == exact
    assert run().report["resumed_exactly"], "nothing was resumed"


def write_many(path, rows):
    """Rows in the format of the extension. Few are in memory at once: a process that starts counts its parent's."""
    if path.suffix == ".arrow":
        schema = pa.schema([("prompt", pa.string()), ("max_tokens", pa.int64()), ("id", pa.string())])
        with pa.ipc.new_file(str(path), schema) as writer:
            for start in range(0, rows, 1000):
                numbers = range(start, start + 1000)
                columns = [[f"row {i % 100}" for i in numbers], [1] * 1000, [f"id {i}" for i in numbers]]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        if path.suffix == ".csv":
            file.write("prompt,max_tokens,id\n")
            file.writelines(f"row {i % 100},1,id {i}\n" for i in range(rows))
        else:
            file.writelines(f'{{"prompt":"row {i % 100}","max_tokens":1,"id":"id {i}"}}\n' for i in range(rows))


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path, ending):
    """With four times the rows, reader, ids, waiting results and report must take the same memory.

    Some 200 bytes are kept of each row that is done: its id, and where its result is.
    """
    files = [(tmp_path / f"{rows}.{ending}", rows) for rows in (10_000, 40_000)]
    for path, rows in files:
        write_many(path, rows)
    # Each in a process of its own: the second would take what the first has given back.
    peaks = [in_fork(killable_job.peak, str(path)) for path, _ in files]
    for path, rows in files:
        assert Path(f"{path}.jsonl").read_bytes().count(b"\n") == rows
    # In KiB.
    assert peaks[1] < peaks[0] + 8 * 1024


def test_resumed_vectors_of_a_gpu_may_differ(break_and_resume):
    """The sum of a mean goes by the chunks of a prompt, which go by the batch."""
    switches = Switches.resolve({"batch_invariant": True}, "cuda")
    changes = {"device": torch.device("cuda"), "switches": switches}
    rows = [{"prompt": f"row {i} " * 9} for i in range(9)]
    report, _ = break_and_resume(rows, 4, lambda plan: replace(plan, **changes), pooling=PoolingParams(), resume=True)
    assert report["resumed_exactly"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_vectors_are_exact(break_and_resume, dtype):
    """Tokens hide the last bit of a state, and vectors show it: the report must not promise less than is true."""

    def change(plan):
        return replace(plan, source=replace(plan.source, dtype=dtype))

    rows = [{"prompt": f"row {i} " * 9} for i in range(9)]
    report, _ = break_and_resume(rows, 4, change, pooling=PoolingParams(), resume=True)
    assert report["resumed_exactly"] is True
