"""Scenarios and their files: every shipped file is readable, and every mistake in a file is named."""

import pytest

from rosebatch.bench import scenario as module
from rosebatch.bench.scenario import Chosen, Range, Sampling, Scenario, adapt, configs_dir, load_scenarios
from rosebatch.bench.workload import make_workload
from rosebatch.config.byte_sizes import parse_size
from rosebatch.config.model import ModelConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import FlagError, UserError

NAMES = sorted(path.stem for path in (configs_dir() / "bench").glob("*.toml"))
SHIPPED = {(c.name, c.scenario.model): c.scenario for c in load_scenarios(NAMES)}
SUITE = {
    "decode_heavy_b32": (32, 64, 256),
    "large_batch_short_b128": (128, 48, 64),
    "balanced_b32": (32, 256, 128),
    "prefill_heavy_b16": (16, 1024, 16),
    "long_prefill_b4": (4, 2048, 8),
    "mixed_prefill_b32": (32, (32, 64, 96, 128, 192, 256, 384, 512), 64),
    "long_decode_b32": (32, 1024, 256),
}
GOOD = "num_prompts = 2\ninput_len = 3\noutput_len = 4\n"


def config_of(scenario):
    return load_toml(configs_dir() / "models" / f"{scenario.model}.toml", ModelConfig)


@pytest.mark.parametrize(("name", "model"), SHIPPED)
def test_shipped_scenarios_fit_their_model(name, model):
    """A shape too long for its model would fail only on the GPU, after loading."""
    scenario = SHIPPED[name, model]
    config = config_of(scenario)
    workload = make_workload(scenario, config.vocab_size)
    assert workload.longest <= config.max_model_len
    assert len(workload.prompts) == scenario.num_prompts
    assert scenario.about
    assert scenario.dtype in ("float16", "bfloat16")
    assert scenario.prefix_cache == bool(scenario.shared_prefix_len)


def test_the_suite():
    """The seven shapes, greedy, for which others have figures."""
    suite = load_scenarios(["suite"])
    shapes = {c.name: (c.scenario.num_prompts, c.scenario.input_len, c.scenario.output_len) for c in suite}
    assert (len(suite), shapes) == (7, SUITE)
    others = {(c.scenario.model, c.scenario.dtype, c.scenario.max_num_seqs, c.scenario.sampling) for c in suite}
    assert others == {("qwen3-0.6b", "bfloat16", 256, Sampling())}
    assert not any(chosen.attribution for chosen in suite)


def test_the_suite_of_hp1():
    """HP1 and softmax attention run each shape one right after the other, so that changes of the machine meet both."""
    suite = load_scenarios(["hp1"])
    models = ["hp1-0.6b", "qwen3-0.6b"]
    assert [(c.name, c.scenario.model) for c in suite] == [(name, model) for name in SUITE for model in models]
    softmax = [Chosen(c.name, c.scenario, attribution=True) for c in load_scenarios(["suite"])]
    assert [c for c in suite if c.scenario.model == "qwen3-0.6b"] == softmax
    hp1, qwen = (config_of(c.scenario) for c in suite[:2])
    assert (hp1.family, qwen.family) == ("hp1", "llama")


def test_the_preempting_scenario_preempts():
    """The admitted prompts fit the cache, their outputs do not; any one sequence alone does."""
    (chosen,) = load_scenarios(["preempting"])
    scenario = chosen.scenario
    config = config_of(scenario)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    room = parse_size(scenario.kv_cache_memory) // token
    admitted = room // (scenario.input_len + 64)
    total = scenario.input_len + scenario.output_len
    assert total * 8 < room < total * min(admitted, scenario.num_prompts)


