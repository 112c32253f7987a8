"""Results of a bench run for people: one line for each, and the whole report where there is one scenario."""

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rosebatch.bench.case import Case, spread
from rosebatch.bench.session import Entry, summarize
from rosebatch.report import print_table, table, throughput_line

# Start-up is importing and loading; the first run, the warm-up, is what compiling and capturing make of it.
_HEADER = (
    "scenario",
    "engine",
    "seconds (min-max)",
    "output tok/s",
    "of floor",
    "ours/theirs",
    "start-up",
    "first run",
)


def print_results(results: Iterable[Entry], cases: Sequence[Case], stream: TextIO) -> list[Entry]:
    """Print each result as soon as it comes.

    Returns:
        the results.
    """
    entries = []
    header = _columns(*_HEADER) + "\n"
    for entry in results:
        if entry["kind"] == "comparison":
            stream.write(_comparison(entry) + "\n")
        elif entry["kind"] == "run" and len(cases) == 1:
            print_table(throughput_line(entry), _report(entry, cases[0].scenario.about), stream)
        else:
            stream.write(header + _line(entry) + "\n")
            header = ""
        stream.flush()
        entries.append(entry)
    means = summarize(entries)
    if len(cases) > 1 and "elapsed_s" in means:
        stream.write(_mean_line(means) + "\n")
    return entries


def _line(entry: Entry) -> str:
    name = f"{entry['peer']} {entry.get('version', '')}" if entry["kind"] == "peer" else "rosebatch"
    if "error" in entry:
        return _columns(entry["scenario"], name, "failed")
    *before, warm_up = entry["startup_s"].values()
    return _columns(
        entry["scenario"],
        name,
        _spread(spread(entry["seconds"]), ".4f"),
        f"{entry['output_tokens_per_s']:.0f}",
        _share(entry),
        f"{entry['ratio']:.2f}" if "ratio" in entry else "",
        f"{sum(before):.1f}",
        f"{warm_up:.2f}",
    )


def _mean_line(means: dict[str, Any]) -> str:
    seconds, tokens = f"{means['elapsed_s']:.4f}", f"{means['output_tokens_per_s']:.0f}"
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in means["ratios"].items())
    return _columns("geometric mean", "rosebatch", seconds, tokens, _share(means), ratios)


def _comparison(entry: Entry) -> str:
    rates = [f"{side} {_spread(entry[side]['output_tokens_per_s'], '.0f')} tok/s" for side in ("on", "off")]
    switch = entry["switch"].replace("_", "-")
    return f"{entry['scenario']:<24} {switch:<20} {rates[0]}, {rates[1]}, on/off {_spread(entry['ratio'], '.3f')}"


def _report(entry: Entry, about: str) -> list[tuple[str, str]]:
    rows = [("scenario", f"{entry['scenario']}: {about}" if about else entry["scenario"]), *table(entry)]
    rows.append(("timed runs", f"{len(entry['seconds'])}, seconds {_spread(spread(entry['seconds']), '.4f')}"))
    rows.append(("graphs", f"{entry['graph_captures']} captured, {entry['graph_replays']} replays"))
    if "floor" in entry:
        floor = entry["floor"]
        parts = f"prefill {floor['prefill_s']:.4f}, decode {floor['decode_s']:.4f}"
        copy, matmul = floor["copy_bytes_per_s"] / 1e12, floor["matmul_flops_per_s"] / 1e12
        rows.append(("floor", f"{floor['seconds']:.4f} s ({parts}), {entry['share_of_floor']:.1%} of it reached"))
        rows.append((entry["gpu"], f"copies {copy:.2f} TB/s and multiplies {matmul:.0f} TFLOP/s in bf16, measured now"))
    return [*rows, ("versions", ", ".join(f"{name} {version}" for name, version in entry["versions"].items()))]


def _share(values: dict[str, Any]) -> str:
    return f"{values['share_of_floor']:.0%}" if "share_of_floor" in values else "-"


def _spread(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}}-{values['max']:{form}})"


def _columns(scenario: str, engine: str, *numbers: str) -> str:
    widths = (24, 13, 9, 12, 9, 10)
    return (
        f"{scenario:<24} {engine:<20}" + "".join(f" {n:>{w}}" for n, w in zip(numbers, widths, strict=False)).rstrip()
    )
