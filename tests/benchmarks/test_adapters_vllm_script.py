"""``python -m benchmarks.adapters_vllm``: both engines have the same rows and adapters. Another package is vLLM."""

import json
import sys

import pytest

from benchmarks import adapters_vllm
from rosebatch.bench.scenario import configs_dir

# What it reads of an adapter, and refuses, is as in vLLM 0.33.
_FAKE = """
import json
from pathlib import Path

from safetensors import safe_open

__version__ = "0"
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class SamplingParams:
    def __init__(self, **given):
        assert given.pop("ignore_eos") and not given.pop("detokenize") and given.pop("temperature") == 0
        self.max_tokens = given.pop("max_tokens")
        assert not given


class Out:
    def __init__(self, tokens):
        self.token_ids, self.outputs = tokens, [self]


class LLM:
    def __init__(self, model, **given):
        self.hidden = json.loads((Path(model) / "config.json").read_text())["hidden_size"]
        assert given["load_format"] == "dummy" and given["enable_lora"] and not given["enable_prefix_caching"]
        assert given["skip_tokenizer_init"]
        self.given = given

    def generate(self, prompts, sampling, *, lora_request, use_tqdm):
        assert len(lora_request) == len(prompts) <= self.given["max_num_seqs"]
        named = {each.lora_name: each for each in lora_request if each}
        assert len(named) <= self.given["max_loras"]
        for each in named.values():
            self.read(Path(each.lora_path))
        print("served", *(each.lora_int_id if each else 0 for each in lora_request))
        longest = len(prompts[0]["prompt_token_ids"]) + sampling.max_tokens
        assert longest == self.given["max_model_len"]
        return [Out([each.lora_int_id if each else 0] * sampling.max_tokens) for each in lora_request]

    def read(self, folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] <= self.given["max_lora_rank"] and config["bias"] == "none"
        assert set(config["target_modules"]) == _PROJECTIONS and config["lora_alpha"]
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            names = sorted(file.keys())
            assert len(names) == 2 * 2 * len(_PROJECTIONS)
            for name in names:
                *module, part, weight = name.removeprefix("base_model.model.").split(".")
                assert module[:2] == ["model", "layers"] and module[-1] in _PROJECTIONS and weight == "weight"
                assert part in ("lora_A", "lora_B")
            a = file.get_tensor("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight")
            assert a.shape == (config["r"], self.hidden) and a.float().std() > 0
"""
_REQUEST = """
class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The script's lines of JSON and what it told, with another package in vLLM's place."""
    lora = tmp_path / "vllm" / "lora"
    lora.mkdir(parents=True)
    (lora / "__init__.py").touch()
    (lora / "request.py").write_text(_REQUEST)

    def run(fake, engines=("rosebatch", "vllm")):
        (tmp_path / "vllm" / "__init__.py").write_text(fake)
        flags = {"model": configs_dir() / "models" / "tiny-llama.toml", "device": "cpu", "peer-path": tmp_path}
        flags |= {"rows": 4, "prompt": 5, "length": 3, "adapters": 3, "rank": 8, "repeats": 2, "share": 0.1}
        command = ["adapters_vllm", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
        monkeypatch.setattr(sys, "argv", [*command, "--used", "3", "0", "--engines", *engines])
        adapters_vllm.main()
        said = capfd.readouterr()
        return json.loads(said.out.splitlines()[-1]), said.err

    return run


@pytest.mark.thorough
def test_both_engines_are_timed(run):
    """A figure of another work, or of adapters that neither engine adds, would be no comparison."""
    found, told = run(_FAKE)
    assert told.count("served 1 2 3 1\n") == told.count("served 0 0 0 0\n") == 3
    for engine in ("rosebatch", "vllm"):
        assert found[engine]["changed_rows"] == {"3": 4}
        assert [len(each) for each in found[engine]["seconds"].values()] == [2, 2]
    for used, ratio in found["ratio"].items():
        seconds = [found[engine]["median"][used] for engine in ("vllm", "rosebatch")]
        assert ratio == pytest.approx(seconds[0] / seconds[1], abs=1e-3)
    assert [*found["ratio"]] == ["3", "0"]


@pytest.mark.thorough
def test_an_engine_that_fails_is_told(run):
    """Minutes of a GPU were spent, and neither its own words nor the other's figures were told."""
    found, told = run("raise ValueError('no GPU')", engines=["vllm"])
    assert found == {"vllm": {"failed": 1}, "ratio": {}}
    assert "no GPU" in told
