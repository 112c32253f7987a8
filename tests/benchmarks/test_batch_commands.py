"""Two commands on one batch file: what each is told, what counts as an answer, and a model that both read alike."""

import json
import sys
from dataclasses import replace

import msgspec
import pytest
from transformers import AutoTokenizer

from benchmarks import whole_job
from benchmarks.batch_commands import run_vllm
from benchmarks.batch_works import WORKS, Texts
from benchmarks.random_folder import write_random_folder
from rosebatch.bench.against import PEERS
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.model.hf.config import read_model_config
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend, save_backend
from tests.helpers.json_lines import read_lines
from tests.helpers.small_llama import TEMPLATE

VOCAB = 400
WORDS = [first + second for first in "abcde" for second in "fghij"]
# Says what it was told, and answers "no"; its last row fails.
_VLLM = """
import json, os, sys

told = {"arguments": sys.argv[1:], "offline": os.environ["HF_HUB_OFFLINE"]}
print(json.dumps(told))
if "--crash" in sys.argv:
    raise SystemExit("no GPU")
with open(sys.argv[sys.argv.index("-i") + 1]) as lines:
    rows = [json.loads(line) for line in lines]
body = {"choices": [{"message": {"content": "no"}}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
with open(sys.argv[sys.argv.index("-o") + 1], "w") as out:
    for row in rows:
        response = {"body": body} if row is not rows[-1] else None
        out.write(json.dumps({"custom_id": row["custom_id"], "response": response}) + "\\n")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two layers with a tokenizer of bytes and some words."""
    tokenizer, folder = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("models") / "small"
    backend = byte_backend(*(f" {word}".encode() for word in WORDS))
    save_backend(
        backend, tokenizer, chat_template=TEMPLATE, eos_token="<eos>", tokenizer_class="PreTrainedTokenizerFast"
    )
    shape = load_toml(configs_dir() / "models" / "tiny-llama.toml", ModelConfig)
    shape = msgspec.structs.replace(shape, vocab_size=VOCAB, max_model_len=2048)
    write_random_folder(shape, tokenizer, folder)
    return tokenizer, folder


def test_the_folder_of_a_shape(model):
    """Engines must read one model: the tokenizer's end token, text for each token id, and token ids as ever."""
    tokenizer, folder = model
    config = read_model_config(folder)
    assert (config.vocab_size, config.eos_token_ids) == (VOCAB, (EOS,))
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "red af, <eos> and " + " ".join(WORDS)
    before = Tokenizer.load(tokenizer).encode([text])
    assert ours.encode([text]) == before
    assert theirs(text)["input_ids"] == before[0]
    assert all(theirs.decode([token]) for token in range(VOCAB))
    assert ours.backend.get_vocab_size() == VOCAB


def test_texts_have_the_tokens_asked_for():
    """Words of several tokens would make prompts longer than the table says."""
    texts = Texts(["\u0120red", "blue", "\u0120Green", "\u0120no\u0120yes", "\u2581pink", "\u0120"])
    assert set(texts.of(50).split()) == {"red", "pink"}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("labels", [("x", 3)], [("x", 2)]),
        ("choices", [("mixed", 9)], [("mix", 3), ("", 0)]),
        ("schema", [], [("{}", 2), ("[]", 2), ("no", 1)]),
    ],
)
def test_what_is_valid(name, good, bad):
    """A command that answers anything at all must not look fast."""
    (body,) = WORKS[name].make(Texts(["\u0120" + word for word in WORDS]), 0)
    if name == "schema":
        names = body["response_format"]["json_schema"]["schema"]["required"]
        answer = dict(zip(names, ["", "mixed", 7, True, ["mixed"]], strict=True))
        wrongs = dict(zip(names, ["x" * 41, "mix", True, 1, []], strict=True))
        good = [(json.dumps(answer), 30)]
        bad = [*bad, *((json.dumps({**answer, name: wrong}), 30) for name, wrong in wrongs.items())]
    assert all(WORKS[name].is_valid(body, *each) for each in good)
    assert not any(WORKS[name].is_valid(body, *each) for each in bad)


@pytest.fixture
def site(tmp_path):
    """A folder with a package in vLLM's place."""
    cli = tmp_path / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    for folder in (cli, *list(cli.parents)[:2]):
        (folder / "__init__.py").touch()
    (cli / "main.py").write_text(_VLLM)
    (tmp_path / "vllm-9.9.dist-info").mkdir()
    (tmp_path / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    return tmp_path


@pytest.mark.thorough
def test_both_answer_the_same_file(site, model, monkeypatch, capsys):
    """Both get the file, the model and its name. A row without an answer is not valid, and costs no other row."""
    flags = ["--against", "vllm", "--peer-path", str(site), "--model", str(model[1]), "--folder", str(site / "files")]
    flags += ["--works", "schema", "--scale", "0.003", "--flags", "--device cpu --kv-cache-memory 16MiB"]
    monkeypatch.setattr(sys, "argv", ["whole_job", *flags])
    whole_job.main()
    files = site / "files" / "schema"
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4, "a header, a line for each command, the JSON"
    found = json.loads(out[-1])["works"]["schema"]
    ours, theirs = found["ours"], found["vllm"]
    assert (found["rows"], ours["valid"], theirs["valid"], theirs["engine"]) == (3, 1, 0, "vllm 9.9")
    assert (theirs["prompt_tokens"], theirs["output_tokens"]) == (14, 4)
    assert ours["prompt_tokens"] > 3 * 60
    assert 0 < ours["ready_s"] < ours["whole_s"]
    assert found["ratio"]["whole"] == theirs["whole_s"] / ours["whole_s"]
    (told,) = read_lines(files / "vllm.log")
    assert told["offline"] == "1"
    assert told["arguments"][:5] == ["run-batch", "-i", str(files / "batch.jsonl"), "-o", str(files / "vllm.jsonl")]
    assert told["arguments"][5:9] == ["--model", str(model[1]), "--served-model-name", "model"]


def test_a_command_that_fails(site):
    """Its figures would be those of an empty file."""
    peer = replace(PEERS["vllm"], path=str(site))
    with pytest.raises(SystemExit, match=r"(?s)no GPU.*--crash: exit code 1$"):
        run_vllm(peer, site, site / "batch.jsonl", site, ["--crash"])
