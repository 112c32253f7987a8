"""Flags that say which model, which tokenizer and whose defaults: each changes the results in a way that is known."""

import json
import shutil
from unittest.mock import Mock

import pytest

import rosebatch.launch.launch
import rosebatch.model.source
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.command_errors import require_error
from tests.helpers.hub_cache import add_snapshot, without_network
from tests.helpers.json_lines import write_lines
from tests.helpers.small_llama import save_tokenizer

OLD, NEW = "a" * 40, "b" * 40
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def report(generate, tmp_path):
    """Runs ``generate`` and gives its rows and what its report says of the engine."""

    def call(lines, *flags):
        path = tmp_path / "report.json"
        result = generate(lines, "--report", path, *flags)
        assert (result.code, result.err) == (0, "")
        return result.rows, json.loads(path.read_text())["engine"]

    return call


@pytest.fixture
def copy_of(model_folder, tmp_path):
    """A copy of the model in which one JSON file has other values."""

    def make(name, file, **values):
        folder = tmp_path / name
        shutil.copytree(model_folder, folder)
        before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(before | values))
        return folder

    return make


def test_no_model_is_named(cli, model_folder, monkeypatch, tmp_path):
    """Who forgets --model must not take the demo model's answers for those of the model that was meant."""
    monkeypatch.setattr(rosebatch.model.source, "_demo_model", lambda: model_folder)
    source, report = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "report.json"
    result = cli("generate", source, "-o", tmp_path / "out.jsonl", "--max-tokens", 2, "--report", report)
    assert result.code == 0
    assert result.err.startswith("rosebatch: no --model given: the demo model answers, which is for trying out\n")
    assert "\nThroughput: " in result.err
    (model,) = [line for line in result.err.splitlines() if line.startswith("model: ")]
    assert model.endswith(", the demo model: no --model was given")
    assert json.loads(report.read_text())["engine"]["is_demo_model"] is True


# Models of the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hugging Face Hub as its library makes one, with links to blobs; and a network that is down."""
    cache = without_network(monkeypatch, tmp_path / "hub")

    def add(source, **where):
        add_snapshot(cache, {path.name: path.read_bytes() for path in source.iterdir()}, **where)
        return cache

    return add


def test_a_cached_id_needs_no_network(report, hub, model_folder):
    """A job on a machine without a network must run from the cache alone, and give what the folder gives."""
    hub(model_folder)
    lines = [{"prompt": "hello", "max_tokens": 8}]
    expected, _ = report(lines)
    rows, engine = report(lines, "--model", "org/name")
    assert rows == expected
    assert engine["model"] == "org/name"


def test_revisions_of_an_id(report, hub, model_folder, copy_of):
    """A pinned model must not silently be the newest one."""
    hub(model_folder)
    hub(copy_of("old", "config.json", max_position_embeddings=99), commit=OLD, ref="v1")
    lines = [{"prompt": "hello", "max_tokens": 2}]
    for flags, length in (
        (["--model", "org/name"], 256),
        (["--model", "org/name", "--revision", "v1"], 99),
        (["--model", "org/name@v1"], 99),
        (["--model", "org/name", "--revision", OLD], 99),
        (["--model", f"org/name@{NEW}"], 256),
    ):
        _, engine = report(lines, *flags)
        assert (engine["model"], engine["max_model_len"]) == ("org/name", length)


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--model", "org/other"], 2, "hf download org/other"),
        (["--model", "org/name", "--revision", "v2"], 2, "hf download org/name --revision v2"),
        (["--model", "org/name@v1", "--revision", "v2"], 2, "contradicts --model org/name@v1"),
        (["--revision", "v1"], 2, "--revision v1 needs a Hugging Face id"),
    ],
    ids=["not-cached", "revision-not-cached", "two-revisions", "revision-of-a-folder"],
)
def test_ids_that_cannot_be_had(generate, hub, model_folder, flags, code, part):
    """One line that says what to type, with the network down."""
    hub(model_folder)
    require_error(generate([{"prompt": "a"}], *flags), code, part)


@pytest.mark.thorough
def test_a_process_reads_the_cache_of_its_environment(process, hub, model_folder, tmp_path):
    """``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` are the library's own, and clusters set them."""
    (tmp_path / "in.jsonl").write_text('{"prompt":"hello","max_tokens":3}\n')
    command = "$PY -m rosebatch generate $IN --model org/name -q --device cpu"
    found = process(command, IN=tmp_path / "in.jsonl", HF_HUB_CACHE=hub(model_folder), HF_HUB_OFFLINE=1)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["usage"]["completion_tokens"] == 3


