"""Results of a bench run for people: a line for each, or the whole report if there is only one scenario."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rosebatch.bench.case import Case, spread
from rosebatch.bench.profile_tables import attribution_text, profile_text
from rosebatch.bench.session import Entry, summarize
from rosebatch.config.switches import flag
from rosebatch.core.words import counted
from rosebatch.job.report.table import print_table, table, throughput_line

# Columns and their widths. Start-up is importing and loading. The first run is the warm-up, which compiles kernels and
# captures graphs. Cold is both, of the first scenario of a process.
_TEXTS = {"scenario": 24, "model": 16, "engine": 20}
_NUMBERS = {
    "seconds (min-max)": 24,
    "output tok/s": 13,
    "of floor": 9,
    "time/first": 11,
    "ours/theirs": 12,
    "start-up": 9,
    "first run": 10,
    "cold": 7,
}
LATENCIES = ("ttft", "tpot", "itl", "e2e")
_OF_SEVERAL_MODELS = ("model", "time/first")


def print_results(results: Iterable[Entry], cases: Sequence[Case], stream: TextIO) -> None:
    """Print each result as soon as it comes, with model names if there are several models."""
    entries = []
    several = len({case.source.name for case in cases}) > 1
    header = _columns({name: name for name in (*_TEXTS, *_NUMBERS)}, several) + "\n"
    for entry in results:
        if entry["kind"] == "comparison":
            stream.write(_comparison(entry, several) + "\n")
        elif entry["kind"] == "attribution":
            stream.write(attribution_text(entry))
        elif entry["kind"] == "profile":
            stream.write(profile_text(entry))
        elif entry["kind"] == "run" and len(cases) == 1:
            print_table(throughput_line(entry), _report(entry, cases[0].scenario.about), stream)
        else:
            stream.write(header + _columns(_line(entry), several) + "\n")
            header = ""
        stream.flush()
        entries.append(entry)
    runs = Counter(entry["model"] for entry in entries if entry["kind"] == "run")
    for model, means in summarize(entries).items():
        if runs[model] > 1:
            stream.write(_columns({"model": model, **_mean_line(means)}, several) + "\n")


def print_replays(results: Iterable[Entry], stream: TextIO) -> None:
    """Print a line for each scale and engine: rates, and latencies in milliseconds."""
    entries = list(results)
    first = next(entry for entry in entries if "peer" not in entry)
    latencies = [f"{kind.upper()} p50/p90/p99 ms" for kind in LATENCIES]
    header = f"{'scale':>6} {'engine':<18} {'requests/s':>10} {'output tok/s':>12}"
    stream.write(f"{first['scenario']}, {first['model']}, {counted(first['requests'], 'request')}\n")
    stream.write(header + "".join(f" {name:>24}" for name in latencies) + "\n")
    for entry in entries:
        start = f"{entry['scale']:>6g} {engine_name(entry):<18}"
        if "error" in entry:
            stream.write(f"{start} failed\n")
            continue
        rates = f" {entry['requests_per_s']:>10.2f} {entry['output_tokens_per_s']:>12.0f}"
        stream.write(start + rates + "".join(f" {ranks(entry[f'{kind}_s']):>24}" for kind in LATENCIES) + "\n")


def engine_name(entry: Mapping[str, Any]) -> str:
    """Who made a result: rosebatch, or a peer with its version."""
    return f"{entry['peer']} {entry.get('version', '')}" if "peer" in entry else "rosebatch"


def ranks(summary: Mapping[str, float], between: str = "/") -> str:
    """p50, p90 and p99 of seconds, as milliseconds. Hundreds have no decimals: nobody reads them."""
    values = [summary[rank] * 1000 for rank in ("p50", "p90", "p99")] if summary else []
    return between.join(f"{value:.{0 if value >= 100 else 2}f}" for value in values) or "-"


def _line(entry: Entry) -> dict[str, str]:
    line = {"scenario": entry["scenario"], "model": entry["model"], "engine": engine_name(entry)}
    if "error" in entry:
        return line | {"seconds (min-max)": "failed"}
    *before, warm_up = entry["startup_s"].values()
    return line | {
        **_rates(entry),
        "seconds (min-max)": _spread(spread(entry["seconds"]), ".4f"),
        "ours/theirs": f"{entry['ratio']:.2f}" if "ratio" in entry else "",
        "start-up": f"{sum(before):.1f}",
        "first run": f"{warm_up:.2f}",
        "cold": f"{entry['cold_s']:.1f}" if "cold_s" in entry else "",
    }


def _mean_line(means: dict[str, Any]) -> dict[str, str]:
    return {
        "scenario": "geometric mean",
        "engine": "rosebatch",
        **_rates(means),
        "seconds (min-max)": f"{means['elapsed_s']:.4f}",
        "ours/theirs": ", ".join(f"{name} {ratio:.2f}" for name, ratio in means["ratios"].items()),
    }


def _comparison(entry: Entry, several: bool) -> str:
    rates = [f"{side} {_spread(entry[side]['output_tokens_per_s'], '.0f')} tok/s" for side in ("on", "off")]
    texts = {"scenario": entry["scenario"], "model": entry["model"], "engine": entry["switch"].replace("_", "-")}
    line = f"{_columns(texts, several)} {rates[0]}, {rates[1]}, on/off {_spread(entry['ratio'], '.3f')}"
    on_syncs, off_syncs = (entry[side]["syncs"] for side in ("on", "off"))
    if on_syncs != off_syncs:
        line += f", syncs {on_syncs}, {off_syncs}"
    off = [f"\n    {flag(other, on=False)} on both sides: {why}" for other, why in entry["switched_off"].items()]
    return line + "".join(off)


def _report(entry: Entry, about: str) -> list[tuple[str, str]]:
    rows = [("scenario", f"{entry['scenario']}: {about}" if about else entry["scenario"]), *table(entry)]
    if "cold_s" in entry:
        over = f"{entry['first_over_warm']:.2f}"
        took = f"{entry['cold_s']:.2f} s to the end of the first run, which took {over} times as long as later ones"
        rows.append(("cold", took))
    rows.append(("timed runs", f"{len(entry['seconds'])}, seconds {_spread(spread(entry['seconds']), '.4f')}"))
    rows.append(("graphs", f"{entry['graph_captures']} captured, {entry['graph_replays']} replays"))
    for worker in entry.get("workers", ()):
        did = f"{counted(worker['requests'], 'request')}, {worker['output_tokens_per_s']:.0f} output tokens/s"
        rows.append((worker["device"], f"{did}, waited {worker['waited_s']:.4f} s for the last one"))
    if "idle_share" in entry:
        rows.append(("idle", f"{entry['idle_share']:.1%} of the elapsed time, at most"))
    if "floor" in entry:
        floor = entry["floor"]
        parts = f"prefill {floor['prefill_s']:.4f}, decode {floor['decode_s']:.4f}"
        copy, matmul = floor["copy_bytes_per_s"] / 1e12, floor["matmul_flops_per_s"] / 1e12
        rows.append(("floor", f"{floor['seconds']:.4f} s ({parts}), {entry['share_of_floor']:.1%} of the elapsed time"))
        rows.append((entry["gpu"], f"copies {copy:.2f} TB/s and multiplies {matmul:.0f} TFLOP/s in bf16, measured now"))
    return [*rows, ("versions", ", ".join(f"{name} {version}" for name, version in entry["versions"].items()))]


def _rates(values: Mapping[str, Any]) -> dict[str, str]:
    """What a run and a mean have in common."""
    return {
        "output tok/s": f"{values['output_tokens_per_s']:.0f}",
        "of floor": f"{values['share_of_floor']:.0%}" if "share_of_floor" in values else "-",
        "time/first": f"{values['time_over_first']:.2f}" if "time_over_first" in values else "",
    }


def _spread(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}}-{values['max']:{form}})"


def _columns(cells: Mapping[str, str], several_models: bool) -> str:
    names = [name for name in (*_TEXTS, *_NUMBERS) if several_models or name not in _OF_SEVERAL_MODELS]
    texts = " ".join(f"{cells[name]:<{_TEXTS[name]}}" for name in names if name in _TEXTS)
    numbers = "".join(f" {cells.get(name, ''):>{_NUMBERS[name]}}" for name in names if name in _NUMBERS)
    return texts + numbers.rstrip()
