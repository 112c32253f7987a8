"""Results of ``rosebatch bench --json`` -> a bar chart as SVG, for light and for dark pages.

``python docs/figures/draw.py docs/figures/throughput.json`` writes ``throughput-light.svg`` and ``throughput-dark.svg``
beside the first input. Several inputs become one chart. The script needs the standard library only.

A group of bars is one of our runs and the peers beside it. Bars are proportional to output tokens per second within
their group: each group has a scale of its own, because workloads differ by two orders of magnitude.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

OURS = "rosebatch"
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy"}
_TIMES, _TO = "\u00d7", "\u2013"

# Pixels.
_WIDTH = 800
_BARS_LEFT, BARS_WIDTH, _RATIO_RIGHT = 236, 432, 796
_HEADER, _FOOTER = 64, 42
_BAR, _BAR_GAP, _GROUP_GAP = 11, 3, 15
_CAP = 2.5

_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# Ours first, then peers in their order.
THEMES: dict[str, dict[str, Any]] = {
    "light": {"text": "#1f2328", "dim": "#59636e", "bars": ["#b3264a", "#7f8a97", "#b9c1ca", "#d8dde2"]},
    "dark": {"text": "#f0f3f6", "dim": "#9aa4af", "bars": ["#ec5f85", "#8a95a2", "#57616d", "#3b434c"]},
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One engine on one workload, in output tokens per second: the median, the slowest and the fastest timed run."""

    engine: str
    median: float
    slowest: float
    fastest: float


@dataclass(slots=True)
class Group:
    """One workload: our bar first, then the peers'; ``ratio`` is how many times faster we are than the best of them."""

    title: str
    details: str
    bars: list[Bar]
    ratio: float | None = None

    @property
    def top(self) -> float:
        """What the whole width of the bars stands for."""
        return max(bar.fastest for bar in self.bars)


@dataclass(slots=True)
class Chart:
    """Groups in the order of the results, and what the caption says of them."""

    groups: list[Group] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    repeats: set[int] = field(default_factory=set)


def read(results: Sequence[Mapping[str, Any]]) -> Chart:
    """A chart of the entries of kind ``run`` and ``peer``; peers belong to the run in front of them.

    Args:
        results: entries as ``rosebatch.bench.session.run_session`` yields them. Peers that failed are left out.
    """
    chart = Chart()
    for entry in results:
        if entry["kind"] == "run":
            chart.groups.append(Group(entry["scenario"], _details(entry), [_bar(OURS, entry)]))
            chart.versions.setdefault(OURS, entry["versions"]["rosebatch"])
            chart.repeats.add(len(entry["seconds"]))
            if entry["gpu"] and entry["gpu"] not in chart.gpus:
                chart.gpus.append(entry["gpu"])
        elif entry["kind"] == "peer" and "error" not in entry:
            group = chart.groups[-1]
            group.bars.append(_bar(entry["peer"], entry))
            group.ratio = entry["ratio"] if group.ratio is None else min(group.ratio, entry["ratio"])
            chart.versions.setdefault(entry["peer"], entry["version"])
    return chart


def draw(chart: Chart, theme: Mapping[str, Any]) -> str:
    """The chart as an SVG document with a transparent background."""
    colors = dict(zip(chart.versions, theme["bars"], strict=False))
    parts = [*_header(chart, theme, colors)]
    y = float(_HEADER)
    for group in chart.groups:
        height = len(group.bars) * (_BAR + _BAR_GAP) - _BAR_GAP
        parts += _group(group, y, height, theme, colors)
        y += height + _GROUP_GAP
    parts += [_text(0, y + 14 + 16 * number, line, theme["dim"], 11.5) for number, line in enumerate(_caption(chart))]
    height = round(y + _FOOTER)
    label = escape(f"Output tokens per second of {', '.join(map(_name, chart.versions))}", quote=True)
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    )
    return "\n".join([f'{begin} font-family="{_FONT}" role="img" aria-label="{label}">', *parts, "</svg>", ""])


def _details(entry: Mapping[str, Any]) -> str:
    work = entry["workload"]
    return (
        f"{entry['model']}, {work['num_prompts']} {_TIMES} {_length(work['input_len'])}/{_length(work['output_len'])}"
    )


def _length(length: int | Sequence[int] | Mapping[str, int]) -> str:
    if isinstance(length, int):
        return str(length)
    low, high = (length["low"], length["high"]) if isinstance(length, Mapping) else (min(length), max(length))
    return f"{low}{_TO}{high}"


