"""Every mistake of a user is one line on stderr with its own exit code: no stdout, no traceback."""

import errno
from unittest.mock import Mock

import pytest
import torch

import rosebatch.cli.jobs
import rosebatch.launch.plan
from rosebatch.core.errors import FailedRunError, UserError
from tests.helpers.command_errors import require_error

FAILED, USAGE = 1, 2
FULL = "rosebatch: error: stdout, or a temporary file: No space left on device\n"
OUT_OF_MEMORY = (
    "rosebatch: error: out of memory: end other processes, or give a smaller --kv-cache-memory, --max-num-seqs or "
    "--max-num-batched-tokens\n"
)


@pytest.fixture
def source(tmp_path):
    """A good input: the mistake is elsewhere."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a","max_tokens":1}\n')
    return path


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--max-tokens", "abc"], "--max-tokens"),
        (["--temperature", "warm"], "--temperature"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--dtype", "int4"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--load-format", "magic"], "--load-format"),
        (["--sampler", "magic"], "--sampler"),
        (["--generation-config", "magic"], "--generation-config"),
        (["--max-tokens"], "--max-tokens"),
        (["another.jsonl"], "another.jsonl"),
        (["--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
        (["--temperature", "-1"], "--temperature must be >= 0, got -1"),
        (["--temperature", "nan"], "--temperature must be >= 0, got nan"),
        (["--top-p", "0"], "--top-p must be in (0, 1], got 0"),
        (["--n", "0"], "--n must be in [1, 1024], got 0"),
        (["--regex", "("], "the regex cannot be used"),
        (["--json-schema", "no such file"], "--json-schema no such file: No such file or directory; give a file, or"),
        (["--json-schema", __file__], "the JSON schema cannot be used"),
        (["--top-k", "-2"], "--top-k must be >= 0"),
        (["--min-p", "2"], "--min-p must be in [0, 1], got 2"),
        (["--stop", ""], "--stop must be made of non-empty strings"),
        (["--seed", "-1"], "--seed must be in [0, 2^64), got -1"),
        (["--block-size", "0"], "--block-size must be >= 1, got 0"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens must be >= 1, got 0"),
        (["--max-model-len", "1"], "--max-model-len must be >= 2, got 1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be in (0, 1], got 1.5"),
        (["--max-num-seqs", "-3"], "--max-num-seqs must be >= 1, got -3"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory must be like 512MiB or 4GiB, got 'lots'"),
        (["--kv-cache-memory", "-1"], "--kv-cache-memory must be like 512MiB or 4GiB, got '-1'"),
        (["--kv-cache-memory", "4TB"], "--kv-cache-memory must be like 512MiB or 4GiB, got '4TB'"),
        # Found here, not as a division by zero later.
        (["--kv-cache-memory", "10"], "--kv-cache-memory 10"),
        # A run must not fall back to another sampler silently.
        (["--device", "cpu", "--sampler", "flashinfer"], "--sampler flashinfer has no meaning on cpu"),
    ],
)
def test_impossible_flags(cli, source, model_folder, flags, part):
    """Exit code 2, as for the shell's own tools: found once and before loading, not in every row."""
    require_error(cli("generate", source, "--model", model_folder, *flags), USAGE, part)


@pytest.mark.parametrize("flag", ["--num-prompts", "--input-len", "--output-len"])
def test_impossible_flags_of_bench(cli, toy_toml, flag):
    """The same for bench."""
    result = cli("bench", "--model", toy_toml, "--load-format", "dummy", flag, 0)
    require_error(result, USAGE, f"{flag} must be >= 1, got 0")


@pytest.mark.parametrize("flag", ["--scenario", "--suite"])
def test_what_is_no_scenario(cli, flag):
    """Found before the first model is loaded. Both names are one flag, so either takes a scenario or a suite."""
    require_error(cli("bench", flag, "nope"), USAGE, "nope: no such scenario or suite; give a .toml file or one of ")


