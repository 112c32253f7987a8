"""The flags: all of them exist, work both ways, and are in the help."""

import inspect
import json
from dataclasses import asdict, fields
from typing import get_args

import pytest
from typer.main import get_group

from rosebatch import __version__
from rosebatch.cli import app
from rosebatch.cli.app import _OF_JOBS, _OF_ROWS, _app_for
from rosebatch.cli.bench_options import BenchFlags
from rosebatch.cli.options import SamplingFlags
from rosebatch.config.run import Flag, RunConfig
from rosebatch.config.switches import Switches
from rosebatch.job.config import JobConfig
from tests.helpers.command_errors import require_error

DEFAULTS = asdict(Switches.resolve({}, "cpu"))
OF_CPU = [switch.name for switch in fields(Switches) if "cpu" in switch.metadata["devices"]]
SMALL = ["--input-len", "6", "--output-len", "3", "--num-prompts", "2", "--repeats", "1"]


@pytest.fixture
def bench(cli, toy_toml):
    """Runs ``bench`` on the toy model."""
    return lambda *flags: cli("bench", "--model", toy_toml, "--load-format", "dummy", *SMALL, *flags)


@pytest.fixture
def report(bench):
    """Runs ``bench --json`` and gives its only result."""

    def call(*flags):
        (result,) = results_of(bench("--json", *flags))
        return result

    return call


def said(outcome):
    """The lines on stderr but those of bench that say how a model fits."""
    return [line for line in outcome.err.splitlines() if " fits: " not in line]


def results_of(outcome):
    """What a command without mistakes printed as JSON."""
    assert (outcome.code, said(outcome)) == (0, [])
    return json.loads(outcome.out)["results"]


def flag(name):
    return "--" + name.replace("_", "-")


def test_only_flags_of_the_named_command_are_made():
    """Those of all commands took a tenth of the time until ``--help`` is there. Names and texts are those of all."""
    whole, found = (get_group(each).commands for each in (app.app, _app_for(["check", "in.jsonl"])))
    assert [(name, each.help) for name, each in found.items()] == [(name, each.help) for name, each in whole.items()]
    assert [name for name, each in found.items() if each.params] == ["check"]
    assert len(found["check"].params) == len(whole["check"].params)


@pytest.mark.matrix
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", OF_CPU)
def test_each_switch_both_ways(report, name, on):
    """A switch without a flag, or one that has no effect, must not go unnoticed."""
    switches = report("--device", "cpu", flag(name) if on else flag("no_" + name))["engine"]["toggles"]
    assert switches == {**DEFAULTS, "prefix_cache": False, name: on}


def test_switches_are_on_by_default(report):
    """All that the CPU supports and that are measured; bench switches the prefix cache off, as for the peers."""
    assert report("--device", "cpu")["engine"]["toggles"] == {**DEFAULTS, "prefix_cache": False}


