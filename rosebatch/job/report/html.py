"""The parts that pages share: style, panels, tables, axes. A page needs no script and no second file."""

from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 640, 150

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
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
         min-width: 0; }
.tile b { display: block; font-size: 20px; line-height: 1.25; font-variant-numeric: tabular-nums; }
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
body > .panel { margin-bottom: 14px; } td, h1, p { overflow-wrap: break-word; } .labels th { white-space: nowrap; }
.labels, .numbers { table-layout: fixed; } .labels th { width: 17em; }
.numbers { font-size: 13px; } .numbers td, .numbers thead th { text-align: right; padding: 4px 0; }
.numbers th:first-child { width: 3em; }
.rows { font-size: 13px; } .wide { overflow-x: auto; }
/* On a phone, labels stand above their values, and rows of many cells are cards. */
@media (max-width: 640px) {
  body { padding: 16px 12px 32px; } .panel { padding: 12px; } svg text { font-size: 20px; }
  .labels th, .labels td, .labels tr, .rows tr { display: block; width: auto; } .labels :is(th, td) { padding: 0; }
  .labels td, .rows td { border-top: 0; } .labels tr { padding: 4px 0; } .key span { white-space: normal; }
  .rows tr { padding: 6px 0; } .rows thead { display: none; }
  .rows td { display: grid; grid-template-columns: 8em 1fr; padding: 0; }
  .rows td::before { content: attr(data-label); color: var(--dim); } }
"""

COLORS = ("a", "b", "c", "d", "e")


def document(title: str, about: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        title, about: text for its head.
        parts: HTML.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>rosebatch: {escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(about)}</p>",
            *parts,
            "</html>",
            "",
        ]
    )


def panel(title: str, inner: str) -> str:
    """A framed part of a page; ``inner`` is HTML."""
    return f'<section class="panel"><h2>{escape(title)}</h2>{inner}</section>'


def grid(panels: Sequence[str]) -> str:
    """Panels side by side where there is room."""
    return f'<div class="plots">{"".join(panels)}</div>'


def labelled(rows: Sequence[tuple[str, str]]) -> str:
    """A table of labels and values."""
    inner = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in rows)
    return f'<table class="labels">{inner}</table>'


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a head; on a narrow screen each row is a list of head and cell."""
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = (zip(head, row, strict=True) for row in rows)
    body = "".join(
        "<tr>" + "".join(f'<td data-label="{escape(name)}">{escape(cell)}</td>' for name, cell in row) + "</tr>"
        for row in cells
    )
    inner = f"<thead><tr>{first}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="rows">{inner}</table></div>'


def key(entries: Sequence[tuple[str, str]]) -> str:
    """What colours mean: CSS colours and texts."""
    spans = (f'<span><i style="background:{color}"></i>{escape(text)}</span>' for color, text in entries)
    return f'<div class="key">{"".join(spans)}</div>'


def horizontals(left: int, top: int, height: int, limit: float, label: Callable[[float], str]) -> str:
    """Lines at zero, half and ``limit`` of a plot as SVG, with labels on their left.

    Args:
        left, top, height: of the plot inside.
        limit: the value at its top.
        label: the text of a value.
    """
    parts = []
    for share in (0, 0.5, 1):
        y, text = top + height * (1 - share), label(share * limit)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def round_up(value: float) -> float:
    """The next larger of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * factor for factor in (1, 2, 4, 5, 8, 10) if power * factor >= value)


def duration(seconds: float) -> str:
    """Milliseconds below a second; whole seconds where fractions say nothing."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def short(value: float) -> str:
    """Three digits and a unit."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