def _bar(engine: str, entry: Mapping[str, Any]) -> Bar:
    """Every run of an entry generates the same number of tokens, so rates follow from seconds."""
    rate, seconds = entry["output_tokens_per_s"], sorted(entry["seconds"])
    tokens = rate * seconds[(len(seconds) - 1) // 2]
    return Bar(engine, rate, tokens / seconds[-1], tokens / seconds[0])


def _header(chart: Chart, theme: Mapping[str, Any], colors: Mapping[str, str]) -> list[str]:
    parts = [_text(0, 17, "Output tokens per second", theme["text"], 17, weight=600)]
    x = float(_BARS_LEFT)
    for engine in chart.versions:
        parts.append(f'<rect x="{x:.1f}" y="{33}" width="11" height="11" rx="2" fill="{colors[engine]}"/>')
        parts.append(_text(x + 17, 43, _name(engine), theme["text"], 13, weight=600 if engine == OURS else 400))
        x += 40 + 8 * len(_name(engine))
    parts.append(_text(_RATIO_RIGHT, 43, f"{_TIMES} the faster peer", theme["dim"], 11.5, anchor="end"))
    parts.append(_text(0, 43, f"model, prompts {_TIMES} tokens in/out", theme["dim"], 11.5))
    return parts


def _group(group: Group, y: float, height: float, theme: Mapping[str, Any], colors: Mapping[str, str]) -> list[str]:
    middle = y + height / 2
    parts = [
        _text(0, middle - 2, group.title, theme["text"], 13, weight=600),
        _text(0, middle + 13, group.details, theme["dim"], 11),
    ]
    for number, bar in enumerate(group.bars):
        parts += _one_bar(bar, group.top, y + number * (_BAR + _BAR_GAP), theme, colors[bar.engine])
    if group.ratio is not None:
        color = colors[OURS]
        parts.append(_text(_RATIO_RIGHT, middle + 6, f"{group.ratio:.2f}{_TIMES}", color, 17, weight=600, anchor="end"))
    return parts


def _one_bar(bar: Bar, top: float, y: float, theme: Mapping[str, Any], color: str) -> list[str]:
    def x(rate: float) -> float:
        return _BARS_LEFT + BARS_WIDTH * rate / top

    width = BARS_WIDTH * bar.median / top
    title = f"<title>{escape(_name(bar.engine))}: {bar.median:,.0f} output tokens/s</title>"
    box = f'x="{_BARS_LEFT}" y="{y:.1f}" width="{width:.2f}" height="{_BAR}" rx="1.5"'
    parts = [f'<rect class="bar" {box} fill="{color}">{title}</rect>']
    if bar.fastest > bar.slowest:
        low, high, middle = x(bar.slowest), x(bar.fastest), y + _BAR / 2
        ends = "".join(f"M{at:.2f} {middle - _CAP:.1f}v{2 * _CAP:.1f}" for at in (low, high))
        line = f"M{low:.2f} {middle:.1f}H{high:.2f}{ends}"
        parts.append(f'<path class="whisker" d="{line}" fill="none" stroke="{theme["text"]}" stroke-width="1.2"/>')
    ours = bar.engine == OURS
    style = theme["text"] if ours else theme["dim"]
    parts.append(_text(x(bar.fastest) + 6, y + 9.5, _short(bar.median), style, 11.5, weight=600 if ours else 400))
    return parts


def _caption(chart: Chart) -> list[str]:
    versions = ", ".join(f"{_name(engine)} {version}" for engine, version in chart.versions.items())
    runs = f"{min(chart.repeats)} runs" if len(chart.repeats) == 1 else "all runs"
    return [
        f"{' and '.join(chart.gpus) or 'CPU'}. {versions}.",
        f"Bars: median of {runs}. Whiskers, where known: slowest and fastest run. Each group has its own scale.",
    ]


def _text(
    x: float, y: float, content: str, color: str, size: float, *, weight: int = 400, anchor: str = "start"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" font-size="{size}" font-weight="{weight}">{escape(content)}</text>'


def _name(engine: str) -> str:
    return _NAMES.get(engine, engine)


def _short(rate: float) -> str:
    """Three significant digits."""
    if rate < 1000:
        return f"{rate:.3g}"
    thousands = rate / 1000
    return f"{thousands:.{max(0, 3 - len(str(int(thousands))))}f}k"


def main() -> None:
    """Draw the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    paths = parser.parse_args().results
    chart = read([entry for path in paths for entry in json.loads(path.read_text(encoding="utf-8"))["results"]])
    for name, theme in THEMES.items():
        paths[0].with_name(f"{paths[0].stem}-{name}.svg").write_text(draw(chart, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
