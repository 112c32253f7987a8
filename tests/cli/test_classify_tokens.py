"""``rosebatch classify`` with heads for tokens and for steps: from files of prompts to labels of their tokens."""

import json

import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, Qwen2Config, Qwen2Model

from rosebatch import LLM
from rosebatch.model.families.qwen import ARCHITECTURES as QWEN
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes

LABELS = {0: "O", 1: "B-PER", 2: "B-LOC"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "rose", "##s", "in", "par", "##is", "."]
TEXT = "  Roses in\u00a0PARIS \U0001f339."
TOLERANCE = 1e-5
STEP = QWEN["Qwen2ForCausalLM"].rewards["ForProcessRewardModel"].step_token
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def tagger(tmp_path_factory):
    """The folder of an encoder that labels tokens, and the model."""
    folder = tmp_path_factory.mktemp("tagger")
    torch.manual_seed(0)
    names = {"id2label": LABELS, "label2id": {label: number for number, label in LABELS.items()}}
    sizes = {**_SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 64, "initializer_range": 0.6}
    model = BertForTokenClassification(BertConfig(**names, **sizes)).eval()
    with torch.no_grad():
        # So that labels differ.
        model.classifier.bias -= model(torch.arange(len(WORDS))[None]).logits[0].mean(0)
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(WORDS[:4])
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(folder / "tokenizer.json"))
    return folder, model


def probs_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[0].softmax(1)


ROWS = [
    {"id": "a", "prompt": TEXT},
    {"id": "b", "prompt_token_ids": [2, 4, 5, 3]},
    {"id": "c", "prompt": TEXT, "truncate_prompt_tokens": 3},
    {"id": "d", "prompt": ""},
    {"id": "e", "prompt_token_ids": [99]},
]


def test_tokens_have_their_labels_and_places(cli, tagger, tmp_path):
    """Places counted bytes, or those of the text in small letters; a token had the label of another."""
    folder, model = tagger
    source, target = write_lines(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    flags = ["--model", folder, "--dtype", "float32"]
    assert cli("classify", source, "-o", target, "--token-probs", *flags).code == 3
    rows = read_lines(target)
    assert codes(rows) == [None] * 3 + ["empty_prompt", "invalid_token_id"]
    places = [("[CLS]", None, None), ("rose", 2, 6), ("##s", 6, 7), ("in", 8, 10), ("par", 11, 14), ("##is", 14, 16)]
    places += [("[UNK]", 17, 18), (".", 18, 19), ("[SEP]", None, None)]
    assert [(t["token"], t["start"], t["end"]) for t in rows[0]["tokens"]] == places
    assert [(t["token"], t["start"], t["end"]) for t in rows[2]["tokens"]] == places[-3:]
    assert [(t["token"], t["start"], t["end"]) for t in rows[1]["tokens"]] == [
        (WORDS[i], None, None) for i in ROWS[1]["prompt_token_ids"]
    ]
    for row, ids in ((rows[0], [2, 4, 5, 6, 7, 8, 1, 9, 3]), (rows[1], [2, 4, 5, 3]), (rows[2], [1, 9, 3])):
        assert row.keys() == {"id", "index", "tokens", "usage"}
        for token, right in zip(row["tokens"], probs_of(model, ids), strict=True):
            assert token["probs"] == pytest.approx(right.tolist(), abs=TOLERANCE)
            assert (token["label"], token["score"]) == (LABELS[int(right.argmax())], max(token["probs"]))
    assert len({token["label"] for token in rows[0]["tokens"]}) > 1

    # Without the flag, numbers of other labels are left out.
    assert cli("classify", source, "-o", tmp_path / "out.parquet", *flags).code == 3
    table = pq.read_table(tmp_path / "out.parquet")
    plain = [[{n: v for n, v in token.items() if n != "probs"} for token in row["tokens"]] for row in rows[:3]]
    for found, own in zip(table["tokens"].to_pylist(), [*plain, None, None], strict=True):
        assert found == (None if own is None else [token | {"score": pytest.approx(token["score"])} for token in own])
    assert table["label"].null_count == len(ROWS)


def test_tokens_of_the_second_type(tagger):
    """They had labels, and empty texts."""
    with LLM(tagger[0], dtype="float32") as llm:
        (output,) = llm.classify([[2, 4, 3, 4 + len(WORDS), 3 + len(WORDS)]])
    assert [token.token for token in output.outputs.tokens] == ["[CLS]", "rose", "[SEP]", "rose", "[SEP]"]


def test_a_head_for_tokens_scores_nothing(cli, tagger, tmp_path):
    """Each row had the same error."""
    source = write_lines(tmp_path / "in.jsonl", [{"text_1": "a", "text_2": "b"}])
    require_error(cli("score", source, "--model", tagger[0]), 2, "a score needs a head for whole prompts")


def test_the_library_gives_all_numbers(tagger):
    """A list of tokens in one prompt's place, or raw outputs after the activation."""
    folder, model = tagger
    with LLM(folder, dtype="float32") as llm:
        (output,) = llm.classify([TEXT])
        right = probs_of(model, output.prompt_token_ids)
        assert output.outputs.num_classes == len(LABELS)
        assert torch.tensor(output.outputs.probs) == pytest.approx(right, abs=TOLERANCE)
        assert [TEXT[t.start : t.end] for t in output.outputs.tokens[1:3]] == ["Rose", "s"]
        (reward,) = llm.reward([TEXT])
        assert torch.tensor(reward.outputs.data).softmax(1) == pytest.approx(right, abs=TOLERANCE)
        with pytest.raises(ValueError, match="a score needs a head for whole prompts"):
            llm.score("a", ["b"])


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """The folder of a decoder that rates steps, and its last product's weights."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    model = Qwen2Model(Qwen2Config(**_SIZES, num_key_value_heads=2, vocab_size=STEP + 1, max_position_embeddings=64))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForProcessRewardModel"]}))
    weights = {"score.0.weight": torch.randn(32, 32), "score.0.bias": torch.randn(32)}
    weights |= {"score.2.weight": torch.randn(2, 32), "score.2.bias": torch.randn(2)}
    states = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file({**states, **weights}, folder / "model.safetensors", {"format": "pt"})
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder


def test_steps_have_rewards(cli, judge, tmp_path):
    """A number for each step; a prompt without steps is an error row, and does not end the job."""
    rows = [{"prompt_token_ids": [5, STEP, 6, 7, STEP]}, {"prompt_token_ids": [5, STEP]}, {"prompt": "none"}]
    source, target = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert cli("classify", source, "-o", target, "--model", judge, "--dtype", "float32").code == 3
    both, one, none = read_lines(target)
    assert both.keys() == {"index", "rewards", "usage"}
    assert both["rewards"][:1] == one["rewards"]
    assert none["error"]["code"] == "nothing_to_score"
    with LLM(judge, dtype="float32") as llm:
        (output,) = llm.reward([rows[0]["prompt_token_ids"]])
    assert [good for _, good in output.outputs.data] == pytest.approx(both["rewards"])
    assert [sum(each) for each in output.outputs.data] == pytest.approx([1, 1])
