"""Results of a bench run as a page: bars of throughput, and for replays the four latencies over the scale."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from rosebatch.bench.tables import LATENCIES, engine_name, ranks
from rosebatch.job.report.html import (
    COLORS,
    WIDTH,
    columns,
    document,
    duration,
    grid,
    horizontals,
    key,
    labelled,
    panel,
    round_up,
    short,
)
from rosebatch.job.report.table import provenance_rows

Entry = Mapping[str, Any]

_HEIGHT, _LEFT, _TOP, _BOTTOM = 240, 74, 10, 26
_BAR = 18
_NAMES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2e": "End to end (E2E)",
}


def bench_page(entries: Sequence[Entry]) -> str:
    """A whole HTML document of ``rosebatch.bench.session``'s results."""
    replays = [entry for entry in entries if entry["kind"] == "replay" and "error" not in entry]
    timed = [entry for entry in entries if entry["kind"] in ("run", "peer") and "error" not in entry]
    own = next((entry for entry in entries if "date" in entry), None)
    models = ", ".join(dict.fromkeys(entry["model"] for entry in entries))
    where = next((entry["gpu"] for entry in entries if entry.get("gpu")), "CPU")
    parts = []
    if replays:
        parts += [_latencies(replays), _bars("Output tokens/s", replays, lambda entry: f"scale {entry['scale']:g}")]
        parts.append(panel("Latencies, ms: p50 / p90 / p99", _latency_table(replays)))
    if timed:
        parts.append(_bars("Output tokens/s", timed, lambda entry: f"{entry['scenario']}, {entry['model']}"))
        parts.append(panel("Runs", _run_table(timed)))
    compared = [entry for entry in entries if entry["kind"] == "comparison"]
    if compared:
        parts.append(panel("Switches, on over off", _comparisons(compared)))
    if own is not None:
        parts.append(panel("Where this comes from", labelled(provenance_rows(dict(own)))))
    scenarios = ", ".join(dict.fromkeys(entry["scenario"] for entry in entries))
    return document(f"{models} on {where}", scenarios, parts)


def _latencies(entries: Sequence[Entry]) -> str:
    """Two by two plots. Bands go from p50 to p90, lines are p90, hollow points p99 (the form of article 0)."""
    colors = _colors(entries)
    panels = [panel(_NAMES[kind], _plot(kind, entries, colors)) for kind in LATENCIES]
    legend = _legend(colors)
    about = "Line: p90. Band: p50 to p90. Hollow points: p99. At scale 2 requests come twice as fast as in the trace."
    return grid(panels) + panel("Engines", f'{legend}<p class="key">{about}</p>')


def _colors(entries: Sequence[Entry]) -> dict[str, str]:
    engines = dict.fromkeys(map(engine_name, entries))
    return dict(zip(engines, cycle(COLORS), strict=False))


def _legend(colors: Mapping[str, str]) -> str:
    return key([(f"var(--{color})", engine) for engine, color in colors.items()])


