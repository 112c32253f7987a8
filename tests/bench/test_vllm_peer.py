"""What vLLM is told, by a package in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_its_worker_processes_can_load_what_changes_the_weights(tmp_path):
    """A function of the main module was unknown there: with two GPUs, vLLM could not be timed."""
    (tmp_path / "vllm.py").write_text(_FAKE)
    spec = {"model": "m", "load_format": "dummy", "dtype": "auto", "max_num_seqs": 1, "prefix_cache": False, "args": {}}
    spec |= {"repeats": 0, "workloads": [{"prompts": [[]], "output_lens": [], "sampling": {}}]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "rosebatch.bench.peers.vllm", str(tmp_path / "spec.json")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "applied without_biases" in done.stderr
    assert json.loads(done.stdout)["version"] == "0"
