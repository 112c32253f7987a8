"""A model folder of 2 layers with a tokenizer of bytes, made once, and the command line called in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from rosebatch.cli.app import main
from tests.helpers.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
END, VOCAB = 256, 300
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More threads slow such a small model down, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer of all bytes, the chat template's marks, and tokens that are never used."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    marks = ["<|end|>", "<|user|>", "<|assistant|>"]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*marks, *(f"<|unused {i}|>" for i in range(VOCAB - 256 - len(marks)))])
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, large enough for answers that vary."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Calls the command line and gives its exit code, stdout and stderr."""

    def call(*args: Any) -> SimpleNamespace:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit_info.value.code, out=out, err=err)

    return call


@pytest.fixture
def generate(cli: Callable[..., Any], model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs ``generate --quiet`` on some lines with the small model. ``rows`` of the result are its stdout."""

    def call(lines: list[dict[str, Any]], *flags: Any) -> SimpleNamespace:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = cli("generate", source, "--model", model_folder, "--quiet", *flags)
        result.rows = [json.loads(line) for line in result.out.split("\n") if line]
        return result

    return call


@pytest.fixture(scope="session")
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a shell command in the repository's root. ``$PY`` is this Python, with the tests' import path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = os.environ | {"PYTHONPATH": path, "PY": sys.executable, "OMP_NUM_THREADS": "1"}

    def run(command: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            env=env | {name: str(value) for name, value in variables.items()},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def toy_toml() -> Path:
    """The shape of a model with 2 layers."""
    return ROOT / "configs" / "models" / "tiny-llama.toml"


@pytest.fixture
def toy(
    cli: Callable[..., SimpleNamespace], toy_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """Runs ``generate --quiet`` with random weights in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: cli("generate", *args, "--model", toy_toml, "--load-format", "dummy", "--quiet")