def _plot(kind: str, entries: Sequence[Entry], colors: Mapping[str, str]) -> str:
    scales = sorted({entry["scale"] for entry in entries})
    summaries = [entry[f"{kind}_s"] for entry in entries if entry[f"{kind}_s"]]
    top = round_up(max((summary["p99"] for summary in summaries), default=0)) or 1
    height, step = _HEIGHT - _TOP - _BOTTOM, (WIDTH - _LEFT) / len(scales)

    def x(scale: float) -> float:
        return _LEFT + step * (scales.index(scale) + 0.5)

    def y(seconds: float) -> float:
        return _TOP + height * (1 - seconds / top)

    parts = [f'<svg viewBox="0 0 {WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_NAMES[kind])} over the scale">']
    unit, name = (1000, "ms") if top < 1 else (1, "s")
    parts.append(horizontals(_LEFT, _TOP, height, top, lambda seconds: f"{seconds * unit:.3g} {name}"))
    for scale in scales:
        parts.append(f'<text x="{x(scale):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{scale:g}</text>')
    for engine, color in colors.items():
        points = sorted(
            (entry["scale"], entry[f"{kind}_s"])
            for entry in entries
            if engine_name(entry) == engine and entry[f"{kind}_s"]
        )
        if not points:
            continue
        upper = [f"{x(scale):.1f},{y(each['p90']):.1f}" for scale, each in points]
        lower = [f"{x(scale):.1f},{y(each['p50']):.1f}" for scale, each in reversed(points)]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="var(--{color})" fill-opacity=".18"/>')
        parts.append(f'<polyline points="{" ".join(upper)}" fill="none" stroke="var(--{color})" stroke-width="2"/>')
        for scale, each in points:
            ranks = ", ".join(f"{name} {duration(value)}" for name, value in each.items())
            title = f"<title>{escape(f'{engine}, scale {scale:g}: {ranks}')}</title>"
            at, hollow = f'cx="{x(scale):.1f}"', f'fill="var(--panel)" stroke="var(--{color})"'
            parts.append(f'<circle {at} cy="{y(each["p90"]):.1f}" r="3" fill="var(--{color})">{title}</circle>')
            parts.append(f'<circle {at} cy="{y(each["p99"]):.1f}" r="4" {hollow}>{title}</circle>')
    return "".join([*parts, "</svg>"])


def _bars(title: str, entries: Sequence[Entry], label: Callable[[Entry], str]) -> str:
    """A bar for each result, those of one place together."""
    colors = _colors(entries)
    limit = max(entry["output_tokens_per_s"] for entry in entries) or 1
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(label(entry), []).append(entry)
    plots = []
    for name, members in groups.items():
        parts, y = [], 0
        for entry in members:
            rate = entry["output_tokens_per_s"]
            width = (WIDTH - 90) * rate / limit
            about = escape(f"{engine_name(entry)}: {rate:,.0f} output tokens/s")
            parts.append(
                f'<rect x="0" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" '
                f'fill="var(--{colors[engine_name(entry)]})"><title>{about}</title></rect>'
            )
            parts.append(f'<text x="{width + 6:.1f}" y="{y + 14}">{short(rate)}</text>')
            y += _BAR + 2
        about = f'role="img" aria-label="{escape(f"{title}: {name}")}"'
        plots.append(f'<div class="key">{escape(name)}</div>')
        plots.append(f'<svg viewBox="0 0 {WIDTH} {y}" {about}>{"".join(parts)}</svg>')
    return panel(title, "".join(plots) + _legend(colors))


def _latency_table(entries: Sequence[Entry]) -> str:
    head = ["scale", "engine", "requests/s", *(kind.upper() for kind in LATENCIES)]
    rows = [
        [
            f"{entry['scale']:g}",
            engine_name(entry),
            f"{entry['requests_per_s']:.2f}",
            *(ranks(entry[f"{kind}_s"], " / ") for kind in LATENCIES),
        ]
        for entry in entries
    ]
    return columns(head, rows)


def _run_table(entries: Sequence[Entry]) -> str:
    rows = [
        [
            entry["scenario"],
            entry["model"],
            engine_name(entry),
            f"{entry['elapsed_s']:.3f}",
            f"{entry['output_tokens_per_s']:,.0f}",
            f"{entry['share_of_floor']:.0%}" if "share_of_floor" in entry else "-",
            f"{entry['ratio']:.2f}" if "ratio" in entry else "",
        ]
        for entry in entries
    ]
    return columns(["scenario", "model", "engine", "seconds", "output tok/s", "of floor", "ours/theirs"], rows)


def _comparisons(entries: Sequence[Entry]) -> str:
    rows = [
        [
            entry["switch"].replace("_", "-"),
            entry["scenario"],
            *(f"{entry[side]['output_tokens_per_s']['median']:,.0f}" for side in ("on", "off")),
            f"{entry['ratio']['median']:.3f}",
        ]
        for entry in entries
    ]
    return columns(["switch", "scenario", "on tok/s", "off tok/s", "on/off"], rows)
