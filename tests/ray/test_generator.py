"""``rosebatch.ray.Generator``: batches of Ray Data in, the same batches with results out."""

import asyncio
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.ray import Generator
from tests.helpers.checkout import ROOT, environment
from tests.helpers.seeing import seeing_model
from tests.helpers.waiting import PATIENCE_SECONDS, until
from tests.io.images.picture_files import picture, saved

ADDED = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "error"]


@pytest.fixture(scope="module")
def generator(model_folder):
    """On the small model."""
    return Generator(str(model_folder), device="cpu", sampling={"max_tokens": 8}, seed=1, max_num_seqs=4)


def run(generator, *batches):
    """The results of batches that are under way at the same time."""

    async def one(batch):
        return [result async for result in generator(batch)]

    async def all_of_them():
        return await asyncio.gather(*map(one, batches))

    return [result for (result,) in asyncio.run(asyncio.wait_for(all_of_them(), PATIENCE_SECONDS))]


def table(numbers):
    """Rows of all kinds."""
    return pa.table(
        {
            "key": [f"row {i}" for i in numbers],
            "prompt": ["" if i == 3 else chr(97 + i % 26) * (i + 1) for i in numbers],
            "max_tokens": pa.array([None if i % 3 else i + 1 for i in numbers], pa.int64()),
            "temperature": pa.array([0.9 if i % 2 else None for i in numbers], pa.float64()),
        }
    )


def test_rows_of_several_batches(generator):
    """A batch got the rows of another one that was under way, or the rows of one came in another order."""
    (whole,) = run(generator, table(range(12)))
    parts = run(generator, table(range(5)), table(range(5, 6)), table(range(6, 12)))
    assert pa.concat_tables(parts).equals(whole)
    assert whole.column_names == [*table([0]).column_names, *ADDED]
    assert whole["key"].to_pylist() == [f"row {i}" for i in range(12)]
    assert whole["error"].to_pylist() == ["empty_prompt: prompt is empty" if i == 3 else None for i in range(12)]
    assert whole["completion_tokens"].to_pylist()[:5] == [1, 8, 8, None, 8]


def test_the_other_format(generator):
    """Values of numpy are none of Python's: NaN stands for null, lists are arrays."""
    (expected,) = run(generator, table(range(6)))
    batch = {
        name: column.to_numpy(zero_copy_only=False)
        for name, column in zip(table([0]).column_names, table(range(6)).columns, strict=True)
    }
    batch["max_tokens"] = np.array([1, 8, 8, 4, 8, 8])
    (found,) = run(generator, batch)
    assert list(found["text"][:3]) == expected["text"].to_pylist()[:3]
    messages = np.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], dtype=object)
    (chats,) = run(generator, {"messages": messages[:, :1], "top_k": np.array([3, 4])})
    assert list(chats["error"]) == [None, None]
    (ids,) = run(generator, {"prompt_token_ids": np.array([[5, 6], [7, 8]])})
    assert list(ids["prompt_tokens"]) == [2, 2]
    # A struct has the keys of all rows.
    bias = np.array([{"5": 1.0, "6": None}, {"5": None, "6": 1.0}], dtype=object)
    (biased,) = run(generator, {"prompt": np.array(["a", "b"]), "logit_bias": bias})
    assert list(biased["error"]) == [None, None]


def test_an_empty_batch(generator):
    """It waited for ever; a block of a filtered dataset has no rows. Its columns have types all the same."""
    (found,) = run(generator, table([]))
    assert (found.num_rows, found.schema.field("text").type) == (0, pa.string())


def test_rows_that_the_columns_cannot_hold(generator):
    """All but the first completion would be lost without a word."""
    (found,) = run(generator, pa.table({"prompt": ["a", "b"], "n": [1, 2]}))
    assert found["error"].to_pylist()[0] is None
    assert found["error"].to_pylist()[1].startswith("unsupported_field: n: ")


@pytest.mark.thorough
def test_images(tmp_path):
    """Settings of images were unknown, and a column of images was refused as an input that is no text."""
    (tmp_path / "model").mkdir()
    seeing_model("Qwen3VLForConditionalGeneration", tmp_path / "model")
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    seeing = Generator(
        str(tmp_path / "model"),
        device="cpu",
        sampling={"max_tokens": 3},
        columns={"image": "photo"},
        media_root=tmp_path,
    )
    photos = pa.array([{"bytes": saved("PNG"), "path": None}, {"bytes": None, "path": "a.png"}, None])
    (found,) = run(seeing, pa.table({"photo": photos, "prompt": ["x", "x", "x"]}))
    one, other, none = found["text"].to_pylist()
    assert one == other is not None and none is None
    assert found["error"].to_pylist()[2].startswith("missing_image: ")
    (found,) = run(seeing, {"photo": np.array([saved("PNG"), b"none"], object), "prompt": np.array(["x", "x"])})
    assert found["text"][0] == one and found["error"][1].startswith("invalid_image: ")
    # As ``ray.data.read_images`` has them. Each pixel became a list, which is no image.
    pixels = np.stack([np.array(picture())] * 2)
    arrays = np.empty(2, object)
    arrays[:] = list(pixels)
    prompts = pa.array(["x", "x"])
    with warnings.catch_warnings():
        # Of Ray's own settings.
        warnings.simplefilter("ignore", DeprecationWarning)
        from ray.data.extensions import ArrowTensorArray

        tensors = [ArrowTensorArray.from_numpy(pixels), pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)]
    for batch in (
        {"photo": pixels, "prompt": prompts.to_numpy(zero_copy_only=False)},
        {"photo": arrays, "prompt": prompts.to_numpy(zero_copy_only=False)},
        *(pa.table({"photo": each, "prompt": prompts}) for each in tensors),
    ):
        (found,) = run(seeing, batch)
        assert [str(each) for each in found["text"]] == [one, one]


