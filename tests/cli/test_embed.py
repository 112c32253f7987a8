"""``rosebatch embed``: from files of prompts to files of vectors."""

import json
import shutil
from base64 import b64decode

import numpy as np
import openai.types
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaModel

from rosebatch import LLM, PoolingParams
from tests.helpers.command_errors import failed_rows, require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.lines import codes

TEXTS = ["a", "hello-there", "x" * 70, "hello-world", "0123456789" * 9]
# Of vectors of length 1.
TOLERANCE = 1e-5


@pytest.fixture
def source(tmp_path):
    """Texts, one as token ids, and a row that cannot be embedded."""
    rows = [{"id": i, "prompt": text} for i, text in enumerate(TEXTS)]
    rows += [{"prompt_token_ids": [1, 2, 3]}, {"prompt": ""}]
    return write_lines(tmp_path / "in.jsonl", rows)


@pytest.fixture(scope="session")
def expected(model_folder):
    """transformers' hidden states of a text's bytes, pooled: ``[N, H]``."""
    model = LlamaModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    vocab = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]

    def states(pooling):
        found = []
        for text in TEXTS:
            with torch.inference_mode():
                hidden = model(torch.tensor([[vocab[character] for character in text]])).last_hidden_state[0].double()
            found.append(hidden[-1] if pooling == "last" else hidden.mean(0))
        return torch.stack(found).numpy()

    return states


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def embed(cli, source, model_folder, tmp_path):
    """Runs ``embed`` on the source; gives the rows of the output."""

    def run(*flags, model=model_folder, code=3):
        target = tmp_path / "out.jsonl"
        result = cli("embed", source, "-o", target, "--model", model, "--dtype", "float32", "--quiet", *flags)
        rows = read_lines(target)
        assert (result.code, result.err) == (code, failed_rows(sum("error" in row for row in rows)))
        return rows

    return run


