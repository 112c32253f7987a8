"""The manifest: what a resumed run is compared by."""

import json
from pathlib import Path

import pytest

from rosebatch.config import RunConfig
from rosebatch.job.manifest import build_manifest, differences
from rosebatch.launch import plan_launch

TOML = Path(__file__).parents[2] / "configs" / "models" / "tiny-llama.toml"


@pytest.fixture
def manifest():
    """The manifest of a run with some options, as read back from a file."""

    def make(
        input_digest="abc",
        input_format="jsonl",
        sampling=(),
        seed=None,
        result_column=None,
        return_token_ids=False,
        **options,
    ):
        options = {"model": str(TOML), "load_format": "dummy", "device": "cpu", **options}
        values = build_manifest(
            plan_launch(RunConfig(**options)),
            input_digest,
            input_format=input_format,
            sampling=dict(sampling),
            seed=seed,
            result_column=result_column,
            return_token_ids=return_token_ids,
        )
        return json.loads(json.dumps(values))

    return make


def test_the_same_run_has_no_differences(manifest):
    """Time, place and process must not make a run differ from itself."""
    assert differences(manifest(), manifest()) == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"input_digest": "def"}, "input was abc, is def"),
        ({"input_format": "openai"}, "input_format was jsonl, is openai"),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature was nothing, is 0.5"),
        ({"seed": 1}, "seed was None, is 1"),
        ({"result_column": "out"}, "result_column was None, is out"),
        ({"max_prompt_bytes": "1KiB"}, "max_prompt_bytes was 8388608, is 1024"),
        ({"return_token_ids": True}, "return_token_ids was False, is True"),
        ({"dtype": "float16"}, "dtype was float32, is float16"),
        ({"toggles": {"prefix_cache": False}}, "toggles.prefix_cache was True, is False"),
    ],
)
def test_what_changes_results_is_a_difference(manifest, changes, difference):
    """Otherwise one output could mix rows of two kinds unnoticed."""
    assert differences(manifest(dtype="float32"), manifest(**{"dtype": "float32", **changes})) == [difference]


def test_limits_may_change(manifest):
    """A run that was out of memory must be able to resume with less."""
    assert differences(manifest(), manifest(max_num_seqs=2, max_num_batched_tokens=64, kv_cache_memory=2**20)) == []


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_another_model_of_the_same_name(tmp_path, manifest, changed):
    """A checkpoint trained further has the same size in the same folder, but other numbers."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10, "n_positions": 16}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(2**20))
    before = manifest(model=str(folder), load_format="auto")
    content = bytearray((folder / changed).read_bytes())
    if changed == "config.json":
        content = content.replace(b'"n_positions": 16', b'"n_positions": 32')
    else:
        content[-1] ^= 1
    (folder / changed).write_bytes(content)
    (found,) = differences(before, manifest(model=str(folder), load_format="auto"))
    assert found.startswith("model.fingerprint was ")
