"""``rosebatch classify``: from files of prompts to files of labels, and the same by ``LLM``."""

import asyncio

import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rosebatch import LLM, PoolingParams, run_file
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes

LABELS = {0: "bad", 1: "good", 2: "so so"}
ROWS = [{"id": i, "prompt_token_ids": [5, 6, 7 + i, 8]} for i in range(5)]
ROWS += [{"prompt": "hello", "gold": "good"}, {"prompt": ""}, {"prompt_token_ids": [5, 900]}]
TOLERANCE = 1e-5


def _sizes(labels):
    names = {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**names, **sizes, "vocab_size": 300, "initializer_range": 0.3, "pad_token_id": 0}


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """The folder of an encoder with three labels, and the model."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**_sizes(LABELS), max_position_embeddings=64)).eval()
    model.save_pretrained(folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture(scope="session")
def reward(tmp_path_factory):
    """The same of a decoder with a single output."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**_sizes({0: "reward"}), max_position_embeddings=64)).eval()
    model.save_pretrained(folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", ROWS)


def outputs_of(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long)).logits[0]


def test_labels_are_those_of_transformers(cli, source, classifier, tmp_path):
    """A label by the number of another, or one where a row cannot be served."""
    folder, model = classifier
    target = tmp_path / "out.jsonl"
    assert cli("classify", source, "-o", target, "--model", folder, "--dtype", "float32").code == 3
    rows = read_lines(target)
    assert codes(rows) == [None] * 6 + ["empty_prompt", "invalid_token_id"]
    for row, given in zip(rows[:5], ROWS, strict=False):
        right = outputs_of(model, given["prompt_token_ids"]).softmax(0)
        assert row["probs"] == pytest.approx(right.tolist(), abs=TOLERANCE)
        assert row["label"] == LABELS[int(right.argmax())]
        assert row == {"id": given["id"], "index": row["index"], "label": row["label"], "probs": row["probs"]} | {
            "usage": {"prompt_tokens": 4}
        }
    assert rows[5]["gold"] == "good"
    table = tmp_path / "out.parquet"
    assert cli("classify", source, "-o", table, "--model", folder, "--dtype", "float32").code == 3
    read = pq.read_table(table)
    assert read["label"].to_pylist() == [row.get("label") for row in rows]
    assert read["score"].null_count == len(ROWS)


def test_a_single_output_is_a_score(cli, source, reward, tmp_path):
    """A reward between 0 and 1 with the label 0 said nothing of what it is."""
    folder, model = reward
    target = tmp_path / "out.jsonl"
    assert cli("classify", source, "-o", target, "--model", folder, "--dtype", "float32").code == 3
    for row, given in zip(read_lines(target)[:5], ROWS, strict=False):
        right = outputs_of(model, given["prompt_token_ids"]).sigmoid().item()
        assert row == {"id": given["id"], "index": row["index"], "score": row["score"], "usage": {"prompt_tokens": 4}}
        assert row["score"] == pytest.approx(right, abs=TOLERANCE)


def test_the_library(source, classifier, reward, tmp_path):
    """The same numbers; a reward is what the head gives, before any activation."""
    with LLM(reward[0], dtype="float32") as llm:
        prompts = [row["prompt_token_ids"] for row in ROWS[:5]]
        for prompt, output in zip(prompts, llm.reward(prompts), strict=True):
            assert output.outputs.data == pytest.approx(outputs_of(reward[1], prompt).tolist(), abs=2 * TOLERANCE)
        with pytest.raises(ValueError, match=r"^prompt 0: the model has no output projection"):
            llm.generate("a")
    with LLM(classifier[0], dtype="float32") as llm:
        good, bad = llm.classify([[5, 6, 7, 8], [5, 900]], on_error="return")
        assert good.outputs.num_classes == 3
        assert bad.error_code == "invalid_token_id"

        async def both():
            return await asyncio.gather(llm.aclassify([[5, 6, 7, 8]]), llm.areward([[5, 6, 7, 8]]))

        (awaited,), (reward,) = asyncio.run(both())
        assert awaited.outputs == good.outputs
        assert torch.tensor(reward.outputs.data).softmax(0) == pytest.approx(torch.tensor(good.outputs.probs), abs=1e-6)
        # Its hidden states are there too.
        assert llm.embed([[5, 6, 7, 8]])[0].outputs.hidden_size == 32
        # Numbers of labels passed for a vector.
        with pytest.raises(ValueError, match=r"task='classify' ask for no vector: use classify"):
            llm.embed("a", PoolingParams(task="classify"))
        with pytest.raises(ValueError, match=r"task='score' ask for no vector: use score"):
            run_file(source, tmp_path / "out.jsonl", model=llm, pooling=PoolingParams(task="score"))
        run_file(source, tmp_path / "out.jsonl", model=llm, task="classify")
        assert read_lines(tmp_path / "out.jsonl")[0]["label"] == good.outputs.label


def test_a_model_without_a_head(cli, source, model_folder, classifier):
    """It is refused before anything is read; so is a completion by a classifier."""
    require_error(cli("classify", source, "--model", model_folder), 2, "has no classification head")
    require_error(cli("generate", source, "--model", classifier[0]), 2, "use rosebatch classify")
    result = cli("check", source, "--model", classifier[0], "--classify")
    assert "rows: 6 can be served, 2 cannot" in result.out
    # A check said that all rows could be served.
    require_error(cli("check", source, "--model", model_folder, "--classify"), 2, "has no classification head")
    require_error(cli("check", source, "--model", classifier[0]), 2, "use rosebatch classify")


def test_a_task_of_another_head(cli, classifier, tmp_path):
    """It was told as a fault of our own, with the status 500."""
    body = {"input": [5, 6], "task": "token_classify"}
    source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "url": "/v1/pooling", "body": body}])
    assert cli("classify", source, "--model", classifier[0], "-o", tmp_path / "out.jsonl").code == 3
    (line,) = read_lines(tmp_path / "out.errors.jsonl")
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == (
        "line 1: task token_classify: the model's head is for whole prompts"
    )


def test_another_command_does_not_resume(cli, classifier, tmp_path):
    """The message named --of, which is no flag."""
    source, target = write_lines(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    assert cli("classify", source, "-o", target, "--model", classifier[0]).code == 0
    result = cli("embed", source, "-o", target, "--model", classifier[0], "--resume")
    require_error(result, 2, "of another run: the command was rosebatch classify, is rosebatch embed. Leave out")


def test_a_head_for_whole_prompts(cli, source, classifier, tmp_path):
    """--token-probs changed nothing, in silence; a score of three labels was refused row by row."""
    command = ("--model", classifier[0], "-o", tmp_path / "out.jsonl")
    told = "is for whole prompts"
    require_error(cli("classify", source, *command, "--token-probs"), 2, "--token-probs has no meaning: ", told)
    body = {"custom_id": "a", "url": "/v1/classify", "body": {"input": [5, 6]}}
    batch = write_lines(tmp_path / "batch.jsonl", [body])
    require_error(cli("classify", batch, *command, "--token-probs"), 2, "/v1/pooling has the numbers of all labels")
    require_error(cli("score", source, *command), 2, "needs a head with a single output: this has 3")
