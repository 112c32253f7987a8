"""What LMDeploy is told, by a package in its place; and its random weights."""

import json
import subprocess

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rosebatch.bench.peers.random_checkpoint import RandomCheckpoint
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.model.hf.folder import write_config
from tests.helpers.forked_jobs import python

_MESSAGES = """
from dataclasses import dataclass


@dataclass
class GenerationConfig:
    max_new_tokens: int
    ignore_eos: bool
    random_seed: int
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 0.8


@dataclass
class TurbomindEngineConfig:
    dtype: str
    max_batch_size: int
    enable_prefix_caching: bool
    enable_metrics: bool
    session_len: int = 0
"""
# An instance serves one request at a time. A thread goes on for ever, as the engine's own.
_ENGINE = """
import asyncio
import sys
import threading
from types import SimpleNamespace

from lmdeploy.turbomind import model_loader


class Tokenizer:
    def __init__(self, folder):
        raise OSError("there is no tokenizer")


class TurboMind:
    def __init__(self, folder, engine_config):
        Tokenizer(folder)
        weights = model_loader.create_checkpoint(folder, mappings=[])
        print("engine", engine_config, weights.has("model.norm.weight"), file=sys.stderr)
        threading.Thread(target=threading.Event().wait).start()

    def create_instance(self):
        return Instance()


class Instance:
    busy = False

    async def async_stream_infer(self, number, prompt, gen_config, stream_output):
        assert not self.busy
        self.busy = True
        print("request", gen_config, file=sys.stderr)
        for _ in range(gen_config.max_new_tokens if stream_output else 1):
            await asyncio.sleep(0)
            yield SimpleNamespace(token_ids=[7] * (1 if stream_output else gen_config.max_new_tokens))
        self.busy = False
"""
_LOADER = """
def create_checkpoint(folder, mappings=()):
    raise OSError("there are no weights")
"""
OUTPUTS = [3, 1, 2, 4, 2]


@pytest.fixture
def run(tmp_path):
    turbomind = tmp_path / "lmdeploy" / "turbomind"
    turbomind.mkdir(parents=True)
    (tmp_path / "lmdeploy" / "__init__.py").write_text('__version__ = "9"')
    (tmp_path / "lmdeploy" / "messages.py").write_text(_MESSAGES)
    (turbomind / "__init__.py").touch()
    (turbomind / "_turbomind.py").touch()
    (turbomind / "turbomind.py").write_text(_ENGINE)
    (turbomind / "model_loader.py").write_text(_LOADER)
    write_config(load_toml(configs_dir() / "models" / "tiny-llama.toml", ModelConfig), tmp_path)

    def call(work, **args):
        spec = {"model": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 2}
        spec |= {"prefix_cache": True, "args": args, "repeats": 1, **work}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        command = [python(), "-m", "rosebatch.bench.peers.lmdeploy", str(tmp_path / "spec.json")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    return call


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": 0.0}, "top_k=1, top_p=1.0, temperature=0.8"),
        ({"temperature": 0.6, "top_p": 0.9}, "top_k=0, top_p=0.9, temperature=0.6"),
    ],
)
def test_what_it_is_told(run, sampling, told):
    """Its defaults would sample, of 50 tokens. More requests than fit wait; its threads would keep the process."""
    workload = {"prompts": [[[5]] * 5] * 2, "output_lens": OUTPUTS, "sampling": sampling}
    done = run({"workloads": [workload]}, session_len=99)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["version"], len(found["workloads"][0]["seconds"])) == ("9", 1)
    engine = "dtype='bfloat16', max_batch_size=2, enable_prefix_caching=True, enable_metrics=False, session_len=99"
    assert f"engine TurbomindEngineConfig({engine}) True" in done.stderr
    requests = [line for line in done.stderr.splitlines() if line.startswith("request")]
    assert len(requests) == 2 * len(OUTPUTS)
    assert all(told in line and "ignore_eos=True" in line for line in requests)


@pytest.mark.thorough
def test_it_streams(run):
    """Each token has its own time of arrival."""
    replays = {"prompts": [[[5]] * 5] * 2, "output_lens": OUTPUTS, "sampling": {"temperature": 0.0}}
    done = run({"replays": replays | {"times": [[0.0] * 5]}})
    assert done.returncode == 0, done.stderr
    (timed,) = json.loads(done.stdout)["runs"]
    assert len(timed["itl"]) == sum(OUTPUTS) - len(OUTPUTS)


@pytest.mark.thorough
def test_a_failure_ends_the_process(run):
    """Its threads would keep it, and the bench would wait for ever."""
    done = run({"workloads": []}, unknown=1)
    assert done.returncode == 1
    assert "TypeError" in done.stderr
    done = run({"workloads": [{"prompts": [[[5]]] * 2, "output_lens": [1, 1], "sampling": {"temperature": 0.0}}]})
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


@pytest.mark.parametrize("name", ["tiny-llama", "qwen3-0.6b"])
def test_random_weights(tmp_path, name):
    """A tensor that is missing, or of another shape, stops the engine; norms near zero would make all tokens alike."""
    write_config(load_toml(configs_dir() / "models" / f"{name}.toml", ModelConfig), tmp_path)
    weights = RandomCheckpoint(str(tmp_path), "bfloat16", "cpu")
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).state_dict()
    assert all(weights.has(key) for key in expected)
    assert not weights.has("model.layers.0.self_attn.q_proj.bias")
    assert torch.equal(weights.get("model.norm.weight"), torch.ones_like(expected["model.norm.weight"], device="cpu"))
    key = "model.layers.1.mlp.down_proj.weight"
    drawn = weights.pop(key)
    assert (drawn.shape, drawn.dtype) == (expected[key].shape, torch.bfloat16)
    assert 0.015 < drawn.float().std() < 0.025
    assert weights.get(key, index=2).shape == expected[key].shape[1:]
    with pytest.raises(KeyError):
        weights.get("model.layers.99.mlp.down_proj.weight")