def test_files_by_path_and_in_any_order(tmp_path):
    """A suite's scenarios appear in its place; a user's own scenario needs no model."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + "[sampling]\ntop_k = 5\n")
    found = load_scenarios([str(path), "long_prefill_b4", "suite"])
    assert [chosen.name for chosen in found] == ["mine", "long_prefill_b4", *SUITE]
    assert found[0] == Chosen("mine", Scenario(num_prompts=2, input_len=3, output_len=4, sampling=Sampling(top_k=5)))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("num_prompts = 1\ninput_len = 1\n", "missing required field `output_len`"),
        (GOOD + "batch = 1\n", "unknown field `batch`"),
        (GOOD + "[sampling]\ntop = 1\n", "unknown field `top`"),
        (GOOD + "[sampling]\ntop_p = 2.0\n", "top_p must be in (0, 1], got 2.0"),
        (GOOD + "seed = 'a'\n", "Expected `int`, got `str` - at `$.seed`"),
        (GOOD + "dtype = 'int4'\n", "Invalid enum value 'int4'"),
        (GOOD + "max_num_seqs = 0\n", "max_num_seqs must be >= 1, got 0"),
        (GOOD + "shared_prefix_len = -1\n", "shared_prefix_len must be >= 0, got -1"),
        (GOOD + "kv_cache_memory = 'lots'\n", "kv_cache_memory must be like 512MiB or 4GiB, got 'lots'"),
        ("num_prompts = 0\ninput_len = 1\noutput_len = 1", "num_prompts must be >= 1, got 0"),
        ("num_prompts = 1\ninput_len = []\noutput_len = 1", "input_len is empty: give at least one length"),
        ("num_prompts = 1\ninput_len = [3, 0]\noutput_len = 1", "input_len must be >= 1, got 0"),
        ("num_prompts = 1\ninput_len = 1\noutput_len = { low = 0, high = 2 }", "output_len.low must be >= 1, got 0"),
        ("num_prompts = 1\ninput_len = 1\noutput_len = { low = 3, high = 2 }", "output_len.high must be >= 3, got 2"),
        ("num_prompts = 1\ninput_len = 1\noutput_len = { low = 3 }", "missing required field `high`"),
        ("scenarios = ['suite']", "suite.toml: "),
        ("scenarios = 3", "Expected `array`, got `int`"),
        ("scenarios = []", "scenarios is empty: name at least one"),
        ("scenarios = ['suite']\nmodels = 'gpt2'", "Expected `array`, got `str` - at `$.models`"),
        ("cut =", "Invalid value"),
    ],
)
def test_broken_files(tmp_path, text, part):
    """One line, with the file's name."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_scenarios([str(path)])
    assert part in str(error.value)
    assert ".toml: " in str(error.value)


@pytest.mark.parametrize("name", ["gpt3", "none/mine.toml", ""])
def test_an_unknown_scenario(name):
    """The error lists the known scenarios."""
    with pytest.raises(FlagError, match=f"^--scenario {name}: no such scenario or suite; .* balanced_b32, .* suite$"):
        load_scenarios([name])


def test_adapt():
    """Flags also reach the sampling; the error for an impossible value names no file."""
    scenario = Scenario(num_prompts=2, input_len=Range(low=1, high=2), output_len=4, sampling=Sampling(top_p=0.5))
    changed = adapt(scenario, {"input_len": 9, "temperature": 0.5, "seed": 3})
    sampling = Sampling(temperature=0.5, top_p=0.5)
    assert changed == Scenario(num_prompts=2, input_len=9, output_len=4, seed=3, sampling=sampling)
    assert adapt(scenario, {}) == scenario
    with pytest.raises(ValueError, match="output_len must be >= 1, got 0"):
        adapt(scenario, {"output_len": 0})
    with pytest.raises(ValueError, match="temperature must be >= 0, got -1"):
        adapt(scenario, {"temperature": -1})


def test_configs_of_a_wheel_stand_inside_the_package(tmp_path, monkeypatch):
    """Beside an installed package are other people's packages."""
    package = tmp_path / "rosebatch"
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(module, "__file__", str(package / "bench" / "scenario.py"))
    assert configs_dir() == tmp_path / "configs"
    (package / "configs").mkdir(parents=True)
    assert configs_dir() == package / "configs"