def vectors_of(rows):
    return np.array([row["embedding"] for row in rows[: len(TEXTS)]], np.float32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(embed, expected, pooling):
    """Whatever the command line does with prompts, the vectors must be of the prompts as they are."""
    rows = embed("--pooling", pooling)
    np.testing.assert_allclose(vectors_of(rows), unit(expected(pooling)), rtol=0, atol=TOLERANCE)
    assert [row["index"] for row in rows] == list(range(7))
    assert rows[1] == {"id": 1, "index": 1, "embedding": rows[1]["embedding"], "usage": {"prompt_tokens": 11}}
    assert rows[6] == {"index": 6, "error": {"code": "empty_prompt", "message": "line 7: prompt is empty"}}


def test_flags(embed, expected):
    """Each must reach the engine."""
    cut = vectors_of(embed("--dimensions", 5))
    np.testing.assert_allclose(cut, unit(expected("last")[:, :5]), rtol=0, atol=TOLERANCE)
    plain = vectors_of(embed("--no-normalize"))
    np.testing.assert_allclose(plain, expected("last"), rtol=1e-5, atol=TOLERANCE)
    rows = embed("--encoding-format", "base64", "--no-normalize")
    assert np.frombuffer(b64decode(rows[1]["embedding"]), "<f4").tolist() == plain[1].tolist()


def test_parquet_in_shards(cli, embed, source, model_folder, tmp_path):
    """Joined shards must have the columns of one run, and its vectors."""
    rows, target = embed(), tmp_path / "out.parquet"
    for shard in ("1/2", "2/2"):
        flags = ["--model", model_folder, "--dtype", "float32", "-q", "--shard", shard]
        assert cli("embed", source, "-o", target, *flags).code in (0, 3)
    assert cli("merge", source, "-o", target).code == 3
    table = pq.read_table(target)
    assert table.column_names == ["id", "index", "embedding", "usage", "error"]
    found = np.array(table["embedding"].to_pylist()[:5], np.float32)
    assert found.tobytes() == vectors_of(rows).tobytes()


@pytest.mark.thorough
def test_two_workers_give_the_bytes_of_one(embed, tmp_path):
    """Workers know the job's flags, and their results go through another process."""
    flags = ("--pooling", "mean", "--dimensions", 9)
    one = embed(*flags)
    assert embed(*flags, "-dp", 2) == one


@pytest.mark.thorough
def test_two_ranks(embed, expected):
    """The process that pools has all of a hidden state."""
    rows = embed("--pooling", "mean", "-tp", 2)
    np.testing.assert_allclose(vectors_of(rows), unit(expected("mean")), rtol=0, atol=TOLERANCE)


@pytest.fixture
def encoder(model_folder, tmp_path):
    """The same model as sentence-transformers keeps one: a class without a head, names without its prefix."""
    folder = tmp_path / "encoder"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    _say(folder, "Pooling", "Normalize")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def _say(folder, *kinds):
    parts = [("", "Transformer"), *((f"{number}_{kind}", kind) for number, kind in enumerate(kinds, start=1))]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_a_folder_says_how_it_is_pooled(embed, encoder, expected):
    """Else users of an embedding model would have to know; explicit flags win."""
    found = vectors_of(embed(model=encoder))
    np.testing.assert_allclose(found, unit(expected("mean")), rtol=0, atol=TOLERANCE)
    found = vectors_of(embed("--pooling", "last", model=encoder))
    np.testing.assert_allclose(found, unit(expected("last")), rtol=0, atol=TOLERANCE)
    _say(encoder, "Pooling")
    found = vectors_of(embed(model=encoder))
    np.testing.assert_allclose(found, expected("mean"), rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_a_model_without_a_head_does_not_generate(cli, encoder, source, architecture):
    """Random logits, or a traceback at the end of a long load, would be worse; one line says what it can do."""
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    told = "encoder: the model has no output projection: it can embed, and not generate; use rosebatch embed\n"
    require_error(cli("generate", source, "--model", encoder, "-q"), 2, f"rosebatch: error: {told}")
    assert cli("embed", source, "--model", encoder, "-q").code == 3


def test_pooling_that_is_not_served(cli, embed, encoder, source):
    """Vectors without the last part of the model would compare badly, and nobody would know why."""
    _say(encoder, "Pooling", "LayerNorm")
    require_error(cli("embed", source, "--model", encoder, "-q"), 2, "'LayerNorm', which is not supported")
    assert len(embed("--pooling", "mean", model=encoder)) == 7


def _lines(tmp_path):
    bodies = [
        ("/v1/embeddings", {"input": "hello-there", "dimensions": 4}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
        ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64", "user": "u"}),
        ("/v1/embeddings", {"input": "a", "dimensions": 1000}),
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": {"model": "m", **body}}
        for i, (url, body) in enumerate(bodies)
    ]
    return write_lines(tmp_path / "batch.jsonl", lines)


@pytest.mark.parametrize("command", ["generate", "embed"])
def test_a_batch_of_several_endpoints(cli, model_folder, tmp_path, expected, command):
    """Each line says what it wants, whichever command reads it."""
    target = tmp_path / "out.jsonl"
    flags = ["-o", target, "--model", model_folder, "--dtype", "float32", "-q"]
    assert cli(command, _lines(tmp_path), *flags).code == 3
    first, completion, several = (line["response"]["body"] for line in read_lines(target))
    parsed = openai.types.CreateEmbeddingResponse.model_validate(first, strict=True)
    np.testing.assert_allclose(parsed.data[0].embedding, unit(expected("last")[1:2, :4])[0], rtol=0, atol=TOLERANCE)
    assert openai.types.Completion.model_validate(completion, strict=True).usage.completion_tokens == 3
    assert [len(b64decode(each["embedding"])) for each in several["data"]] == [4 * 32] * 2
    assert several["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    (failed,) = read_lines(tmp_path / "out.errors.jsonl")
    assert (failed["custom_id"], failed["response"]["body"]["error"]["code"]) == ("3", "invalid_dimensions")


@pytest.mark.parametrize(
    ("target", "flags", "message"),
    [
        ("out.parquet", ["--encoding-format", "base64"], "--encoding-format has no meaning for a table"),
        ("out.jsonl", ["--dimensions", 0], "--dimensions"),
        ("out.jsonl", ["--pooling", "cls"], "--pooling"),
    ],
)
def test_flags_that_are_refused(cli, source, model_folder, tmp_path, target, flags, message):
    """A mistake in a flag costs a line and no run."""
    require_error(cli("embed", source, "-o", tmp_path / target, "--model", model_folder, "-q", *flags), 2, message)
    assert not (tmp_path / target).exists()


def test_a_report_says_what_the_vectors_are(cli, encoder, source, tmp_path):
    """Weeks later nobody remembers how a file of vectors was made."""
    report = tmp_path / "report.json"
    result = cli("embed", source, "-o", tmp_path / "out.jsonl", "--model", encoder, "--report", report)
    assert "embedding: mean of all tokens, normalised" in result.err
    found = json.loads(report.read_text())
    expected = {"pooling": "mean", "normalize": True, "dimensions": None}
    assert found["engine"]["embedding"] == {**expected, "prompt_name": None, "encoding_format": "float"}
    assert (found["output_tokens"], found["finish_reasons"]) == (0, {"embedded": 6})
    assert found["prompt_tokens"] == sum(map(len, TEXTS)) + 3


def test_prompts_of_the_model(cli, embed, encoder, tmp_path):
    """They stand in front of texts only. A row's name goes before the flag's, and that before the model's own."""
    prompts = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "document"}
    (encoder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    ids = {"prompt_token_ids": [1, 2, 3]}
    rows = [{"prompt": "a", "prompt_name": "query"}, {"prompt": "a"}, {"prompt": "find: a"}, ids]
    path = write_lines(tmp_path / "mixed.jsonl", [*rows, {"prompt": "a", "prompt_name": "title"}])

    def run(*flags):
        target = tmp_path / "mixed.out.jsonl"
        assert cli("embed", path, "-o", target, "--model", encoder, "-q", *flags).code == 3
        rows = read_lines(target)
        assert rows[4]["error"]["message"].endswith("no prompt 'title'; it has document, query")
        return [row["embedding"] for row in rows[:4]]

    query, plain, spelled, by_ids = run()
    assert query == spelled != plain
    told, named, twice, same = run("--prompt-name", "query")
    assert told == named == query and twice != spelled and same == by_ids
    told = "--prompt-name title: the model has only document, query"
    require_error(cli("embed", path, "--model", encoder, "--prompt-name", "title", "-q"), 2, told)
    with LLM(encoder) as llm:
        (output,) = llm.embed("a", PoolingParams(prompt_name="query"))
        np.testing.assert_allclose(output.outputs.embedding, query, rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="no prompt 'title'"):
            llm.embed("a", PoolingParams(prompt_name="title"))


def test_the_longest_prompt_of_an_embedding_model(embed, encoder):
    """As elsewhere, a longer one is an error row and not cut; the flag raises the limit again."""
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 80}')
    assert [code for code in codes(embed(model=encoder)) if code] == ["prompt_too_long", "empty_prompt"]
    assert codes(embed("--max-model-len", 200, model=encoder)) == [None] * 6 + ["empty_prompt"]
