"""The report as one page that needs nothing else: no script, no second file, plots as inline SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rosebatch.job.report.html import (
    HEIGHT,
    WIDTH,
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

_LEFT, _TOP, _BOTTOM = 52, 8, 22


def page(report: Mapping[str, Any], headline: str, rows: Sequence[tuple[str, str]]) -> str:
    """A whole HTML document.

    Args:
        report: from ``rosebatch.job.report.build.build_report``.
        headline: the throughput line.
        rows: labels and values of the table.
    """
    engine = report["engine"]
    title = f"{engine['model']} on {report.get('gpu') or engine['device']}"
    parts = [
        _tiles(report),
        _plots(report),
        grid([_latencies(report), _time_spent(report)]),
        panel("All figures", labelled(rows)),
    ]
    return document(title, headline, parts)


def _tiles(report: Mapping[str, Any]) -> str:
    tiles = [
        (f"{report['completed']:,}", "rows completed"),
        (f"{report['failed']:,}", "rows failed"),
        (f"{report['output_tokens_per_s']:,.0f}", "output tokens/s"),
        (f"{report['total_tokens_per_s']:,.0f}", "total tokens/s"),
        (f"{report['elapsed_s']:,.1f} s", "elapsed"),
        (f"{report['cache_hit_rate']:.0%}", "of prompts cached"),
    ]
    inner = "".join(f'<div class="panel tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{inner}</div>'


def _plots(report: Mapping[str, Any]) -> str:
    line = report["timeline"]
    width = line["seconds_per_sample"]
    blocks = report["engine"].get("kv_cache_blocks") or 1
    used = [100 * value / blocks for value in line["blocks_used"]]
    plots = [
        ("Output tokens/s", _plot(line["output_tokens_per_s"], width, "a", "output tokens/s")),
        ("Prompt tokens/s", _plot(line["prompt_tokens_per_s"], width, "b", "prompt tokens/s")),
        ("Live sequences", _plot(line["live_sequences"], width, "c", "sequences")),
        ("KV cache in use, %", _plot(used, width, "d", "% of the blocks")),
    ]
    return grid([panel(name, svg) for name, svg in plots])


def _plot(values: Sequence[float], seconds: float, color: str, unit: str) -> str:
    """An area over time as SVG. Resting the pointer on a sample shows its value."""
    if not values:
        return "<p>nothing was run</p>"
    top = round_up(max(values)) or 1
    inner_width, inner_height = WIDTH - _LEFT, HEIGHT - _TOP - _BOTTOM
    step = inner_width / len(values)

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - value / top)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} over time">']
    parts.append(horizontals(_LEFT, _TOP, inner_height, top, short))
    steps = "".join(f"V{y(v):.1f}H{_LEFT + step * (i + 1):.1f}" for i, v in enumerate(values))
    outline = f"M{_LEFT} {y(0):.1f}{steps}V{y(0):.1f}Z"
    parts.append(f'<path d="{outline}" fill="var(--{color})" fill-opacity=".25" stroke="var(--{color})"/>')
    total = seconds * len(values)
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        place = _LEFT + inner_width * share
        parts.append(f'<text x="{place:.0f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{total * share:.3g} s</text>')
    for i, value in enumerate(values):
        about = f"{i * seconds:.3g}-{(i + 1) * seconds:.3g} s: {value:,.0f} {unit}"
        box = f'x="{_LEFT + step * i:.1f}" y="{_TOP}" width="{step:.1f}" height="{inner_height}"'
        parts.append(f'<rect {box} fill="transparent"><title>{escape(about)}</title></rect>')
    return "".join([*parts, "</svg>"])


def _latencies(report: Mapping[str, Any]) -> str:
    kinds = ("ttft", "tpot", "itl", "e2e")
    head = "".join(f"<th>{kind.upper()}</th>" for kind in kinds)
    rows = []
    for rank in report["e2e_s"]:
        values = (report[f"{kind}_s"].get(rank) for kind in kinds)
        cells = "".join(f"<td>{'-' if value is None else duration(value)}</td>" for value in values)
        rows.append(f"<tr><th>{rank}</th>{cells}</tr>")
    about = "To the first token, for each further token, between two arrivals, to the last token."
    inner = f'<table class="numbers"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return panel("Latency of a row", f'{inner}<div class="key">{about}</div>')


def _time_spent(report: Mapping[str, Any]) -> str:
    """A bar of the start-up and the parts of the run, with a key."""
    startup = {f"start-up: {name}": seconds for name, seconds in report["startup_s"].items() if name != "first token"}
    rest = max(report["elapsed_s"] - report["prefill_s"] - report["decode_s"], 0.0)
    parts = {**startup, "prefill": report["prefill_s"], "decode": report["decode_s"], "the rest": rest}
    total = sum(parts.values()) or 1
    colors = ["var(--e)", "var(--d)", "var(--b)", "var(--a)", "var(--c)"]
    place, bar, names = 0.0, [], []
    for (name, seconds), color in zip(parts.items(), colors[-len(parts) :], strict=True):
        width = WIDTH * seconds / total
        about = f"{name}: {seconds:.2f} s, {seconds / total:.0%}"
        box = f'x="{place:.1f}" width="{width:.1f}" height="26"'
        bar.append(f'<rect {box} fill="{color}"><title>{escape(about)}</title></rect>')
        names.append((color, about))
        place += width
    svg = f'<svg viewBox="0 0 {WIDTH} 26" role="img" aria-label="where the time went">{"".join(bar)}</svg>'
    return panel("Where the time went", svg + key(names))
