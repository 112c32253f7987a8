"""``python -m benchmarks.embeddings``: what is timed, and what is told."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import embeddings
from rosebatch.bench.scenario import configs_dir

MODEL = str(configs_dir() / "models" / "tiny-llama.toml")
FLAGS = ["--load-format", "dummy", "--num-prompts", "5", "--shortest", "3", "--longest", "9", "--repeats", "2"]


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["embeddings", "--model", MODEL, *FLAGS, *flags])
        embeddings.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rates(run, pooling):
    """Rates must be of the timed runs alone, and of all prompt tokens."""
    found = run("--pooling", pooling)
    assert len(found["seconds"]) == 2
    tokens = sum(map(len, embeddings.make_prompts(5, 3, 9, 1000, 0)))
    assert found["prompt_tokens"] == tokens
    assert found["prompt_tokens_per_s"]["max"] == pytest.approx(tokens / min(found["seconds"]))
    assert "vllm" not in found


def test_runs_differ_in_their_ids_alone():
    """Equal ids would let a cache serve the second run; other lengths would be other work."""
    first, second = (embeddings.make_prompts(20, 3, 9, 1000, run) for run in (0, 1))
    assert list(map(len, first)) == list(map(len, second))
    assert first != second


def test_beside_another_engine(run, monkeypatch, tmp_path):
    """The other engine must get the model's config and the same token ids; a ratio above 1 says that it took longer."""
    seen = []

    def ask(peer, specify):
        spec = specify(tmp_path)
        seen.append((peer, spec))
        return {"version": "1", "workloads": [{"seconds": [1e6, 2e6]}]}

    monkeypatch.setattr(embeddings, "ask", ask)
    monkeypatch.setattr(embeddings, "require_installed", lambda peer: None)
    found = run("--vllm-python", "python", "--vllm-args", '{"enforce_eager": true}')
    ((peer, spec),) = seen
    asked = ("rosebatch.bench.peers.vllm_embed", "python", {"enforce_eager": True})
    assert (peer.module, peer.python, spec["args"]) == asked
    # A shape without a folder once went out by the name "None".
    assert json.loads((Path(spec["model"]) / "config.json").read_text())["vocab_size"] == 1000
    assert spec["repeats"] == 2
    runs = [embeddings.make_prompts(5, 3, 9, 1000, run) for run in range(3)]
    assert [list(map(len, run)) for run in spec["workloads"][0]["prompts"]] == [list(map(len, run)) for run in runs]
    assert found["ratio"]["min"] > 1