def test_a_column_of_images_for_a_model_of_text(model_folder):
    """Each row of the dataset had the error, and none said why."""
    told = "columns has an image: the model takes no images: its architecture, LlamaForCausalLM, is none that"
    with pytest.raises(RuntimeError, match=told):
        Generator(str(model_folder), device="cpu", columns={"image": "photo"})


def test_rows_with_tools(generator):
    """A call was lost: the text was empty, and no column said what was called."""
    chat = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "d"}}]
    rows = {"messages": [chat] * 3, "tools": [tools, tools, None], "tool_choice": ["auto", "none", None]}
    (found,) = run(generator, pa.table(rows))
    calls, none, plain = found["error"].to_pylist()
    held = "one completion without log-probabilities and tool calls"
    assert calls == f"unsupported_field: tools: these columns hold {held}"
    # Such a row is served if the template knows tools.
    assert none == "invalid_messages: the chat template leaves out the tools"
    assert plain is None


def test_names_of_columns(model_folder):
    """Datasets have names of their own, and some of them are ours."""
    names = {"prompt": "question", "text": "answer"}
    generator = Generator(str(model_folder), device="cpu", sampling={"max_tokens": 2}, columns=names)
    (found,) = run(generator, pa.table({"question": ["a"], "prompt": [7], "text": ["kept"], "index": [1]}))
    assert found.column_names == ["question", "prompt", "text", "index", "answer", *ADDED[1:]]
    assert found["error"].to_pylist() == [None]
    assert found["text"].to_pylist() == ["kept"]
    with pytest.raises(ValueError, match="has a column answer already"):
        run(generator, pa.table({"question": ["a"], "answer": ["b"]}))


def test_settings_that_are_impossible(model_folder, tmp_path):
    """They were errors of each row, or of an unknown machine."""
    with pytest.raises(ValueError, match="maxtokens is no sampling field"):
        Generator(str(model_folder), device="cpu", sampling={"maxtokens": 8})
    with pytest.raises(RuntimeError, match=f"^{os.uname().nodename}: .*none"):
        Generator(str(tmp_path / "none"), device="cpu")


def test_settings_are_those_of_the_library(model_folder, monkeypatch):
    """vLLM's names were unknown here alone; several processes were asked for, and one came without a word."""
    seen = []

    def load(config):
        seen.append(config)
        raise UserError("not loaded")

    monkeypatch.setattr("rosebatch.llm.ray_data.launch", load)
    with pytest.raises(RuntimeError, match="not loaded"):
        Generator(str(model_folder), enable_prefix_caching=False, enforce_eager=True, seed=3)
    assert seen == [RunConfig.of(str(model_folder), prefix_cache=False, cuda_graph=False)]
    for number in (4, "auto"):
        with pytest.raises(ValueError, match="data_parallel_size: an actor is one process"):
            Generator(str(model_folder), data_parallel_size=number)
    with pytest.raises(ValueError, match="ray='local' is not served"):
        Generator(str(model_folder), ray="local")
    assert len(seen) == 1


@pytest.mark.thorough
def test_an_engine_that_fails_ends_its_process(model_folder):
    """A raised error would come back for each batch, since Ray retries it on the same actor."""
    script = f"""
import asyncio, pyarrow as pa
from rosebatch.ray import Generator
from rosebatch.engine.engine import Engine
def fail(self): raise RuntimeError("the device is lost")
Engine.step = fail
async def run(): return [r async for r in Generator({str(model_folder)!r}, device="cpu")(pa.table({{"prompt": ["a"]}}))]
asyncio.run(run())
"""
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
    done = subprocess.run([sys.executable, "-c", script], **options)
    assert done.returncode == 1
    assert "RuntimeError: the device is lost" in done.stderr


@pytest.mark.thorough
def test_the_example_interrupted_and_continued(rays, model_folder, tmp_path):
    """Rows came twice or never."""
    (tmp_path / "in").mkdir()
    for part in range(10):
        rows = table(range(part * 40, part * 40 + 40))
        prompts = pa.array([f"{number} and more" for number in range(40)])
        rows = rows.drop(["key", "prompt", "max_tokens"]).append_column("prompt", prompts)
        rows = rows.append_column("id", pa.array(range(part * 40, part * 40 + 40)))
        pq.write_table(rows, tmp_path / "in" / f"{part}.parquet")
    flags = ["--model", model_folder, "--device", "cpu", "--batch-size", 4, "--max-tokens", 60, "--block-rows", 20]
    script = ROOT / "examples" / "ray_data.py"
    command = [str(part) for part in (sys.executable, script, tmp_path / "in", tmp_path / "out", *flags)]

    def begin():
        with (tmp_path / "log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)

    job, kills = begin(), 0
    until(lambda: list((tmp_path / "out").glob("*.parquet")) or job.poll() is not None)
    if job.poll() is None:
        job.send_signal(signal.SIGKILL)
        kills += 1
    job.wait()
    until(lambda: not rays.processes("ray::Map"))
    assert kills
    written = pq.read_table(tmp_path / "out").num_rows
    assert 0 < written < 400
    assert begin().wait(PATIENCE_SECONDS) == 0, (tmp_path / "log").read_text()[-2000:]
    found = pq.read_table(tmp_path / "out")
    assert sorted(found["id"].to_pylist()) == list(range(400))
    assert set(found["error"].to_pylist()) == {None}
