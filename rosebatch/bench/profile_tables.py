"""Profiles for people: a table of parts, one of kernels, and lines for graphs and CUDA's API."""

from collections.abc import Mapping
from typing import Any

from rosebatch.bench.parts import OF_LAYERS

_WIDTH = 44
# Functions of CUDA's API that are shown: those with the longest times.
_FUNCTIONS = 10


def attribution_text(entry: Mapping[str, Any]) -> str:
    """Where the time of one case goes; see ``rosebatch.bench.attribution.attribute``."""
    layers = entry["num_layers"]
    kernels = f", {entry['decode_kernels']} kernels" if entry["decode_kernels"] else ""
    lines = [f"{entry['scenario']}, {entry['model']}, {layers} layers"]
    lines += _parts("all prompt steps", entry["prefill_us"], layers)
    lines += _parts(f"a decode step{kernels}", entry["decode_step_us"], layers)
    if entry["decode_waiting_us"] > 0:
        lines.append(f"    beside this, the GPU waited {entry['decode_waiting_us']:.0f} µs for the host")
    lines += _kernels(entry["decode_kernel_us"])
    for kind, times in entry["replays"].items():
        mean = times["mean_us"]
        lines.append(
            f"    {kind} graphs: {times['number']} replays, {times['total_us'] / 1e3:.1f} ms in all, "
            f"{mean:.1f} µs each, {mean / layers:.1f} µs a layer"
        )
    if entry["api_us"]:
        lines.append(f"    calls of CUDA until {entry['api_decode_steps']} decode steps were done, under the profiler:")
        lines += [
            f"      {name:<{_WIDTH - 6}}{call['calls']:>10}{call['us'] / 1e3:>12.2f} ms"
            for name, call in list(entry["api_us"].items())[:_FUNCTIONS]
        ]
    return "\n".join(lines) + "\n"


def profile_text(entry: Mapping[str, Any]) -> str:
    """One line that says what was made."""
    name = f"{entry['scenario']}, {entry['model']}"
    if entry["profile"] == "nvtx":
        return f"{name}: one run with NVTX ranges, between cudaProfilerStart and cudaProfilerStop\n"
    return f"{name}: {entry['output']}, {entry['events']} events; open it in Perfetto or chrome://tracing\n"


def _parts(title: str, times: Mapping[str, float], layers: int) -> list[str]:
    whole = sum(times.values())
    if not whole:
        return [f"    {title}: -"]
    lines = [f"    {title:<{_WIDTH - 4}}{'µs':>10}{'share':>9}{'a layer':>10}"]
    lines += [_line(f"  {part}", us, whole, us / layers if part in OF_LAYERS else None) for part, us in times.items()]
    of_layers = sum(us for part, us in times.items() if part in OF_LAYERS)
    return [*lines, _line("  in all", whole, whole, of_layers / layers)]


def _line(name: str, us: float, whole: float, of_layer: float | None) -> str:
    layer = "" if of_layer is None else f"{of_layer:>10.2f}"
    return f"    {name:<{_WIDTH - 4}}{us:>10.1f}{us / whole:>9.1%}{layer}"


def _kernels(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"    {'kernels of the decode step':<{_WIDTH - 4}}{'number':>10}{'µs each':>9}{'duration':>10}  part"]
    for row in rows:
        name, number = row["name"][: _WIDTH - 7], row["number"]
        each, duration = row["us"] / number, row["duration_us"] / number
        lines.append(f"      {name:<{_WIDTH - 6}}{number:>10}{each:>9.2f}{duration:>10.2f}  {row['part']}")
    return lines
