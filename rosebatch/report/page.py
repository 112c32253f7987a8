"""The report as one page that needs nothing else: no script, no second file, plots as inline SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 640, 150
_LEFT, _TOP, _BOTTOM = 52, 8, 22

_STYLE = """
:root { color-scheme: light dark; --text: #1c1b1a; --dim: #6b6763; --line: #dcd8d3; --ground: #fbfaf8;
        --panel: #ffffff; --a: #b3264a; --b: #2f6f9f; --c: #5b7f3b; --d: #a8742a; --e: #77707a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ece9e4; --dim: #a19b94; --line: #3a3734; --ground: #191817; --panel: #22201f;
          --a: #f07a98; --b: #7db6dd; --c: #a3c981; --d: #e0b26a; --e: #b5adb9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 28px 20px 48px; background: var(--ground); color: var(--text);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 0 0 8px; }
p { margin: 0 0 20px; color: var(--dim); }
.tiles, .plots { display: grid; gap: 14px; margin-bottom: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
         min-width: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span, .key { color: var(--dim); font-size: 13px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--dim); font-size: 11px; font-family: inherit; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; }
.key { margin: 6px 0 0; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.key span { margin-right: 14px; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 4px 12px 4px 0; border-top: 1px solid var(--line); vertical-align: top; }
th { font-weight: normal; color: var(--dim); } tr:first-child > * { border-top: 0; }
td.number { text-align: right; white-space: nowrap; }
"""


def page(report: Mapping[str, Any], headline: str, rows: Sequence[tuple[str, str]]) -> str:
    """A whole HTML document.

    Args:
        report: from ``rosebatch.report.build.build_report``.
        headline: the throughput line.
        rows: labels and values of the table.
    """
    engine = report["engine"]
    title = f"{engine['model']} on {report.get('gpu') or engine['device']}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>rosebatch: {escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(headline)}</p>",
            _tiles(report),
            _plots(report),
            '<div class="plots">',
            _latencies(report),
            _time_spent(report),
            "</div>",
            _panel("All figures", _table(rows)),
            "</html>",
            "",
        ]
    )


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
    return f'<div class="plots">{"".join(_panel(name, svg) for name, svg in plots)}</div>'


def _plot(values: Sequence[float], seconds: float, color: str, unit: str) -> str:
    """An area over time as SVG. Resting the pointer on a sample shows its value."""
    if not values:
        return "<p>nothing was run</p>"
    top = _round_up(max(values)) or 1
    inner_width, inner_height = _WIDTH - _LEFT, _HEIGHT - _TOP - _BOTTOM
    step = inner_width / len(values)

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - value / top)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(unit)} over time">']
    for mark in (0, top / 2, top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{_short(mark)}</text>')
    steps = "".join(f"V{y(v):.1f}H{_LEFT + step * (i + 1):.1f}" for i, v in enumerate(values))
    outline = f"M{_LEFT} {y(0):.1f}{steps}V{y(0):.1f}Z"
    parts.append(f'<path d="{outline}" fill="var(--{color})" fill-opacity=".25" stroke="var(--{color})"/>')
    total = seconds * len(values)
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        place = _LEFT + inner_width * share
        parts.append(f'<text x="{place:.0f}" y="{_HEIGHT - 5}" text-anchor="{anchor}">{total * share:.3g} s</text>')
    for i, value in enumerate(values):
        about = f"{i * seconds:.3g}-{(i + 1) * seconds:.3g} s: {value:,.0f} {unit}"
        box = f'x="{_LEFT + step * i:.1f}" y="{_TOP}" width="{step:.1f}" height="{inner_height}"'
        parts.append(f'<rect {box} fill="transparent"><title>{escape(about)}</title></rect>')
    return "".join([*parts, "</svg>"])


def _latencies(report: Mapping[str, Any]) -> str:
    kinds = {
        "to the first token (TTFT)": "ttft_s",
        "a further token (TPOT)": "tpot_s",
        "between two arrivals (ITL)": "itl_s",
        "to the last token (E2E)": "e2e_s",
    }
    rows = []
    for label, name in kinds.items():
        values = "".join(f'<td class="number">{_duration(value)}</td>' for value in report[name].values())
        rows.append(f"<tr><th>{label}</th>{values or '<td>-</td>'}</tr>")
    head = "<tr><th></th>" + "".join(f'<td class="number key">{name}</td>' for name in report["e2e_s"]) + "</tr>"
    return _panel("Latency of a row", f"<table>{head}{''.join(rows)}</table>")


def _time_spent(report: Mapping[str, Any]) -> str:
    """A bar of the start-up and the parts of the run, with a key."""
    startup = {f"start-up: {name}": seconds for name, seconds in report["startup_s"].items() if name != "first token"}
    rest = max(report["elapsed_s"] - report["prefill_s"] - report["decode_s"], 0.0)
    parts = {**startup, "prefill": report["prefill_s"], "decode": report["decode_s"], "the rest": rest}
    total = sum(parts.values()) or 1
    colors = ["var(--e)", "var(--d)", "var(--b)", "var(--a)", "var(--c)"]
    place, bar, key = 0.0, [], []
    for (name, seconds), color in zip(parts.items(), colors[-len(parts) :], strict=True):
        width = _WIDTH * seconds / total
        about = f"{name}: {seconds:.2f} s, {seconds / total:.0%}"
        box = f'x="{place:.1f}" width="{width:.1f}" height="26"'
        bar.append(f'<rect {box} fill="{color}"><title>{escape(about)}</title></rect>')
        key.append(f'<span><i style="background:{color}"></i>{escape(about)}</span>')
        place += width
    svg = f'<svg viewBox="0 0 {_WIDTH} 26" role="img" aria-label="where the time went">{"".join(bar)}</svg>'
    return _panel("Where the time went", f'{svg}<div class="key">{"".join(key)}</div>')


def _table(rows: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in rows)
    return f"<table>{inner}</table>"


def _panel(title: str, inner: str) -> str:
    return f'<section class="panel"><h2>{escape(title)}</h2>{inner}</section>'


def _round_up(value: float) -> float:
    """The next larger of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * factor for factor in (1, 2, 4, 5, 8, 10) if power * factor >= value)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