@pytest.fixture
def help_of(cli, monkeypatch):
    """The lines of a command's help, without the blanks at their ends."""

    def call(command, name, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = cli(*filter(None, [command]), name)
        assert (result.code, said(result)) == (0, [])
        return [line.rstrip() for line in result.out.splitlines()]

    return call


def described(group):
    """The fields of a config that are flags: field, what is declared of it, and its names on the command line."""
    for field in fields(group):
        for declared in get_args(field.type):
            if isinstance(declared, Flag):
                yield field.name, declared, declared.names or (flag(field.name),)


def test_a_trace(cli, toy_toml, tmp_path):
    """From the file to the table, the JSON and the page."""
    trace = tmp_path / "t.csv"
    trace.write_text("timestamp,input_length,output_length\n0,6,3\n0.01,4,2\n")
    model = ("bench", "--model", toy_toml, "--load-format", "dummy", "--trace", trace)
    result = cli(*model, "--scale", 1, "--scale", 2.5, "--report", tmp_path / "r.html", "--report", tmp_path / "r.json")
    assert (result.code, said(result)) == (0, [])
    lines = result.out.splitlines()
    assert lines[0] == "t, tiny-llama, 2 requests"
    assert [line.split()[0] for line in lines[2:]] == ["1", "2.5"]
    (one, other) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (one["scale"], other["scale"], one["completed"]) == (1.0, 2.5, 2)
    assert one["itl_s"]["p99"] > 0
    assert (tmp_path / "r.html").read_text().count("<svg") == 6
    steps = ("--submit-interval-ms", 1, "--num-prompts", 3, "--input-len", 4, "--output-len", 2, "--json")
    (result,) = results_of(cli(*model[:-2], *steps))
    assert (result["kind"], result["scenario"], result["completed"]) == ("replay", "ad-hoc", 3)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--scale", 2], "--scale needs --trace"),
        (["--trace", "t.csv", "--scale", 0], "--scale must be above 0"),
        (["--trace", "t.csv", "--input-len", 3], "--trace says what is run"),
        (["--trace", "t.csv", "--compare", "all"], "--trace says what is run"),
        (["--trace", "t.csv", "--against", "transformers"], "takes no request while others run"),
        (["--trace", "none.csv"], "--trace none.csv: no such file"),
        (["--submit-interval-ms", 1, "--suite", "suite"], "takes one scenario"),
        (["--report", "none/r.html"], "--report none/r.html: the folder none is missing: mkdir -p none"),
    ],
)
def test_traces_that_cannot_be_replayed(cli, toy_toml, tmp_path, monkeypatch, flags, part):
    """Found before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("timestamp,input_length,output_length\n0,6,3\n")
    result = cli("bench", "--model", toy_toml, "--load-format", "dummy", *flags)
    assert result.code in (1, 2)
    assert part in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "generate", "check", "bench", "cache"])
def test_help_fits_a_screen(help_of, command):
    """80 columns, at most 60 lines, and no value where a flag takes none."""
    lines = help_of(command, "--help", 80)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "<bool>" in line]
    assert [line for line in lines if "--help " in line]


@pytest.mark.parametrize(
    ("command", "groups", "without"),
    [
        ("generate", (JobConfig, RunConfig, SamplingFlags), ()),
        ("check", (RunConfig, SamplingFlags), _OF_JOBS),
        ("bench", (BenchFlags, RunConfig), _OF_ROWS),
    ],
)
def test_help_all_lists_every_flag(help_of, command, groups, without):
    """Every field of a config, and every switch both ways, is a flag with help; ``--help`` shows the common ones."""
    common, every = ("\n".join(help_of(command, name, 250)) for name in ("--help", "--help-all"))
    assert "<bool>" not in every
    for group in groups:
        for field, declared, names in described(group):
            if field in without:
                assert f" {names[0]} " not in every
                continue
            # Two long names of a flag stand together.
            listed = every.replace(",--", " --")
            assert [name for name in names if f" {name} " not in listed] == []
            assert declared.help in every
            assert (f" {names[0]} " in common.replace(",--", " --")) is not declared.rare, field
    for switch in fields(Switches):
        assert f" {flag(switch.name)} " in every
        assert f" {flag('no_' + switch.name)} " in every
        assert switch.metadata["help"] in every
        assert flag(switch.name) not in common


def test_every_field_of_a_config_is_a_flag():
    """A setting of Python must not be missing on the command line, or the other way around."""
    others = {JobConfig: {"input", "sampling", "settings", "task"}, RunConfig: {"switches"}, SamplingFlags: set()}
    for group, own in others.items():
        assert {f.name for f in fields(group)} - {field for field, _, _ in described(group)} == own


@pytest.mark.parametrize("command", [app.generate, app.check, app.bench, app.cache])
def test_flags_are_spelled_out(command):
    """Typer 0.27 made ``--DTYPE`` of a metavar, and ``--dtype`` was unknown."""
    parameters = inspect.signature(command).parameters.values()
    options = [get_args(each.annotation)[1] for each in parameters if each.default is not each.empty]
    assert options
    # In an annotation, Typer keeps the first name as the default.
    assert all(str(option.default).startswith("--") for option in options)


def test_help_lists_the_commands(cli):
    """``--help`` alone lists them."""
    result = cli("--help")
    assert (result.code, said(result)) == (0, [])
    for command in ("generate", "check", "bench", "cache"):
        assert f" {command} " in result.out


def test_version(cli):
    """One line with the version."""
    result = cli("--version")
    assert (result.code, result.out, result.err) == (0, f"rosebatch {__version__}\n", "")


def test_bench_prints_the_throughput_line(bench):
    """The report is the result of bench: on stdout, throughput line first."""
    result = bench()
    assert (result.code, said(result)) == (0, [])
    assert result.out.startswith("Throughput: ")
    assert "requests: 2 completed, 0 failed" in result.out.splitlines()


def test_bench_as_json(bench):
    """One JSON object and nothing else; every completion has its full length."""
    result = bench("--json", "--seed", "3", "--top-k", "5", "--temperature", "0.5", "--repeats", "2")
    assert result.out.count("\n") == 1
    (report,) = results_of(result)
    sizes = {"input_len": 6, "output_len": 3, "num_prompts": 2, "seed": 3}
    assert {name: report["workload"][name] for name in sizes} == sizes
    assert report["workload"]["sampling"] == {"temperature": 0.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0}
    assert (report["completed"], report["prompt_tokens"], report["output_tokens"]) == (2, 12, 6)
    assert report["finish_reasons"] == {"length": 2}
    assert report["output_tokens_per_s"] == 6 / report["elapsed_s"]
    assert report["elapsed_s"] == min(report["seconds"])
    assert (report["engine"]["load_format"], report["engine"]["sampler"]) == ("dummy", "rosebatch")


def test_bench_is_not_flattered_by_a_warm_cache(report):
    """Later runs must not repeat a run's prompts, and random prompts share no block."""
    assert report("--prefix-cache", "--input-len", 64, "--repeats", 3)["cached_tokens"] == 0


