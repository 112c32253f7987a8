"""The flags themselves: all there, both ways, and in the help."""

import json
from dataclasses import fields

import pytest

from rosebatch import __version__
from rosebatch.options import EngineOptions, SamplingOptions
from rosebatch.toggles import Toggles

SWITCHES = [switch.name for switch in fields(Toggles)]
SMALL = ["--input-len", "6", "--output-len", "3", "--num-prompts", "2"]


@pytest.fixture
def bench(cli, toy_toml):
    """``bench`` on the toy model."""
    return lambda *flags: cli("bench", "--model", toy_toml, "--load-format", "dummy", *SMALL, *flags)


def flag(name):
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_both_ways(bench, name, on):
    """Enumerated from the dataclass: a switch without its flag, or one that is not obeyed, is found here."""
    result = bench("--json", "--device", "cpu", flag(name) if on else flag("no_" + name))
    assert result.code == 0
    toggles = json.loads(result.out)["engine"]["toggles"]
    assert toggles == {**dict.fromkeys(SWITCHES, True), name: on}


def test_switches_are_on_by_default(bench):
    """On the CPU, each of them is served."""
    assert json.loads(bench("--json", "--device", "cpu").out)["engine"]["toggles"] == dict.fromkeys(SWITCHES, True)


@pytest.mark.parametrize(
    ("command", "groups", "own"),
    [
        ("generate", (EngineOptions, SamplingOptions), ["output", "seed", "return_token_ids", "report", "quiet"]),
        ("bench", (EngineOptions,), ["input_len", "output_len", "num_prompts", "seed", "json"]),
    ],
)
def test_help_lists_every_flag(cli, monkeypatch, command, groups, own):
    """Fields of the shared groups become flags of each command that takes them, with a line of help."""
    monkeypatch.setenv("COLUMNS", "200")
    result = cli(command, "--help")
    assert (result.code, result.err) == (0, "")
    names = [f.name for group in groups for f in fields(group) if f.name != "toggles"] + own
    names += SWITCHES + ["no_" + name for name in SWITCHES]
    assert [name for name in names if flag(name) + " " not in result.out] == []


def test_help_lists_the_commands(cli):
    """Both of them, from the top."""
    result = cli("--help")
    assert (result.code, result.err) == (0, "")
    assert "generate" in result.out
    assert "bench" in result.out


def test_version(cli):
    """One line."""
    result = cli("--version")
    assert (result.code, result.out, result.err) == (0, f"rosebatch {__version__}\n", "")


def test_bench_prints_the_throughput_line(bench):
    """The report of a bench is its result: on stdout, the known line first."""
    result = bench()
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Throughput: ")
    assert "requests: 2 completed, 0 failed" in result.out.splitlines()


def test_bench_as_json(bench):
    """One JSON object and nothing else; every completion has its full length."""
    result = bench("--json", "--seed", "3")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    report = json.loads(result.out)
    assert report["workload"] == {"input_len": 6, "output_len": 3, "num_prompts": 2, "seed": 3}
    assert (report["completed"], report["prompt_tokens"], report["output_tokens"]) == (2, 12, 6)
    assert report["finish_reasons"] == {"length": 2}
    assert report["output_tokens_per_s"] == 6 / report["elapsed_s"]
    assert report["engine"]["load_format"] == "dummy"


def test_bench_is_not_flattered_by_a_warm_cache(cli, toy_toml):
    """Prompts of the warm-up are not asked again, and random ones share no block."""
    sizes = ["--input-len", 64, "--output-len", 2, "--num-prompts", 3]
    result = cli("bench", "--model", toy_toml, "--load-format", "dummy", "--json", *sizes)
    assert json.loads(result.out)["cached_tokens"] == 0


def test_limits_reach_the_engine(bench):
    """Each limit under its own name."""
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 5, "block_size": 2}
    report = json.loads(bench("--json", *(text for n, v in limits.items() for text in (flag(n), str(v)))).out)
    assert {name: report["engine"][name] for name in limits} == limits
    # Prompts of 6 tokens in chunks of 5, one after the other: 2 steps to the first token, 2 more to the third.
    assert (report["max_running"], report["steps"]) == (1, 8)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("20000", 20000), ("20kb", 20000), ("20 KiB", 20480), ("0.5MiB", 524288), ("1mb", 1000000), ("20K", 20000)],
)
def test_sizes_of_the_kv_cache(bench, size, expected):
    """Powers of 1000 and of 1024 as written; whole blocks fit in."""
    engine = json.loads(bench("--json", "--kv-cache-memory", size).out)["engine"]
    block = engine["kv_cache_bytes"] // engine["kv_cache_blocks"]
    assert engine["kv_cache_blocks"] == expected // block