# Defaults of the model


@pytest.fixture
def opinionated(copy_of):
    """A model whose authors recommend how to sample."""
    own = {"do_sample": True, "temperature": 1.3, "top_k": 40, "max_new_tokens": 9}
    return copy_of("opinionated", "generation_config.json", **own)


OWN = {"temperature": 1.3, "top_k": 40, "max_tokens": 9}


def test_generation_config(report, opinionated):
    """With ``auto`` the model's defaults are in force and in the report; without it, they are not."""
    lines = [{"prompt": "hello", "ignore_eos": True}]
    model = ["--model", opinionated, "--seed", 3]
    plain, engine = report(lines, *model, "--max-tokens", 9)
    assert engine["sampling"] == {"max_tokens": 9}
    by_flags, engine = report(lines, *model, "--temperature", 1.3, "--top-k", 40, "--max-tokens", 9)
    assert engine["sampling"] == OWN
    rows, engine = report(lines, *model, "--generation-config", "auto")
    assert engine["sampling"] == OWN
    assert rows == by_flags != plain
    assert rows[0]["usage"]["completion_tokens"] == 9


def test_flags_and_rows_win_over_the_models_defaults(report, opinionated):
    """A recommendation must not overrule what the user said."""
    flags = ["--model", opinionated, "--generation-config", "auto", "--temperature", 0]
    lines = [{"prompt": "hello", "ignore_eos": True}, {"prompt": "hello", "ignore_eos": True, "max_tokens": 4}]
    rows, engine = report(lines, *flags)
    assert engine["sampling"] == OWN | {"temperature": 0}
    assert [row["usage"]["completion_tokens"] for row in rows] == [9, 4]
    greedy, _ = report(lines, "--max-tokens", 9)
    assert rows == greedy


def test_check_counts_by_the_models_defaults(cli, opinionated, tmp_path):
    """Lengths and time of a run that has these defaults."""
    (tmp_path / "in.jsonl").write_text('{"prompt":"hello"}\n')
    for value, limit in (("auto", 9), ("none", 251)):
        result = cli("check", tmp_path / "in.jsonl", "--model", opinionated, "--generation-config", value)
        assert f"output tokens: at most {limit} ({limit} to {limit} a prompt" in result.out


def test_another_models_generation_config_stops_a_resumed_run(generate, opinionated, tmp_path, monkeypatch):
    """Half of the results sampled and half of them greedy would be one file of two kinds."""
    lines, flags = [{"prompt": "a", "max_tokens": 2}], ["-o", f"{tmp_path}/answers/", "--model", opinionated]
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=OSError(5, "Input/output error"))
        patch.setattr("rosebatch.job.open_output.replace_folder", fail)
        assert generate(lines, *flags).code == 1
    result = generate(lines, *flags, "--resume", "--generation-config", "auto")
    require_error(result, 2, "--temperature was not given, is 1.3")
    assert generate(lines, *flags, "--resume").code == 0


# Names, lengths, tokenizers


@pytest.mark.parametrize("name", ["gpt-4o-mini", "org/name"])
def test_served_model_name(generate, model_folder, tmp_path, name):
    """Programs that read a batch's answers look for the name that they asked for."""
    bodies = {"completions": {"prompt": "Hello"}, "chat/completions": {"messages": CHAT}}
    lines = [
        {"custom_id": kind, "method": "POST", "url": f"/v1/{kind}", "body": {"model": "any", "max_tokens": 2, **body}}
        for kind, body in bodies.items()
    ]
    path = tmp_path / "report.json"
    for flags, expected in (([], model_folder.name), (["--served-model-name", name], name)):
        result = generate(lines, *flags, "--report", path)
        assert (result.code, result.err) == (0, "")
        assert [row["response"]["body"]["model"] for row in result.rows] == [expected] * 2
        assert json.loads(path.read_text())["engine"]["model"] == expected


