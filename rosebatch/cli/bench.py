"""``rosebatch bench``, once its flags are parsed."""

import json
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from rosebatch.bench.against import choose_peers
from rosebatch.bench.case import Case
from rosebatch.bench.compare import chosen_switches
from rosebatch.bench.profile import choose_profile
from rosebatch.bench.scenario import Chosen, Sampling, Scenario, adapt, configs_dir, load_scenarios, load_suite
from rosebatch.bench.session import run_session, summarize
from rosebatch.bench.tables import print_results
from rosebatch.cli.bench_options import BenchFlags
from rosebatch.cli.common import run_config
from rosebatch.engine.load import pick_device
from rosebatch.errors import FlagError, UserError
from rosebatch.model.source import find_model

# Of a bench without --suite and --scenario.
_AD_HOC = Scenario(num_prompts=32, input_len=512, output_len=128)


def bench(work: BenchFlags, run: dict[str, Any], started: float) -> None:
    """Run what was asked for and print the results.

    Args:
        work: what to run.
        run: the flags of the engine that were given.
        started: when the process began.

    Raises:
        UserError: also after everything was printed, if a peer failed.
    """
    imported = time.perf_counter()
    cases = _cases(work, run)
    results = run_session(
        cases,
        repeats=work.repeats,
        switches=chosen_switches(work.compare, cases[0].device),
        peers=choose_peers(work.against, work.peer_args, work.peer_python, work.peer_path),
        import_seconds=imported - started,
        profile=choose_profile(work.profile, work.profile_output, cases[0].device),
    )
    if work.as_json:
        entries = list(results)
        sys.stdout.write(json.dumps({"results": entries, "geometric_means": summarize(entries)}) + "\n")
    else:
        entries = print_results(results, cases, sys.stdout)
    errors = dict.fromkeys(entry["error"] for entry in entries if "error" in entry)
    if errors:
        raise UserError("; ".join(errors))


def _cases(work: BenchFlags, run: dict[str, Any]) -> list[Case]:
    """The chosen scenarios, with the flags that were given in place of what they say.

    No scenario comes twice with the same model: ``--model`` leaves one of a suite's models.
    """
    flags = {**asdict(work), **run, "prefix_cache": run["toggles"]["prefix_cache"]}
    names = {*Scenario.__struct_fields__, *Sampling.__struct_fields__} - {"model"}
    given = {name: value for name, value in flags.items() if name in names and value is not None}
    if given.get("dtype") == "auto":
        del given["dtype"]
    chosen = load_suite(work.suite) if work.suite is not None else []
    chosen += load_scenarios(work.scenario)
    cases: dict[tuple[str, str], Case] = {}
    try:
        for each in chosen or [Chosen("ad-hoc", _AD_HOC)]:
            case = _case(replace(each, scenario=adapt(each.scenario, given)), run, parts=work.profile == "parts")
            cases.setdefault((case.name, case.source.name), case)
    except ValueError as error:
        raise FlagError(str(error)) from None
    return list(cases.values())


def _case(chosen: Chosen, run: dict[str, Any], *, parts: bool) -> Case:
    scenario = chosen.scenario
    named = {}
    if run.get("model") is None and scenario.model is not None:
        named = {"model": str(configs_dir() / "models" / f"{scenario.model}.toml"), "load_format": "dummy"}
    config = run_config(
        {
            **run,
            **named,
            "dtype": scenario.dtype,
            "max_num_seqs": scenario.max_num_seqs,
            "kv_cache_memory": scenario.kv_cache_memory,
            "toggles": {**run["toggles"], "prefix_cache": scenario.prefix_cache},
        }
    )
    device = pick_device(config.device)
    source = find_model(
        config.model,
        config.load_format,
        config.dtype,
        device,
        revision=config.revision,
        served_model_name=config.served_model_name,
        max_model_len=config.max_model_len,
    )
    # A suite's attribution is of kernels. On a CPU it would only take time.
    attribution = parts or (chosen.attribution and device.type == "cuda")
    return Case(chosen.name, scenario, config, source, device.type, attribution)
