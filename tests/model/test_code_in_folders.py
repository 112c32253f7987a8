"""Code in a model folder never runs, and nobody is asked whether it may."""

import json
import pickle
import subprocess

import pytest
from tokenizers import Tokenizer as Backend

from rosebatch.core.errors import UserError
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.checkout import environment
from tests.helpers.forked_jobs import python
from tests.model import gguf_files
from tests.model.odd_folders import write_good

AUTO_MAP = {
    "AutoTokenizer": ["custom.CustomTokenizer", "custom.CustomTokenizer"],
    "AutoConfig": "custom.CustomConfig",
    "AutoModelForCausalLM": "custom.CustomModel",
}
# Older formats, which transformers converts.
OLDER = ("vocab.json", "tokenizer.model")


@pytest.fixture
def folder(tmp_path):
    """A good folder with code beside it, and every file that may point to the code doing so; ``ran`` is the trace."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    write_good("llama", folder)
    code = f"import pathlib; pathlib.Path({str(ran)!r}).write_text('ran')\n"
    for name in ("custom", "tokenization_custom", "__init__", "setup", "conftest", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)

    class Evil:
        def __reduce__(self):
            return exec, (code,)

    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "auto_map": AUTO_MAP, "trust_remote_code": True}))
    return folder


def make_older(folder, file):
    """The tokenizer as a format of older models, of a class that only the folder has."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    (folder / file).write_text(json.dumps(backend.get_vocab()) if file == "vocab.json" else "no sentencepiece")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "CustomTokenizer"}))
    if file == "vocab.json":
        (folder / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": AUTO_MAP}))


@pytest.fixture
def yes(monkeypatch):
    """Somebody who answers every question with yes, as ``yes |`` does; gives the questions."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *args: (asked.append(args), "yes")[1])
    return asked


@pytest.mark.parametrize("file", OLDER)
def test_code_of_a_tokenizer_does_not_run(folder, file, yes, tmp_path):
    """``yes | rosebatch ...`` executed it: transformers asked on stdout and read stdin, where the rows may be."""
    make_older(folder, file)
    with pytest.raises(UserError, match="unreadable tokenizer") as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value)
    assert yes == []
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_good_tokenizer_does_not_run(folder, yes, tmp_path):
    """The tokenizer needs none of it."""
    assert Tokenizer.load(folder).encode(["hi"]) == [[71, 72]]
    assert yes == []
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_gguf_file_does_not_run(folder, yes, tmp_path, write_gguf, toy, cache, monkeypatch):
    """transformers converts the sentencepiece vocabulary of a GGUF file, and looked at the files beside it."""
    import gguf
    import torch

    from rosebatch.model.gguf.cache import converted_folder

    def add_sentencepiece(writer):
        writer.add_tokenizer_model("llama")
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_scores([0.0] * len(tokens))
        for add in (writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id):
            add(0)

    monkeypatch.setattr(gguf_files, "add_tokenizer", add_sentencepiece)
    make_older(folder, "vocab.json")
    path = write_gguf("llama", toy).rename(folder / "model.gguf")
    assert (converted_folder(path, torch.float32) / "tokenizer.json").exists()
    assert yes == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["tokenizer.json", *OLDER])
def test_the_command_line_reads_no_answer(folder, file, tmp_path):
    """The whole command, with "yes" on stdin: neither code nor question, and at most one line of error."""
    if file != "tokenizer.json":
        make_older(folder, file)
    source, target = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    source.write_text('{"prompt": "hi", "max_tokens": 2}\n')
    command = [python(), "-m", "rosebatch", "generate", source, "-o", target, "--model", folder, "--device", "cpu"]
    options = {"input": "yes\n" * 1000, "env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in done.stdout + done.stderr
    if file == "tokenizer.json":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2
        *told, last = done.stderr.splitlines()
        assert last.startswith("rosebatch: error: ")
        assert all(line.startswith("rosebatch: ") and " fits: " in line for line in told)


def test_weights_are_never_unpickled(folder, tmp_path):
    """Without safetensors there are no weights, whatever else is there."""
    import torch

    from rosebatch.model.weights import SafetensorsWeights

    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin is not read, for it may run code"):
        SafetensorsWeights(folder, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "ran").exists()