def test_a_scenario_with_flags_in_its_place(report):
    """A given flag replaces the scenario's value, all other values stay."""
    flags = ["--top-k", 3, "--max-num-seqs", 1, "--kv-cache-memory", "10MiB"]
    result = report("--scenario", "gpt2-sampled", *flags)
    engine, workload = result["engine"], result["workload"]
    assert (result["scenario"], engine["model"], engine["dtype"]) == ("gpt2-sampled", "tiny-llama", "float16")
    assert (result["max_running"], engine["max_num_seqs"], result["output_tokens"]) == (1, 1, 6)
    assert engine["kv_cache_bytes"] <= 10 * 2**20
    assert workload["sampling"] == {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.0}


def test_several_scenarios(bench):
    """A line for each scenario, those of a suite too, and one for their mean."""
    result = bench("--scenario", "gpt2-greedy", "--scenario", "suite", "--kv-cache-memory", "10MiB")
    assert (result.code, said(result)) == (0, [])
    first = [line.split()[0] for line in result.out.splitlines()]
    assert first[:3] == ["scenario", "gpt2-greedy", "decode_heavy_b32"]
    assert (len(first), first[-1]) == (1 + 8 + 1, "geometric")


def test_a_scenario_brings_its_model(cli, toy_toml, tmp_path):
    """Its model has random weights without --load-format."""
    path = tmp_path / "mine.toml"
    path.write_text('model = "tiny-llama"\nnum_prompts = 2\ninput_len = 3\noutput_len = [1, 4]\n')
    (report,) = results_of(cli("bench", "--scenario", path, "--repeats", 1, "--json"))
    assert (report["scenario"], report["output_tokens"], report["engine"]["load_format"]) == ("mine", 5, "dummy")


@pytest.fixture
def two_models(tmp_path):
    """A suite of two scenarios and two models."""
    for name, prompts in (("a", 2), ("b", 1)):
        text = f'dtype = "float32"\nnum_prompts = {prompts}\ninput_len = 8\noutput_len = 4\n'
        (tmp_path / f"{name}.toml").write_text(text)
    path = tmp_path / "mine.toml"
    scenarios = [str(tmp_path / f"{name}.toml") for name in "ab"]
    path.write_text(f'models = ["tiny-hp1", "tiny-llama"]\nattribution = true\nscenarios = {json.dumps(scenarios)}\n')
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("flag", ["--suite", "--scenario"])
def test_a_suite_of_two_models(cli, two_models, flag):
    """Each scenario runs with each model, one after the other; on a CPU there is no attribution."""
    result = cli("bench", flag, two_models, "--repeats", 1, "--json")
    entries = results_of(result)
    names = [(entry["scenario"], entry["engine"]["model"], entry["completed"]) for entry in entries]
    assert names == [("a", "tiny-hp1", 2), ("a", "tiny-llama", 2), ("b", "tiny-hp1", 1), ("b", "tiny-llama", 1)]
    assert [entry["model"] for entry in entries] == ["tiny-hp1", "tiny-llama"] * 2
    assert entries[1]["time_over_first"] == entries[1]["elapsed_s"] / entries[0]["elapsed_s"]
    assert json.loads(result.out)["geometric_means"].keys() == {"tiny-hp1", "tiny-llama"}
    assert not any("attribution" in entry for entry in entries)


def test_a_model_of_ones_own_in_a_suite(cli, two_models, toy_toml):
    """Without care, --model would run each scenario twice, once for each model of the suite."""
    model = ["--model", toy_toml, "--load-format", "dummy"]
    entries = results_of(cli("bench", "--suite", two_models, *model, "--repeats", 1, "--json"))
    assert [(entry["scenario"], entry["model"]) for entry in entries] == [("a", "tiny-llama"), ("b", "tiny-llama")]


def test_bench_compares(bench):
    """Every switch that the CPU supports has one line."""
    result = bench("--compare", "all", "--device", "cpu")
    assert (result.code, said(result)) == (0, [])
    names = [line.split()[1] for line in result.out.splitlines()]
    assert names == [name.replace("_", "-") for name in OF_CPU]


