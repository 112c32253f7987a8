"""The kernels that the warm-up compiles are those that a run launches."""

import os
import subprocess
import sys

import pytest

from tests.helpers.checkout import ROOT, python_path

pytestmark = pytest.mark.gpu

# Prints what was compiled while the model was loaded, and what while it ran.
RUN = """
import sys
from triton import knobs
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.job.workers.first_compile import run_briefly
from rosebatch.launch.launch import launch

compiled = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.fn.__name__)
# Not all of the GPU: other tests use it, too.
options = dict(load_format="dummy", device="cuda", parallel_compile=True, kv_cache_memory=2**32)
config = RunConfig.of(sys.argv[1], **options)
engine = launch(config).engine
loading, running = list(compiled), compiled
del running[:]
run_briefly(engine)
# One after the other: each of these steps is sampled with one feature alone.
for feature in dict(presence_penalty=1.0), dict(logit_bias={5: 1.0}), dict(logprobs=0), dict(logprobs=5):
    list(engine.run([Request(0, (0,) * 9, SamplingParams(max_tokens=20, ignore_eos=True, **feature))]))
print(len(loading), *running)
"""


def test_a_run_compiles_nothing_more(tmp_path):
    """Where a launch has other arguments than in the warm-up, the run would wait for the compiler."""
    path = python_path(os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", RUN, str(ROOT / "configs/models/gpt2.toml")]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert int(first[0]) >= 10
    assert first[1:] == []
    assert second == ["0"]
