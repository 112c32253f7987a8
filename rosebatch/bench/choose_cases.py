"""The cases of a bench: scenarios, with the flags that were given in place of what they say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rosebatch.bench.case import Case
from rosebatch.bench.scenario import Chosen, Sampling, Scenario, adapt, configs_dir, load_scenarios
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.engine.load import pick_device
from rosebatch.launch.plan import plan_fitting
from rosebatch.model.source import find_model


def choose_cases(
    names: Sequence[str], work: Mapping[str, Any], run: Mapping[str, Any], ad_hoc: Scenario, *, parts: bool
) -> list[Case]:
    """The chosen scenarios. None comes twice with the same model: ``--model`` leaves one of a suite's models.

    Args:
        names: of scenarios; none for ``ad_hoc``.
        work: fields of ``Scenario`` by name. None leaves it to the scenario, as each name that it lacks.
        run: fields of ``RunConfig`` by name.
        ad_hoc: the scenario without a name.
        parts: whether to find out where the time goes.

    Raises:
        FlagError: a scenario does not exist, or a value is impossible.
    """
    flags = {**work, **run, "prefix_cache": run["switches"]["prefix_cache"]}
    fields = {*Scenario.__struct_fields__, *Sampling.__struct_fields__} - {"model"}
    given = {name: value for name, value in flags.items() if name in fields and value is not None}
    if given.get("dtype") == "auto":
        del given["dtype"]
    chosen = load_scenarios(names)
    cases: dict[tuple[str, str], Case] = {}
    try:
        for each in chosen or [Chosen("ad-hoc", ad_hoc)]:
            case = _case(replace(each, scenario=adapt(each.scenario, given)), run, parts=parts)
            other = cases.setdefault((case.name, case.source.name), case)
            if adapt(other.scenario, {"model": None}) != adapt(case.scenario, {"model": None}):
                raise FlagError(f"--scenario: two files with other contents have the name {case.name}")
    except ValueError as error:
        raise FlagError(str(error)) from None
    return list(cases.values())


def _case(chosen: Chosen, run: Mapping[str, Any], *, parts: bool) -> Case:
    scenario = chosen.scenario
    named = {}
    if run.get("model") is None and scenario.model is not None:
        named = {"model": str(configs_dir() / "models" / f"{scenario.model}.toml"), "load_format": "dummy"}
    given = {
        **run,
        **named,
        "dtype": scenario.dtype,
        "max_num_seqs": scenario.max_num_seqs,
        "kv_cache_memory": scenario.kv_cache_memory,
        # Prompts are token ids.
        "limit_images": 0,
        "switches": {**run["switches"], "prefix_cache": scenario.prefix_cache},
    }
    config = RunConfig(**given)
    device = pick_device(config.device)
    # What does not fit is refused before it is downloaded or converted. Workers find that for themselves.
    alone = config.data_parallel_size == 1
    source = plan_fitting(config).source if alone else find_model(config, device)
    # A suite's attribution is of kernels. On a CPU it would only take time.
    is_one = config.data_parallel_size == config.tensor_parallel_size == 1
    attribution = parts or (chosen.attribution and device.type == "cuda" and is_one)
    return Case(chosen.name, scenario, config, source, device.type, attribution)