def test_bench_beside_a_peer_that_fails(bench, monkeypatch):
    """Our own figures are printed; exit code and last line report the failure."""
    monkeypatch.setattr("rosebatch.bench.session.require_installed", lambda peer: None)
    result = bench("--against", "vllm", "--peer-python", "vllm=false")
    assert result.out.startswith("Throughput: ")
    assert result.out.splitlines()[-1].split() == ["ad-hoc", "vllm", "failed"]
    (line,) = said(result)
    assert line.startswith("rosebatch: error: vllm ended with exit code 1; its log is ")
    assert result.err.endswith(": it wrote nothing\n")
    assert result.code == 1


def test_limits_reach_the_engine(report):
    """Each limit arrives under its own name."""
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 5, "block_size": 2}
    result = report(*(text for n, v in limits.items() for text in (flag(n), str(v))))
    assert {name: result["engine"][name] for name in limits} == limits
    # Two prompts of 6 tokens in chunks of 5, one at a time: 2 steps to the first token, 2 more to the third.
    assert (result["max_running"], result["steps"]) == (1, 8)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("size", "expected"),
    [("20000", 20000), ("20kb", 20000), ("20 KiB", 20480), ("0.5MiB", 524288), ("1mb", 1000000), ("20K", 20000)],
)
def test_sizes_of_the_kv_cache(report, size, expected):
    """Units of 1000 and of 1024 differ; the cache holds as many whole blocks as fit."""
    engine = report("--kv-cache-memory", size)["engine"]
    block = engine["kv_cache_bytes"] // engine["kv_cache_blocks"]
    assert engine["kv_cache_blocks"] == expected // block


def test_profiles_of_a_scenario(cli, toy_toml, tmp_path):
    """The switches of the command line apply to the profiled engine; on a CPU --profile parts works too."""
    output = tmp_path / "trace.json"
    bench = ["bench", "--model", toy_toml, "--load-format", "dummy", "--num-prompts", 2, "--input-len", 8]
    bench += ["--output-len", 4, "--repeats", 1, "--json", "--no-batch-invariant"]
    _, attribution = results_of(cli(*bench, "--profile", "parts"))
    assert (attribution["kind"], attribution["toggles"]["batch_invariant"]) == ("attribution", False)
    assert "qkv projection" in attribution["decode_step_us"]
    _, profile = results_of(cli(*bench, "--profile", "torch", "--profile-output", output))
    assert profile["output"] == str(output)
    assert json.loads(output.read_bytes())["traceEvents"]


def test_the_scenario_that_does_not_fit_is_named(cli, tmp_path):
    """Before anything runs. A suite of ten said only that prompt and output have too many tokens."""
    flags = []
    for name, length in (("fits", 4), ("too-long", 4096)):
        text = f'model = "tiny-llama"\nnum_prompts = 1\ninput_len = {length}\noutput_len = 2\n'
        (tmp_path / f"{name}.toml").write_text(text)
        flags += ["--scenario", tmp_path / f"{name}.toml"]
    told = "rosebatch: error: too-long, tiny-llama: prompt and output have 4098 tokens"
    require_error(cli("bench", *flags), 2, told)


def test_benches_of_several_gpus_take_one_model(cli):
    """A profile ended in a traceback behind all timed runs; a comparison failed once a model was loaded."""
    for flags in (["--profile", "parts"], ["--compare", "chunked-prefill"]):
        told = f"--tensor-parallel-size: leave out {flags[0]}"
        require_error(cli("bench", "-tp", 2, "--device", "cpu", *flags), 2, told)
    told = "--data-parallel-size: leave out --submit-interval-ms"
    require_error(cli("bench", "-dp", 2, "--device", "cpu", "--submit-interval-ms", 0), 2, told)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--submit-interval-ms", -5], "--submit-interval-ms must be at least 0"),
        (["--submit-interval-ms", 5, "--scale", "nan"], "--scale must be above 0"),
        (["--peer-args", "{"], "need --against"),
    ],
)
def test_benches_that_mean_nothing(cli, flags, message):
    """They ran, and their figures were wrong; or a flag was ignored."""
    require_error(cli("bench", "--device", "cpu", *flags), 2, message)


def test_two_scenarios_of_one_name(cli, tmp_path, toy_toml):
    """The second one was left out without a word."""
    flags = ["--model", toy_toml, "--load-format", "dummy", "--device", "cpu"]
    for number in (1, 2):
        path = tmp_path / f"{number}" / "x.toml"
        path.parent.mkdir()
        path.write_text(f"num_prompts = {number}\ninput_len = 8\noutput_len = 4\n")
        flags += ["--scenario", path]
    require_error(cli("bench", *flags), 2, "have the name x")