def test_max_model_len(generate, report):
    """Prompts and completions end there, and memory is planned for no more."""
    lines = [{"prompt": "x" * 15}, {"prompt": "x", "ignore_eos": True}]
    rows, engine = report(lines, "--max-model-len", 20, "--max-num-seqs", 3, "--block-size", 4)
    assert [row["usage"]["completion_tokens"] for row in rows][1] == 19
    assert rows[0]["usage"]["completion_tokens"] <= 5
    assert (engine["max_model_len"], engine["max_sequence_len"], engine["kv_cache_blocks"]) == (20, 20, 3 * 5)
    result = generate([{"prompt": "x" * 20}], "--max-model-len", 20)
    assert (result.code, result.rows[0]["error"]["code"]) == (3, "prompt_too_long")


def test_max_model_len_beyond_the_model(generate):
    """Positions that the model was never trained on would give nonsense."""
    told = "rosebatch: error: --max-model-len 257 must be between 2 and 256, the limit of the model\n"
    require_error(generate([{"prompt": "x"}], "--max-model-len", 257), 2, told)


@pytest.fixture
def another(tmp_path):
    """A tokenizer with the same tokens under other ids."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    stored["model"]["vocab"] = {token: 255 - number if number < 256 else number for token, number in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


def test_tokenizer(generate, another, model_folder):
    """The given tokenizer reads and writes texts, with the model's own weights."""
    tokenizer = Tokenizer.load(another)
    (ids,) = tokenizer.encode(["hello"])
    assert ids != Tokenizer.load(model_folder).encode(["hello"])[0]
    flags = ["--max-tokens", 6, "--return-token-ids"]
    (expected,) = generate([{"prompt_token_ids": ids}], *flags).rows
    (row,) = generate([{"prompt": "hello"}], "--tokenizer", another, *flags).rows
    assert row["token_ids"] == expected["token_ids"]
    assert row["text"] == tokenizer.decode(row["token_ids"]) != expected["text"]


def test_a_tokenizer_for_a_model_without_one(generate, another, toy_toml):
    """Shapes alone take texts then: a benchmark of the whole job needs no weights."""
    flags = ["--model", toy_toml, "--load-format", "dummy", "--max-tokens", 3]
    assert generate([{"prompt": "hello"}], *flags).rows[0]["error"]["code"] == "no_tokenizer"
    (row,) = generate([{"prompt": "hello"}], *flags, "--tokenizer", another).rows
    assert (row["usage"]["prompt_tokens"], row["usage"]["completion_tokens"]) == (5, 3)


def test_chat_template(generate, tmp_path):
    """The given file replaces the template of the model."""
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [{"prompt": "hi"}, {"messages": CHAT}], "--max-tokens", 6
    plain, chat = generate(*command).rows
    assert (plain["usage"]["prompt_tokens"], chat["usage"]["prompt_tokens"]) == (2, 5)
    plain, chat = generate(*command, "--chat-template", tmp_path / "template.jinja").rows
    assert (chat["text"], chat["usage"]) == (plain["text"], plain["usage"])


@pytest.mark.parametrize("flag", ["--tokenizer", "--chat-template"])
def test_files_that_are_missing(generate, tmp_path, monkeypatch, flag):
    """Not silently those of the model; found before the weights are loaded."""
    monkeypatch.setattr(rosebatch.launch.launch, "load_engine", None)
    require_error(generate([{"messages": CHAT}], flag, tmp_path / "none"), 2, f"{tmp_path / 'none'}: ")


def test_a_tokenizer_folder_without_a_tokenizer(generate, tmp_path):
    """Every text was null, with exit code 0."""
    require_error(
        generate([{"prompt": "x"}], "--tokenizer", tmp_path / ""), 2, f"--tokenizer {tmp_path}: has no tokenizer"
    )


@pytest.mark.thorough
def test_a_word_in_place_of_a_number(report, generate):
    """``auto`` was documented for the number of processes, and refused as no number."""
    lines = [{"id": 1, "prompt": "x"}]
    _, engine = report(lines, "--max-num-seqs", "auto", "--device", "cpu", "--max-tokens", 1)
    assert engine["max_num_seqs"] == 256
    rows, _ = report(lines, "-dp", "auto", "--device", "cpu", "--max-tokens", 1)
    assert [row["id"] for row in rows] == [1]
    for names in ("--max-num-seqs", "--data-parallel-size"):
        require_error(generate(lines, names, "many"), 2, "'many' is neither a number nor auto")


def test_bench_takes_a_number_of_sequences(cli, toy_toml):
    """Other engines are given it as well."""
    result = cli("bench", "--model", toy_toml, "--load-format", "dummy", "--max-num-seqs", "auto")
    require_error(result, 2, "--max-num-seqs must be a number in a bench")
