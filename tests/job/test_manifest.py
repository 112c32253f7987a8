"""The manifest: what a resumed run is compared by."""

import errno
import json
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.io.columns import Columns
from rosebatch.io.tasks.score import Score
from rosebatch.job.config import JobConfig
from rosebatch.job.local import LocalService, model_info_of
from rosebatch.job.manifest import build_manifest, differences, now
from rosebatch.launch.plan import plan_launch
from tests.helpers.waiting import PATIENCE_SECONDS

NAMED = Columns()
# Options of the job; all others are the run's.
OF_JOB = {
    "sampling",
    "seed",
    "result_column",
    "return_token_ids",
    "max_row_bytes",
    "media_root",
    "media_domains",
    "task",
}
TOML = Path(__file__).parents[2] / "configs" / "models" / "tiny-llama.toml"


@pytest.fixture
def manifest():
    """The manifest of a run with some options, as read back from a file."""

    def make(input_digest="abc", input_format="jsonl", columns=NAMED, **options):
        of_job = {name: options.pop(name) for name in OF_JOB & options.keys()}
        plan = plan_launch(RunConfig(**{"model": str(TOML), "load_format": "dummy", "device": "cpu", **options}))
        facts, fingerprint = model_info_of(plan), LocalService(plan).fingerprint()
        job = JobConfig(input="in.jsonl", **of_job)
        wait = build_manifest(job, facts, fingerprint, input_digest, input_format=input_format, columns=columns)
        return json.loads(json.dumps(wait()))

    return make


def test_the_same_run_has_no_differences(manifest):
    """Time, place and process must not make a run differ from itself."""
    assert differences(manifest(), manifest()) == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"input_digest": "def"}, "the content of the input differs"),
        ({"input_format": "openai"}, "the format of the input was jsonl, is openai"),
        ({"sampling": {"temperature": 0.5}}, "--temperature was not given, is 0.5"),
        ({"sampling": {"structured_outputs": {"regex": "a"}}}, "--regex was not given, is a"),
        ({"sampling": {"structured_outputs": {"json": "{}"}}}, "--json-schema was not given, is given"),
        ({"sampling": {"stop": ("a", "b")}}, '--stop was not given, is ["a","b"]'),
        ({"columns": Columns(prompt="q")}, "--prompt-column was not given, is q"),
        ({"columns": Columns(carried=("a",))}, '--columns was not given, is ["a"]'),
        ({"seed": 1}, "--seed was not given, is 1"),
        ({"result_column": "out"}, "--result-column was not given, is out"),
        ({"max_prompt_bytes": "1KiB"}, "--max-prompt-bytes was 8388608, is 1024"),
        ({"media_root": "images"}, "--media-root was not given, is images"),
        ({"media_domains": "a.test"}, "--media-domains was not given, is a.test"),
        ({"limit_images": 3}, "--limit-images was not given, is 3"),
        ({"max_pixels": 4096}, "--max-pixels was not given, is 4096"),
        ({"max_row_bytes": "1MiB"}, "--max-row-bytes was 33554432, is 1048576"),
        ({"return_token_ids": True}, "--return-token-ids was off, is on"),
        ({"dtype": "float16"}, "--dtype was float32, is float16"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype was auto, is fp8"),
        ({"switches": {"prefix_cache": False}}, "--prefix-cache was on, is off"),
    ],
)
def test_what_changes_results_is_a_difference(manifest, changes, difference):
    """Otherwise one output could mix rows of two kinds unnoticed."""
    assert differences(manifest(dtype="float32"), manifest(**{"dtype": "float32", **changes})) == [difference]


def test_scores_do_not_go_by_images(manifest):
    """Its rows are texts: a run kept --limit-images 0, which nobody gave, and differed from all that had not."""
    before = manifest(task=Score())
    assert differences(before, manifest(task=Score(), limit_images=0, max_pixels=4096)) == []
    assert "limit_images" not in before


def test_limits_may_change(manifest):
    """A run that was out of memory must be able to resume with less."""
    assert differences(manifest(), manifest(max_num_seqs=2, max_num_batched_tokens=64, kv_cache_memory=2**20)) == []


@pytest.fixture
def folder(tmp_path):
    """A model whose files have no meaning but their bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10, "n_positions": 16}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(2**20))
    return folder


@pytest.fixture
def manifest_of(manifest, folder):
    """The manifest of a run of that model."""
    return lambda **options: manifest(**{"model": str(folder), "load_format": "auto", **options})


# One bit: the last digit of config.json is 16's, which becomes 17.
@pytest.mark.parametrize(
    ("changed", "at"),
    [("config.json", -2), ("tokenizer.json", -1), ("model.safetensors", -1), ("model.safetensors", 2**19)],
)
def test_another_model_of_the_same_name(folder, manifest_of, changed, at):
    """A checkpoint trained further has the same size in the same folder, but other numbers.

    Only the first and last 64 KiB were hashed: 400 kB changed between them went unnoticed. Here it is one bit.
    """
    before = manifest_of()
    content = bytearray((folder / changed).read_bytes())
    content[at] ^= 1
    (folder / changed).write_bytes(content)
    (found,) = differences(before, manifest_of())
    assert found == "the content of the model differs"


@pytest.mark.parametrize(
    ("name", "options"), [("consolidated.safetensors", {}), ("model.safetensors", {"load_format": "dummy"})]
)
def test_weights_that_are_not_loaded(folder, manifest_of, name, options):
    """Some hubs keep each model twice in one folder. Hashing what is not loaded takes as long again for nothing."""
    before = manifest_of(**options)
    (folder / name).write_bytes(b"other")
    assert differences(before, manifest_of(**options)) == []


def test_another_tokenizer_of_the_same_name(manifest_of, tmp_path):
    """The folder of --tokenizer was compared by its name only."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text("{}")
    before = manifest_of(tokenizer=str(own))
    (own / "tokenizer.json").write_text('{"added_tokens": []}')
    (found,) = differences(before, manifest_of(tokenizer=str(own)))
    assert found == "the content of --tokenizer differs"


def test_the_hash_does_not_delay_the_start(folder, monkeypatch):
    """Tens of gigabytes take seconds to hash: loading goes on meanwhile, and only the first row waits."""
    go = threading.Event()
    monkeypatch.setattr(
        "rosebatch.model.fingerprint.content_digests", lambda paths: go.wait(PATIENCE_SECONDS) and ["x"] * len(paths)
    )
    plan = plan_launch(RunConfig(model=str(folder), device="cpu"))
    job, fingerprint = JobConfig(input="-"), LocalService(plan).fingerprint()
    wait = build_manifest(job, model_info_of(plan), fingerprint, None, input_format="jsonl", columns=NAMED)
    go.set()
    assert len(wait()["model"]["fingerprint"]) == 64


def test_weights_that_cannot_be_read(manifest_of, monkeypatch):
    """An error on the thread is the run's error, in one line."""
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error", "/weights"))
    monkeypatch.setattr("rosebatch.model.content_digest._hash_piece", fail)
    with pytest.raises(UserError, match=r"^/weights: Input/output error$"):
        manifest_of()


@pytest.mark.parametrize("value", ["abc", "1.5", "-1", " 1", "1e9"])
def test_a_build_time_that_is_no_number(monkeypatch, value):
    """int() failed with "unexpected, please report it"."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    with pytest.raises(UserError, match=f"^SOURCE_DATE_EPOCH={value}: must be whole seconds since 1970"):
        now()


def test_a_build_time(monkeypatch):
    """Outputs are then reproducible byte for byte."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert now() == 1_700_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    assert now() > 1_700_000_000
