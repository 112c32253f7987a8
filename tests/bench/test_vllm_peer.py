"""What vLLM is told, by a package in its place."""

import json
import os
import subprocess
import sys

import pytest

from rosebatch.bench.peers import vllm
from tests.helpers.checkout import ROOT

# Like vLLM with several GPUs, it sends the function to a process whose main module is another one.
_FAKE = """
import pickle, subprocess, sys

__version__ = "0"


class SamplingParams:
    def __init__(self, **given):
        pass


class LLM:
    def __init__(self, **given):
        pass

    def apply_model(self, function):
        code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).__name__)"
        sent = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(function), stdout=-1, check=True)
        print("applied", sent.stdout.decode(), file=sys.stderr)

    def generate(self, inputs, params, use_tqdm):
        return []
"""


# As in vLLM 0.33, a model that embeds gives scores as well, and for these it asks for a tokenizer.
_EMBEDS = """
from vllm.entrypoints.pooling import factories

__version__ = "0"


class LLM:
    def __init__(self, **given):
        if factories.enable_scoring_api(("embed",), None):
            raise ValueError("Tokenizer not available when `skip_tokenizer_init=True`")

    def embed(self, inputs, use_tqdm):
        return inputs
"""
_FACTORIES = """
def enable_scoring_api(tasks, config):
    return True
"""


def run_peer(module, folder):
    spec = {"model": "m", "load_format": "dummy", "dtype": "auto", "max_num_seqs": 1, "prefix_cache": False, "args": {}}
    spec |= {"quantization": None, "kv_cache_dtype": "auto"}
    spec |= {"repeats": 0, "workloads": [{"prompts": [[]], "output_lens": [], "sampling": {}}]}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", f"rosebatch.bench.peers.{module}", str(folder / "spec.json")]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


def test_its_worker_processes_can_load_what_changes_the_weights(tmp_path):
    """A function of the main module was unknown there: with two GPUs, vLLM could not be timed."""
    (tmp_path / "vllm.py").write_text(_FAKE)
    done = run_peer("vllm", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "applied without_biases" in done.stderr
    assert json.loads(done.stdout)["version"] == "0"


def test_embeddings_need_no_tokenizer(tmp_path):
    """vLLM 0.33 ended before its first run: the token ids of a bench come without a tokenizer."""
    pooling = tmp_path / "vllm" / "entrypoints" / "pooling"
    pooling.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(_EMBEDS)
    (pooling / "factories.py").write_text(_FACTORIES)
    done = run_peer("vllm_embed", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", [{}, {"quantization": "fp8_per_block"}])
def test_it_is_told_our_form(given):
    """In 16 bits it was compared with our fp8. What a user names wins."""
    plain = {"model": "m", "load_format": "auto", "dtype": "bfloat16", "max_num_seqs": 1, "prefix_cache": False}
    told = vllm.engine_arguments({**plain, "quantization": "fp8", "kv_cache_dtype": "fp8", "args": given})
    assert (told["quantization"], told["kv_cache_dtype"]) == (given.get("quantization", "fp8_per_channel"), "fp8")
    told = vllm.engine_arguments({**plain, "quantization": None, "kv_cache_dtype": "auto", "args": {}})
    assert not told.keys() & {"quantization", "kv_cache_dtype"}
