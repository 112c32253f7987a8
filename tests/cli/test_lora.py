"""--lora: a job whose model has an adapter."""

import json
import shutil
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from rosebatch import LLM, SamplingParams
from tests.helpers.command_errors import require_error
from tests.helpers.hub_cache import add_snapshot, without_network
from tests.model.adapters.written import pair, write_adapter

LINES = [{"prompt": text, "max_tokens": 12} for text in ("Hello", "rose", "a b c d")]
MODULES = {
    f"model.layers.{layer}.{part}_proj": sizes
    for layer in (0, 1)
    for part, sizes in {"self_attn.q": (32, 32), "self_attn.v": (16, 32), "mlp.down": (32, 64)}.items()
}


@pytest.fixture
def adapter(tmp_path):
    """A folder; its numbers and those of the model make sums that are rounded, which greedy tokens hide."""
    tensors = {name: each for module, sizes in MODULES.items() for name, each in pair(module, *sizes)[0].items()}
    return write_adapter(tmp_path / "adapter", tensors)


@pytest.fixture
def merged(tmp_path, model_folder):
    """A copy of the model with the adapter's weights."""
    folder = tmp_path / "merged"
    shutil.copytree(model_folder, folder)
    values = load_file(folder / "model.safetensors")
    for module, sizes in MODULES.items():
        values[f"{module}.weight"] += pair(module, *sizes)[1]
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return folder


def answers(result):
    """What the rows say, which also name their model."""
    assert (result.code, result.err) == (0, "")
    return [row["text"] for row in result.rows]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_answers_are_those_of_the_merged_model(generate, adapter, merged, tmp_path, ranks):
    """Not of the model alone."""
    report = tmp_path / "report.json"
    found = answers(generate(LINES, "--lora", f"roses={adapter}", "--report", report, "-tp", ranks))
    assert found == answers(generate(LINES, "--model", merged))
    assert found != answers(generate(LINES))
    assert json.loads(report.read_text())["engine"]["lora"] == "roses"


def test_the_report_names_it(cli, adapter, model_folder, tmp_path):
    """The same model has other answers without it."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]) + "\n")
    flags = ["--model", model_folder, "--lora", f"roses={adapter}"]
    result = cli("generate", source, "-o", tmp_path / "out.jsonl", *flags)
    (model,) = [line for line in result.err.splitlines() if line.startswith("model: ")]
    assert ", with roses by --lora" in model
    assert cli("check", source, *flags).code == 0


def test_a_changed_adapter_stops_a_resumed_run(generate, adapter, tmp_path, monkeypatch):
    """Half of the answers would be another model's."""
    flags = ["-o", f"{tmp_path}/answers/"]
    given = ["--lora", f"a={adapter}"]
    with monkeypatch.context() as patch:
        patch.setattr("rosebatch.job.open_output.replace_folder", Mock(side_effect=OSError(5, "Input/output error")))
        assert generate(LINES, *flags, *given).code == 1
    require_error(generate(LINES, *flags, "--resume"), 2, "--lora was a, is not given")
    config = adapter / "adapter_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "lora_alpha": 5}))
    require_error(generate(LINES, *flags, *given, "--resume"), 2, "the content of the model differs")
    config.write_text(before)
    assert generate(LINES, *flags, *given, "--resume").code == 0


def test_the_library(adapter, merged, model_folder):
    """A mapping, or a text as of the flag."""

    def texts(model, **options):
        with LLM(model, dtype="float32", device="cpu", **options) as llm:
            prompts = [line["prompt"] for line in LINES]
            return [each.outputs[0].text for each in llm.generate(prompts, SamplingParams(max_tokens=12))]

    expected = texts(merged)
    for lora in ({"a": adapter}, f"a={adapter}", [f"a={adapter}"]):
        assert texts(model_folder, lora=lora) == expected
    assert texts(model_folder, lora={}) == texts(model_folder, lora=None) == texts(model_folder) != expected


def test_a_hub_id(generate, adapter, merged, monkeypatch, tmp_path):
    """It is found in the cache without a network, at its revision too."""
    without_network(monkeypatch, tmp_path)
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    add_snapshot(tmp_path, files, name="org/roses", ref="v1")
    assert answers(generate(LINES, "--lora", "a=org/roses@v1")) == answers(generate(LINES, "--model", merged))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", "adapter"], "--lora must be NAME=FOLDER or NAME=ORG/NAME, got 'adapter'"),
        (["--lora", "=adapter"], "--lora must be NAME=FOLDER or NAME=ORG/NAME, got '=adapter'"),
        (["--lora", "a=none"], "--lora a=none: no such folder; give one with adapter_config.json"),
        (["--lora", "a=adapter", "--load-format", "dummy"], "--load-format dummy makes weights of its own"),
        (["--lora", "a=adapter", "--model-impl", "transformers"], "transformers' own code runs this model"),
        (["--lora-modules", "a=adapter"], "use --lora NAME=FOLDER"),
        (["--enable-lora"], "use --lora NAME=FOLDER"),
        (["--max-cpu-loras", "4"], "leave it out, all adapters are loaded with the model"),
        (["--max-loras", "0"], "max-loras"),
        (["--lora", "a=other"], "other.lora_A.weight' has no place in the model, nor have 1 others"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "check"])
def test_what_is_refused(cli, adapter, model_folder, tmp_path, monkeypatch, command, flags, message):
    """In one line, before weights are read: the base would answer."""
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "other", pair("model.layers.0.other", 32, 32)[0])
    (tmp_path / "in.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    quiet = ["--quiet"] if command == "generate" else []
    result = cli(command, "in.jsonl", "--model", model_folder, *quiet, *flags)
    assert result.code in (1, 2)
    require_error(result, result.code, message)
