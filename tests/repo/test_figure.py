"""The throughput chart of the docs: what the script draws, and that the committed files are what it draws."""

import importlib.util
import json
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.helpers.checkout import ROOT

FIGURES = ROOT / "docs" / "figures"
RESULTS = json.loads((FIGURES / "throughput.json").read_text(encoding="utf-8"))["results"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw", FIGURES / "draw.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["draw"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["draw"]


def run(scenario="a", rate=100.0, seconds=(1.0, 2.0, 4.0), **more):
    work = {"num_prompts": 2, "input_len": {"low": 1, "high": 9}, "output_len": [3, 5]}
    entry = {"kind": "run", "scenario": scenario, "model": "m", "workload": work, "gpu": None}
    return entry | {"output_tokens_per_s": rate, "seconds": seconds, "versions": {"rosebatch": "1"}} | more


def peer(name="vllm", rate=50.0, seconds=(2.0,), ratio=2.0, **more):
    entry = {"kind": "peer", "scenario": "a", "model": "m", "peer": name, "version": "1"}
    return entry | {"output_tokens_per_s": rate, "seconds": seconds, "ratio": ratio} | more


def parse(drawing, results):
    return ElementTree.fromstring(drawing.draw(drawing.read(results), drawing.THEMES["light"]))


def widths(svg):
    return [float(bar.get("width")) for bar in svg.iter(f"{SVG}rect") if bar.get("class") == "bar"]


def texts(svg):
    return [text.text for text in svg.iter(f"{SVG}text")]


def test_the_committed_charts_are_what_the_script_draws(tmp_path):
    """A figure that was changed in the JSON alone, or a chart that was drawn by hand; twice the same bytes."""
    shutil.copy(FIGURES / "throughput.json", tmp_path)
    command = [sys.executable, str(FIGURES / "draw.py"), str(tmp_path / "throughput.json")]
    subprocess.run(command, check=True)
    for theme in ("light", "dark"):
        name = f"throughput-{theme}.svg"
        assert (tmp_path / name).read_bytes() == (FIGURES / name).read_bytes()


def test_the_ratios_are_those_of_the_table():
    """The picture and the table of docs/performance.md must not say different things."""
    lines = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    best = {}
    for entry in RESULTS:
        if entry["kind"] == "peer":
            best[entry["scenario"]] = min(entry["ratio"], best.get(entry["scenario"], entry["ratio"]))
    assert len(best) == 11
    for scenario, ratio in best.items():
        row = next(line for line in lines if line.startswith("| ") and scenario in line)
        assert f" {ratio:.2f} |" in row


def test_ratios_follow_from_the_figures():
    """A median that was mistyped; published figures have three digits, and some ratios two."""
    ours = {entry["scenario"]: entry["output_tokens_per_s"] for entry in RESULTS if entry["kind"] == "run"}
    for entry in RESULTS:
        median = sorted(entry["seconds"])[(len(entry["seconds"]) - 1) // 2]
        if entry["kind"] == "peer":
            ratio = ours[entry["scenario"]] / entry["output_tokens_per_s"]
            assert ratio == pytest.approx(entry["ratio"], abs=0.011)
        else:
            tokens = entry["output_tokens_per_s"] * median
            assert tokens == pytest.approx(round(tokens), rel=2e-4)


def test_bars_are_proportional_within_a_group(drawing):
    """The whole width stands for the fastest run of the group, whoever's it is."""
    results = [
        run(rate=100.0, seconds=(1.0, 2.0, 4.0)),
        peer(rate=50.0),
        peer("sglang", rate=25.0),
        run("b", 7.0, (1,)),
    ]
    drawn = widths(parse(drawing, results))
    full = drawing.BARS_WIDTH
    assert drawn == pytest.approx([full * 100 / 200, full * 50 / 200, full * 25 / 200, full])


def test_whiskers_go_from_the_slowest_to_the_fastest_run(drawing):
    """One run has no spread, and a line of no length would look like one."""
    svg = parse(drawing, [run(rate=100.0, seconds=(1.0, 2.0, 4.0)), peer(seconds=(2.0,))])
    (whisker,) = [path.get("d") for path in svg.iter(f"{SVG}path") if path.get("class") == "whisker"]
    left = min(float(rect.get("x")) for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "bar")
    start, end = (float(part.split()[0]) for part in (whisker[1:], whisker.split("H")[1].replace("M", " ")))
    assert start == pytest.approx(left + drawing.BARS_WIDTH * 50 / 200)
    assert end == pytest.approx(left + drawing.BARS_WIDTH)


def test_values_ratio_and_versions_are_printed(drawing):
    """Bars of one scale for each group cannot be compared without numbers."""
    svg = parse(
        drawing, [run(rate=12345.0, gpu="GPU <1> & 2"), peer(rate=999.0, ratio=12.3571), peer("sglang", ratio=13.0)]
    )
    found = texts(svg)
    assert "12.3k" in found
    assert "999" in found
    assert "12.36\u00d7" in found, "of the faster peer"
    assert "m, 2 \u00d7 1\u20139/3\u20135" in found
    assert "GPU <1> & 2. rosebatch 1, vLLM 1, SGLang 1." in found


def test_what_cannot_be_drawn_is_left_out(drawing):
    """A peer that failed has no seconds; comparisons and attributions are no bars."""
    failed = {"kind": "peer", "scenario": "a", "model": "m", "peer": "vllm", "error": "no memory"}
    svg = parse(drawing, [run(), failed, {"kind": "comparison"}, {"kind": "attribution"}])
    assert len(widths(svg)) == 1
    assert not any("vLLM" in text for text in texts(svg))


def test_themes_differ_in_colors_alone(drawing):
    """A number that only one of the two shows would be seen by half of the readers."""
    light, dark = (drawing.draw(drawing.read(RESULTS), theme) for theme in drawing.THEMES.values())
    assert light != dark
    for one, other in zip(*(theme_colors(theme) for theme in drawing.THEMES.values()), strict=True):
        light = light.replace(one, f"color of {other}")
        dark = dark.replace(other, f"color of {other}")
    assert light == dark


def theme_colors(theme):
    return [theme["text"], theme["dim"], *theme["bars"]]