@pytest.mark.parametrize("args", [["generate"], ["nonsense"], ["--nonsense"]])
def test_incomplete_commands(cli, args):
    """A missing argument and an unknown command get one line too."""
    require_error(cli(*args), USAGE)


def test_without_arguments(cli):
    """The user gets the help, not an empty error message."""
    result = cli()
    assert "Usage" in result.out + result.err
    assert "rosebatch: error:" not in result.err


def test_a_missing_input(cli, model_folder, tmp_path):
    """The message has the file's name."""
    require_error(cli("generate", tmp_path / "none.jsonl", "--model", model_folder), USAGE, "none.jsonl: no such file")


def test_an_unreadable_parquet_input(cli, model_folder, tmp_path):
    """Arrow's messages have several lines, ours must have one."""
    (tmp_path / "in.parquet").write_bytes(b"no parquet")
    require_error(
        cli("generate", tmp_path / "in.parquet", "--model", model_folder), USAGE, "in.parquet: unreadable Parquet"
    )


def test_a_missing_model(cli, source, tmp_path):
    """The message says what --model accepts."""
    require_error(cli("generate", source, "--model", tmp_path / "none"), USAGE, "none: no such model", ".gguf", ".toml")


def test_a_model_folder_without_config(cli, source, tmp_path):
    """An empty folder, or the folder above or below the right one."""
    (tmp_path / "model").mkdir()
    require_error(cli("generate", source, "--model", tmp_path / "model"), USAGE, "config.json: no such file")


