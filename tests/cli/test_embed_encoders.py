"""``rosebatch embed`` by encoders, in folders as sentence-transformers writes them: texts in, vectors out."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from rosebatch import LLM
from rosebatch.core.errors import UserError
from rosebatch.engine.engine import Engine
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import read_lines, write_lines

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "rose",
    "is",
    "tulip",
    "##s",
    "in",
    "spring",
    "and",
    "grow",
    "from",
    "bulbs",
    ".",
]
TEXTS = ["a rose", "Tulips grow from bulbs .", "a rose is a rose is a rose is a rose", "bulbs", "in spring"] * 3
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder, transformers' model, and its tokenizer's ids of each text."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, initializer_range=0.2, **sizes)
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    _say(folder, "Pooling", "Dense", "Dense", "Normalize")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    for number, (name, sizes) in enumerate({"2_Dense": (32, 40), "3_Dense": (40, 24)}.items()):
        (folder / name).mkdir()
        activation = f"torch.nn.modules.{('linear.Identity', 'activation.Tanh')[number]}"
        values = {"in_features": sizes[0], "out_features": sizes[1], "bias": bool(number)}
        (folder / name / "config.json").write_text(json.dumps({**values, "activation_function": activation}))
        weights = {"linear.weight": torch.randn(sizes[1], sizes[0])}
        save_file(
            weights | ({"linear.bias": torch.randn(sizes[1])} if number else {}), folder / name / "model.safetensors"
        )
    return folder, model, [tokenizer.encode(text.lower()).ids for text in TEXTS]


def _say(folder, *kinds):
    parts = [("", "Transformer"), *((f"{number}_{kind}", kind) for number, kind in enumerate(kinds, start=1))]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="session")
def expected(written):
    """By transformers, in one padded batch: the parts of the folder, by hand."""
    from safetensors.torch import load_file

    folder, model, ids = written
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each)) for each in ids], batch_first=True)
    with torch.inference_mode():
        states = model(padded, attention_mask=mask).last_hidden_state
    one, two = (load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
    vectors = torch.tanh(states[:, 0] @ one["linear.weight"].T @ two["linear.weight"].T + two["linear.bias"])
    return torch.nn.functional.normalize(vectors).numpy()


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", [{"prompt": text} for text in TEXTS])


@pytest.fixture
def embed(cli, source, written, tmp_path):
    def run(*flags, target="out.jsonl"):
        result = cli(
            "embed", source, "-o", tmp_path / target, "--model", written[0], "--dtype", "float32", "-q", *flags
        )
        assert (result.code, result.err) == (0, "")
        return np.array([row["embedding"] for row in read_lines(tmp_path / target)], np.float32)

    return run


def test_vectors_are_those_of_the_folder(embed, expected):
    """Special tokens, small letters, the first token, two products: each that is left out changes all vectors."""
    found = embed()
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert embed("--max-num-seqs", 1, target="alone.jsonl").tobytes() == found.tobytes()
    cut = embed("--dimensions", 5, target="cut.jsonl")
    shorter = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, shorter, rtol=0, atol=TOLERANCE)


def test_in_python(written, expected):
    """The library takes another way than the command line."""
    with LLM(written[0], dtype="float32") as llm:
        outputs = llm.embed(TEXTS)
        found = np.array([each.outputs.embedding for each in outputs], np.float32)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        assert outputs[0].outputs.hidden_size == 24
        assert outputs[0].prompt_token_ids == written[2][0]


@pytest.mark.thorough
def test_two_workers_and_two_ranks(embed, expected):
    """Workers load the products too, and so does each rank."""
    one = embed()
    assert embed("-dp", 2, target="two.jsonl").tobytes() == one.tobytes()
    np.testing.assert_allclose(embed("-tp", 2, target="ranks.jsonl"), expected, rtol=0, atol=TOLERANCE)


def test_a_run_that_was_broken_off(cli, embed, source, written, tmp_path, monkeypatch):
    """It goes on where it was, with the bytes of a run without a break."""
    whole, step, steps = embed(), Engine.step, iter(range(100))

    def step_or_end(self):
        if next(steps) == 3:
            raise UserError("broken off")
        return step(self)

    small = ["--max-num-batched-tokens", 8]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step_or_end)
        target, flags = tmp_path / "broken.jsonl", ["--model", written[0], "--dtype", "float32", "-q", *small]
        assert "broken off" in cli("embed", source, "-o", target, *flags).err
    assert embed("--resume", *small, target="broken.jsonl").tobytes() == whole.tobytes()


def test_what_an_encoder_does_not_do(cli, source, written, tmp_path):
    """A line each, before the weights are read; a check says what it would not read of them."""
    flags = ["--model", written[0], "-q"]
    told = "has no output projection: it can embed, and not generate; use rosebatch embed"
    require_error(cli("generate", source, *flags), 2, told)
    require_error(cli("embed", source, "--dimensions", 25, *flags), 2, "a vector of the model has 24 numbers")
    checked = cli("check", source, "--embed", "--model", written[0])
    assert checked.code == 0
    assert "no KV cache, for a row of up to 20 tokens" in checked.out
    assert "not read: 2 tensors of the weights, such as pooler.dense" in checked.out


def test_a_report_has_no_cache(cli, source, written, tmp_path):
    """A share of no blocks is a division by zero."""
    report = tmp_path / "report.json"
    result = cli("embed", source, "-o", tmp_path / "out.jsonl", "--model", written[0], "--report", report)
    assert "KV cache: none, nothing is kept of a prompt" in result.err
    assert "embedding: state of the first token, normalised" in result.err
    assert json.loads(report.read_text())["engine"]["kv_cache_blocks"] == 0
