"""``rosebatch check`` and ``--strict`` find mistakes before a model is loaded."""

import io
import json
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

import rosebatch.launch.launch
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import write_lines


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"hello","max_tokens":3}\n{"prompt":"x","top_p":2}\n{broken\n')
    return path


def test_check(cli, source, model_folder, monkeypatch):
    """Every bad line is listed by its number, then the file's contents; no model is loaded."""
    monkeypatch.setattr(rosebatch.launch.launch, "load_engine", None)
    result = cli("check", source, "--model", model_folder, "--dtype", "float32")
    lines = result.out.splitlines()
    assert (result.code, result.err) == (3, "")
    assert lines[0] == "line 2: invalid_sampling: top_p must be in (0, 1], got 2.0"
    assert lines[1].startswith("line 3: invalid_json: not valid JSON: ")
    assert lines[2] == f"{source}: {model_folder.name} by rosebatch, cpu"
    assert "rows: 1 can be served, 2 cannot (1 invalid_sampling, 1 invalid_json)" in lines
    assert "prompt tokens: 5 (5 to 5 a prompt, median 5, p90 5)" in lines
    labels = [line.partition(": ")[0] for line in lines[3:]]
    assert labels[-3:] == ["memory", "KV cache", "time"]


def test_check_names_whose_code_runs(cli, source, model_folder):
    """A user must see that a model runs by transformers' code, before it does."""
    result = cli("check", source, "--model", model_folder, "--dtype", "float32", "--model-impl", "transformers")
    assert f"{source}: {model_folder.name} by transformers, cpu" in result.out.splitlines()
    assert "memory: fits: " in result.out


def test_check_of_a_good_file(cli, source, model_folder):
    """Exit code 0, so that a pipeline continues."""
    source.write_text(source.read_text().splitlines()[0])
    assert cli("check", source, "--model", model_folder).code == 0


def test_check_finds_names_that_collide(cli, source, model_folder):
    """With the column that the run will have, they do not. All lines were listed, where a run has one error."""
    source.write_text('{"prompt":"hello","text":"gold"}\n' * 2)
    told = "line 1: results have fields of these names too: text. "
    require_error(cli("check", source, "--model", model_folder), 2, told)
    assert cli("check", source, "--model", model_folder, "--result-column", "out").code == 0
    require_error(cli("check", source, "--model", model_folder, "--result-column", "text"), 2, "line 1: ")


def test_check_of_other_formats_and_columns(cli, model_folder, tmp_path):
    """What ``generate`` would refuse must show here: the flags of columns and all formats count."""
    (tmp_path / "in.csv").write_text("q,text,max_tokens\nhello,gold,3\nx,gold,many\n")
    command = ["check", tmp_path / "in.csv", "--model", model_folder]
    result = cli(*command, "--prompt-column", "q", "--columns", "q")
    assert result.code == 3
    assert result.out.startswith("row 2: invalid_field: ")
    assert "rows: 1 can be served, 1 cannot (1 invalid_field)" in result.out
    parts = "--prompt-column none: ", "has no such column, but q, text, max_tokens"
    require_error(cli(*command, "--prompt-column", "none"), 2, *parts)


def test_check_of_a_batch(cli, model_folder, tmp_path):
    """Outputs are limited as in the API: as long as the model allows."""
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "body": body}])
    result = cli("check", source, "--model", model_folder)
    assert "output tokens: at most 251 (251 to 251 a prompt, median 251, p90 251)" in result.out.splitlines()


def test_strict(cli, source, model_folder, tmp_path, monkeypatch):
    """A file with bad lines is refused before any work, and each of them is listed."""
    monkeypatch.setattr(rosebatch.launch.launch, "load_engine", None)
    result = cli("generate", source, "--model", model_folder, "--strict", "-q", "-o", tmp_path / "out.jsonl")
    assert (result.code, result.out) == (2, "")
    first, second, last = result.err.splitlines()
    assert first == "line 2: invalid_sampling: top_p must be in (0, 1], got 2.0"
    assert second.startswith("line 3: invalid_json: ")
    assert last.startswith(f"rosebatch: error: {source}: 2 rows cannot be served, and --strict was given")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_strict_with_a_good_file(cli, source, model_folder):
    """The file is read a second time, and the run happens."""
    source.write_text(source.read_text().splitlines()[0])
    result = cli("generate", source, "--model", model_folder, "--strict", "-q")
    assert (result.code, json.loads(result.out)["usage"]["completion_tokens"]) == (0, 3)


def test_strict_from_stdin(cli, model_folder, monkeypatch):
    """stdin cannot be read twice, so it is refused."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt":"a"}')))
    require_error(cli("generate", "-", "--model", model_folder, "--strict"), 2, "--strict needs an input file")


def test_check_of_rows_to_embed(cli, source, model_folder):
    """Rows of ``embed`` passed for bad ones, or for completions of 512 tokens."""
    rows = [{"prompt": "hello", "dimensions": 4}, {"prompt": "hello", "dimensions": 4000}]
    write_lines(source, [*rows, {"prompt": "", "text": "gold"}])
    result = cli("check", source, "--model", model_folder, "--embed")
    first, second, *lines = result.out.splitlines()
    assert result.code == 3
    assert first.startswith("line 2: invalid_dimensions: ") and second.startswith("line 3: empty_prompt: ")
    assert "rows: 1 can be served, 2 cannot (1 invalid_dimensions, 1 empty_prompt)" in lines
    assert not [line for line in lines if line.startswith("output tokens")]
    require_error(cli("check", source, "--model", model_folder, "--embed", "--max-tokens", 3), 2, "--max-tokens")


def test_fields_that_change_nothing(cli, source, model_folder):
    """A field of a message that no template reads, texts beside the prompt, columns of no row: nothing said so."""
    chat = {"messages": [{"role": "user", "content": "Hi", "foo": 1}], "max_tokens": 1}
    write_lines(source, [chat, {"prompt": "a", "instruction": "b", "system": "c", "max_tokens": 1}])
    result = cli("check", source, "--model", model_folder)
    assert (result.code, result.err) == (0, "")
    assert "not understood: messages.foo (1), instruction (1), system (1)" in result.out.splitlines()
    assert "hint: --prompt-template puts columns such as {system} into prompts; or use --system-prompt" in result.out
    result = cli("generate", source, "--model", model_folder, "--columns", "zz")
    assert result.err.startswith(f"rosebatch: warning: --columns zz: no row of {source} has it\n")
    assert "not understood: messages.foo (1)" in result.err.splitlines()
    refused = cli("generate", source, "--model", model_folder, "--strict", "-q")
    told = "line 1: unclear_field: not understood, and would change nothing: messages.foo"
    assert (refused.code, refused.err.splitlines()[0]) == (2, told)


def test_check_looks_at_the_files_of_the_model(cli, source, model_folder, tmp_path):
    """All rows could be served, and the run then lacked a tensor."""
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    for command in (["check"], ["generate", "--quiet"]):
        require_error(cli(*command, source, "--model", folder), 2, f"{folder}: weights have no tensor '{name}'")


def test_check_lists_tensors_that_are_not_read(cli, source, model_folder, tmp_path):
    """Layers beyond those of config.json were left out without a word."""
    folder = tmp_path / "longer"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    told = "not read: 9 tensors of the weights, such as model.layers.1."
    assert told in cli("check", source, "--model", folder).out
    assert "not read" not in cli("check", source, "--model", model_folder).out