def test_a_model_folder_without_weights(cli, source, model_folder, tmp_path):
    """A download may stop after the small files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((model_folder / "config.json").read_text())
    require_error(cli("generate", source, "--model", tmp_path / "model"), USAGE, "no .safetensors weights")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"architectures": ["OPTForCausalLM"]}', "'model_type' is missing; docs/models.md lists"),
        ('{"architectures": ["FooForCausalLM"], "model_type": "foo"}', "has models of type 'foo'"),
        ('{"architectures": ["T5Model"], "model_type": "t5"}', "T5Model is not supported: it has an encoder"),
        ('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}', "layer 0 is of type linear_attention"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}', "is missing"),
        ('{"cut', "config.json"),
        ("[]", "not a JSON object"),
    ],
    ids=["no type", "unknown", "encoder", "no attention", "incomplete", "cut", "list"],
)
def test_a_config_that_cannot_be_used(cli, source, tmp_path, content, part):
    """The message says what is supported or what is missing."""
    (tmp_path / "config.json").write_text(content)
    require_error(cli("generate", source, "--model", tmp_path), USAGE, part)


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model.toml"])
def test_a_file_that_is_no_model(cli, source, tmp_path, name):
    """Garbage under each kind of name gives one line."""
    (tmp_path / name).write_bytes(b"\xff\x00garbage")
    require_error(cli("generate", source, "--model", tmp_path / name), USAGE, name)


def test_shapes_without_load_format_dummy(cli, source, toy_toml):
    """Random weights must be requested; the message says how."""
    require_error(cli("generate", source, "--model", toy_toml), USAGE, "--load-format dummy")


def test_shapes_with_an_unknown_key(cli, source, toy_toml, tmp_path):
    """A misspelt key must not fall back to a default."""
    (tmp_path / "model.toml").write_text("hiden_size = 5\n" + toy_toml.read_text())
    require_error(
        cli("generate", source, "--model", tmp_path / "model.toml", "--load-format", "dummy"), USAGE, "hiden_size"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(cli, source, model_folder):
    """A run must not fall back to the CPU silently."""
    result = cli("generate", source, "--model", model_folder, "--device", "cuda")
    require_error(result, USAGE, "--device cuda: PyTorch sees no CUDA device here")


def test_a_switch_that_the_device_cannot_serve(cli, source, model_folder):
    """A switch given by name must not be ignored."""
    result = cli("generate", source, "--model", model_folder, "--device", "cpu", "--cuda-graph")
    require_error(result, USAGE, "--cuda-graph has no meaning on cpu")


def test_a_sampler_that_is_not_installed(cli, source, model_folder, monkeypatch):
    """The message has the command to install it, instead of a ModuleNotFoundError after loading."""
    monkeypatch.setattr(rosebatch.launch.plan, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(rosebatch.launch.plan, "find_spec", lambda name: None)
    result = cli("generate", source, "--model", model_folder, "--sampler", "flashinfer")
    require_error(result, USAGE, "pip install 'rosebatch[flashinfer]'")


def test_two_samplers(cli, source, model_folder, monkeypatch):
    """The fused sampler is ours: comparing it with itself must not pass for comparing two samplers."""
    monkeypatch.setattr(rosebatch.launch.plan, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(rosebatch.launch.plan, "find_spec", lambda name: object())
    result = cli("generate", source, "--model", model_folder, "--sampler", "flashinfer", "--fused-sampler")
    require_error(result, USAGE, "--fused-sampler is rosebatch's own")


def test_bench_longer_than_the_model(cli, toy_toml):
    """Input and output lengths are added up."""
    result = cli("bench", "--model", toy_toml, "--load-format", "dummy", "--input-len", 500, "--output-len", 20)
    require_error(result, USAGE, "520 tokens", "512")


@pytest.mark.parametrize(
    "target",
    ["none/out.jsonl", "none/out.parquet", "none/out/", "."],
)
def test_an_output_that_cannot_be_written(cli, source, model_folder, tmp_path, monkeypatch, target):
    """A missing folder, or a folder that cannot be replaced."""
    monkeypatch.chdir(tmp_path)
    require_error(cli("generate", source, "--model", model_folder, "-o", target), USAGE)


def test_a_report_that_cannot_be_written(cli, source, model_folder, tmp_path):
    """It was found after hours of work; now nothing runs."""
    flags = ["-q", "-o", tmp_path / "out.jsonl", "--report"]
    for report in (tmp_path / "none" / "report.json", tmp_path, tmp_path / ("x" * 300)):
        result = cli("generate", source, "--model", model_folder, *flags, report)
        require_error(result, USAGE, f"--report {report}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_run_that_is_aborted_leaves_no_result(cli, source, tmp_path, name):
    """The final name has a whole result or none, and no empty .part stays either."""
    require_error(cli("generate", source, "--model", tmp_path / "none", "-o", tmp_path / name), USAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("one\n  two"), 2, "rosebatch: error: one two\n"),
        (FailedRunError("all died"), 1, "rosebatch: error: all died\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, FULL),
        (KeyboardInterrupt(), 130, "rosebatch: error: interrupted\n"),
        (MemoryError(), 1, OUT_OF_MEMORY),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9"),
            1,
            OUT_OF_MEMORY,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 1, OUT_OF_MEMORY),
    ],
    ids=["message-of-two-lines", "failed", "full-disk", "ctrl-c", "memory", "cpu", "gpu"],
)
def test_whatever_ends_a_run(cli, monkeypatch, error, code, line):
    """Each end is one line; shells use 130 for Ctrl-C."""
    monkeypatch.setattr(rosebatch.cli.jobs, "generate", Mock(side_effect=error))
    result = cli("generate", "in.jsonl")
    assert (result.code, result.out) == (code, "")
    assert result.err.lstrip("\n") == line


def test_an_unexpected_exception(cli, monkeypatch):
    """One line with what a bug report needs: kind, message and place."""

    def fail(*args):
        raise ZeroDivisionError("of what")

    monkeypatch.setattr(rosebatch.cli.jobs, "generate", fail)
    result = cli("generate", "in.jsonl")
    require_error(result, FAILED, "please report it", "ZeroDivisionError: of what", "test_errors.py:")
