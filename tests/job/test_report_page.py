"""The report as a page: complete, safe, and without any other file."""

import itertools
import re
from html.parser import HTMLParser

import pytest

from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.job.report.build import build_report, write_report
from rosebatch.job.report.html import columns
from rosebatch.job.report.page import page
from rosebatch.job.report.table import table, throughput_line
from rosebatch.job.report.tally import Tally
from tests.job import test_report

ENGINE = {**test_report.ENGINE, "model": "<b>toy & co</b>"}


class Outline(HTMLParser):
    """Fails if tags do not nest; collects texts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def report(job):
    """The report of a run with some rows, one of which failed."""
    lines = [{"prompt": f"row {i}", "max_tokens": 5 + i} for i in range(30)]
    _, tally, engine = job.run([*lines, {}])
    return build_report(tally, engine.stats, ENGINE, {"import": 0.5, "load": 0.25, "first token": 0.1}, 2.0)


def outline(report):
    text = page(report, throughput_line(report), table(report))
    return text, Outline(text)


def test_the_page_is_whole_and_says_what_the_table_says(report):
    """Tags nest, and all figures and four plots are there."""
    text, found = outline(report)
    assert {throughput_line(report), *itertools.chain(*table(report))} <= {*found.texts}
    assert found.tags.count("svg") == 5
    over_time = [f"{unit} over time" for unit in ("output tokens/s", "prompt tokens/s", "sequences", "% of the blocks")]
    assert re.findall(r'aria-label="(.*?)"', text) == [*over_time, "where the time went"]


def test_it_needs_nothing_else(report):
    """A script, font or picture from elsewhere would break the page without a network."""
    text, found = outline(report)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in found.attributes}
    assert not [word for word in ("http", "url(", "@import") if word in text.replace("http-equiv", "")]


def test_names_are_no_markup(report):
    """A model's folder may have any name, also one that looks like HTML."""
    text, found = outline(report)
    assert "<b>toy" not in text
    assert any("<b>toy & co</b>" in line for line in found.texts)


def test_a_run_without_results():
    """If every row failed, nothing may divide by zero or take a maximum of nothing."""
    report = build_report(Tally(), EngineStats(), ENGINE, {}, 1.0)
    _, found = outline(report)
    assert found.texts.count("nothing was run") == 4


def test_all_latencies_are_in_a_narrow_table(report):
    """Five columns beside long labels: p99 was past the edge at 1280 px, and most of them at 390."""
    for kind, seconds in (("ttft_s", 0.0125), ("tpot_s", 1.5), ("itl_s", 99.994), ("e2e_s", 12345.6)):
        report[kind] = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), seconds)
    text, found = outline(report)
    first = found.texts.index("TTFT")
    assert found.texts[first : first + 4] == ["TTFT", "TPOT", "ITL", "E2E"]
    for rank in ("mean", "p50", "p90", "p95", "p99"):
        place = found.texts.index(rank)
        assert found.texts[place + 1 : place + 5] == ["12.5 ms", "1.50 s", "99.99 s", "12,346 s"]
    assert "white-space: nowrap" not in text.split("max-width: 640px", 1)[1].split("</style>")[0]


def test_cells_bring_their_labels():
    """On a phone a row of many cells is a list of label and value, so no cell may lack its label."""
    found = Outline(columns(["engine", "tok/s"], [["<ours>", "12"], ["theirs", "9"]]))
    assert [value for name, value in found.attributes if name == "data-label"] == ["engine", "tok/s"] * 2
    assert found.texts == ["engine", "tok/s", "<ours>", "12", "theirs", "9"]


def test_colours_for_light_and_dark(report):
    """Every colour in use is defined for both."""
    text, _ = outline(report)
    used = set(re.findall(r"var\(--([a-z]+)\)", text))
    light, dark = (set(re.findall(r"--([a-z]+):", part)) for part in text.split("prefers-color-scheme: dark", 1))
    assert used <= light & dark


def test_the_name_decides(report, tmp_path):
    """The extension chooses between page and JSON."""
    write_report(report, tmp_path / "report.HTML")
    write_report(report, tmp_path / "report.json")
    assert (tmp_path / "report.HTML").read_text().startswith("<!doctype html>")
    assert (tmp_path / "report.json").read_text().startswith("{")
