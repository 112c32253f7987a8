"""Cases of the toy model with random weights, and engines that generate nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rosebatch.bench.case import Case
from rosebatch.bench.scenario import Scenario, configs_dir
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Completion
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.launch.launch import Launched
from rosebatch.model.source import find_model


@pytest.fixture(scope="session")
def toy() -> Path:
    """The shape of a model with 2 layers and at most 512 tokens."""
    return configs_dir() / "models" / "tiny-llama.toml"


@pytest.fixture
def make_case(toy: Path) -> Callable[..., Case]:
    """Makes a small case of the toy model, or of another toy, on the CPU. Arguments are the scenario's fields."""

    def make(name: str = "small", **fields: Any) -> Case:
        scenario = Scenario(**{"num_prompts": 3, "input_len": 6, "output_len": 4, **fields})
        path = toy if scenario.model is None else toy.with_stem(scenario.model)
        config = RunConfig.of(
            str(path),
            load_format="dummy",
            device="cpu",
            max_num_seqs=scenario.max_num_seqs,
            kv_cache_memory=2**20,
            prefix_cache=scenario.prefix_cache,
        )
        source = find_model(config, torch.device("cpu"))
        return Case(name, scenario, config, source, "cpu")

    return make


class FakeEngine:
    """Completes every request at once; ``ran`` collects the prompts of each run."""

    max_model_len = 512
    max_num_seqs = 256

    def __init__(self, name: Any, ran: list[Any], short_by: int = 0) -> None:
        self.name = name
        self.ran = ran
        self.short_by = short_by
        self.stats = EngineStats()

    def restart_stats(self) -> EngineStats:
        self.stats = EngineStats()
        return self.stats

    def run(self, requests: list[Any]) -> Iterator[Completion]:
        """One completion of 7s for each request."""
        self.ran.append((self.name, [request.prompt_token_ids for request in requests]))
        self.stats.steps += 1
        for request in requests:
            yield Completion(
                request=request,
                sample=0,
                token_ids=(7,) * (request.sampling.max_tokens - self.short_by),
                finish_reason="length",
                cached_tokens=0,
                arrival_time=0.0,
                finish_time=2.0,
                token_times=(1.0, 2.0),
            )


@pytest.fixture
def fake_launch() -> SimpleNamespace:
    """Replaces ``launch``. ``configs`` has the config of every engine, ``ran`` what the engines ran, in order."""
    fake = SimpleNamespace(configs=[], ran=[])

    def launch(config: RunConfig) -> Launched:
        fake.configs.append(config)
        plan: Any = SimpleNamespace(source=SimpleNamespace(name="fake"), fit="fits")
        engine: Any = FakeEngine(len(fake.configs) - 1, fake.ran)
        return Launched(plan, engine, None, None, {"toggles": {}}, 0.5)

    fake.launch = launch
    return fake
