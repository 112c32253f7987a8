"""What the report counts and how it is shown."""

import io
import json
from dataclasses import asdict

import pytest
from msgspec import structs

from rosebatch.config.switches import Switches
from rosebatch.core.errors import RowError, UserError
from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.metrics.durations import Durations
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.job.report.build import build_report, write_report
from rosebatch.job.report.table import print_report, table, throughput_line
from rosebatch.job.report.tally import Tally

FIELDS = {
    *("requests", "completed", "failed", "resumed", "resumed_exactly", "errors", "ignored_fields", "unclear_fields"),
    *(
        "adapters",
        "adapter_loads",
        "finish_reasons",
        "prompt_tokens",
        "cached_tokens",
        "cache_hit_rate",
        "output_tokens",
    ),
    *("elapsed_s", "requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s"),
    *(
        "images",
        "encoded_images",
        "images_per_s",
        "image_s",
        "prefill_s",
        "decode_s",
        "startup_s",
        "ttft_s",
        "tpot_s",
        "itl_s",
        "e2e_s",
    ),
    *(
        "steps",
        "decode_steps",
        "syncs",
        "preemptions",
        "drafted_tokens",
        "accepted_tokens",
        "forced_tokens",
        "copied_blocks",
        "restored_blocks",
        "computed_tokens",
    ),
    *("max_running", "max_blocks_used", "peak_memory_bytes", "host_us_per_row", "timeline"),
    *("date", "command", "input", "output", "host", "gpu", "git_revision", "engine", "versions"),
}
ENGINE = {"model": "toy", "dtype": "float32", "device": "cpu", "sampler": "rosebatch", "max_model_len": 100}
ENGINE |= {"max_sequence_len": 100, "kv_cache_blocks": 32, "toggles": {"prefix_cache": True, "chunked_prefill": True}}


def completion(prompt=4, tokens=3, cached=0, reason="length", times=(0.0, 1.0, 2.0), sample=0, n=1):
    arrival, first, finish = times
    return Completion(
        request=Request(0, (1,) * prompt, SamplingParams(n=n)),
        sample=sample,
        token_ids=(5,) * tokens,
        finish_reason=reason,
        cached_tokens=cached,
        arrival_time=arrival,
        finish_time=finish,
        token_times=(first, *[finish] * (tokens - 1))[:tokens],
    )


def tally_of(*completions, errors=()):
    tally = Tally()
    for c in completions:
        tally.add(c)
    for code in errors:
        tally.add_error(RowError(code, "no"))
    return tally


def report_of(tally, seconds=2.0, stats=None, **engine):
    return build_report(tally, stats or EngineStats(), {**ENGINE, **engine}, {"load": 0.5}, seconds)


@pytest.mark.parametrize("exact", [True, False])
def test_a_resumed_run(exact):
    """Rows of a GPU may depend on where the run broke: the user must see it."""
    report = build_report(Tally(), EngineStats(), ENGINE, {}, 1.0, 7, resumed_exactly=exact)
    assert (report["resumed"], report["resumed_exactly"]) == (7, exact)
    shown = dict(table(report))["resumed"]
    assert shown.startswith("7 rows of an earlier run")
    assert ("may differ from that of a run without a break" in shown) == (not exact)


def test_tally():
    """Times are defined as in vLLM: TTFT from arrival, TPOT between further tokens, E2E for the whole."""
    tally = tally_of(
        completion(prompt=4, tokens=3, cached=2, times=(10.0, 10.5, 12.5)),
        completion(prompt=6, tokens=1, reason="stop", times=(10.0, 11.0, 11.0)),
        errors=["some_code", "some_code", "other_code"],
    )
    tokens = (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens)
    assert (tally.completed, tally.failed, *tokens) == (2, 3, 10, 2, 4)
    assert (tally.finish_reasons, tally.errors) == ({"length": 1, "stop": 1}, {"some_code": 2, "other_code": 1})
    ends = [kind.percentiles((50, 100)) for kind in (tally.ttft, tally.tpot, tally.e2e)]
    assert ends == [
        pytest.approx(dict(zip(("p50", "p100"), pair, strict=True)), rel=0.0025)
        for pair in ((0.5, 1.0), (1.0, 1.0), (1.0, 2.5))
    ]


def test_tally_of_a_row_with_several_completions():
    """One row: each prompt counts once; tokens, times and reasons count for every completion."""
    tally = Tally()
    tokens = [(10, 3, 4), (10, 5, 4), (7, 1, 0), (7, 2, 0)]
    tally.add_row(
        [
            completion(prompt=prompt, tokens=count, cached=cached, sample=i % 2, n=2, times=(0.0, 1.0, 1.0 + i))
            for i, (prompt, count, cached) in enumerate(tokens)
        ],
        ["stop", "length", "length", "stop"],
    )
    assert tally.completed == 1
    assert (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens) == (17, 4, 11)
    assert tally.finish_reasons == {"stop": 2, "length": 2}
    assert (len(tally.ttft), len(tally.tpot), len(tally.e2e)) == (4, 3, 4)
    assert tally.e2e.percentiles((100,)) == pytest.approx({"p100": 4.0}, rel=0.0025)


def test_report_fields():
    """Scripts rely on these names, on rates by wall time, and on plain JSON."""
    rows = completion(prompt=6, tokens=4, cached=3), completion(prompt=2, tokens=2)
    report = report_of(tally_of(*rows, errors=["some_code"]), seconds=4.0)
    assert set(report) == FIELDS
    assert json.loads(json.dumps(report)) == report
    expected = {"requests": 3, "completed": 2, "failed": 1, "errors": {"some_code": 1}, "finish_reasons": {"length": 2}}
    expected |= {"prompt_tokens": 8, "cached_tokens": 3, "cache_hit_rate": 0.375, "output_tokens": 6, "elapsed_s": 4.0}
    expected |= {"requests_per_s": 0.5, "prompt_tokens_per_s": 2.0, "output_tokens_per_s": 1.5}
    expected |= {"total_tokens_per_s": 3.5, "startup_s": {"load": 0.5}, "engine": ENGINE}
    assert {name: report[name] for name in expected} == expected
    assert report["peak_memory_bytes"]["host"] > 10 * 2**20
    assert {"rosebatch", "python", "torch"} <= set(report["versions"])


def test_report_of_a_run(job):
    """The engine's counters appear under their names."""
    lines = [{"prompt": "0123456", "max_tokens": 3}, {"prompt": "01234567", "max_tokens": 5}, {}]
    _, tally, engine = job.run(lines, seqs=1)
    report = report_of(tally, stats=engine.stats)
    expected = {"steps": 8, "decode_steps": 6, "syncs": 8, "computed_tokens": 9 + 8}
    expected |= {"max_running": 1, "copied_blocks": 0, "restored_blocks": 0, "preemptions": 0}
    assert {name: report[name] for name in expected} == expected
    assert (report["cached_tokens"], report["cache_hit_rate"]) == (4, 4 / 15)
    assert 0 < report["prefill_s"] + report["decode_s"] < 60
    assert (len(tally.ttft), len(tally.tpot), len(tally.e2e)) == (2, 2, 2)
    (shortest,), (longest,) = tally.ttft.percentiles([1]).values(), tally.e2e.percentiles([100]).values()
    assert 0 <= shortest <= longest


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {}),
        ([3.0], {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p95": 3.0, "p99": 3.0}),
        ([2.0, 1.0], {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p95": 2.0, "p99": 2.0}),
        ([float(n) for n in range(1, 11)], {"mean": 5.5, "p50": 5.0, "p90": 9.0, "p95": 10.0, "p99": 10.0}),
        ([float(n) for n in range(100, 0, -1)], {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}),
        ([float(n) for n in range(1, 1001)], {"mean": 500.5, "p50": 500.0, "p90": 900.0, "p95": 950.0, "p99": 990.0}),
    ],
    ids=["none", "one", "two", "ten", "hundred", "thousand"],
)
def test_percentiles(values, expected):
    """Nearest rank, without an off-by-one at the end or at round numbers."""
    report = report_of(Tally(ttft=Durations(values)))
    assert report["ttft_s"] == pytest.approx(expected, rel=0.0025)


def test_throughput_line():
    """Scripts for other tools look for exactly this line."""
    report = report_of(tally_of(completion(prompt=10, tokens=5)), seconds=2.0)
    assert throughput_line(report) == "Throughput: 0.50 requests/s, 7.50 total tokens/s, 2.50 output tokens/s"


def test_what_a_kv_cache_with_windows_holds():
    """Blocks alone do not tell: those of a window serve sequences of any length, and the others only tokens."""
    groups = [
        {"window": 0, "layers": 5, "blocks": 1000, "tokens": 64000},
        {"window": 1024, "layers": 1, "blocks": 90, "tokens": 5760, "sequences": 5},
    ]
    shown = dict(table(report_of(tally_of(completion()), kv_cache_groups=groups)))
    assert shown["KV cache holds"] == "64000 tokens in 5 layers; the last 1024 tokens of 5 sequences in 1 layer"
    assert "KV cache holds" not in dict(table(report_of(tally_of(completion()), kv_cache_groups=groups[:1])))


def test_blocks_that_came_back_from_the_host_are_told():
    """Without swaps there is nothing to tell."""
    cache = dict(table(report_of(tally_of(completion()), stats=EngineStats(restored_blocks=3))))["KV cache"]
    assert cache.endswith(" used at most, 3 restored from the host")
    assert "host" not in dict(table(report_of(tally_of(completion()))))["KV cache"]


def test_table():
    """It shows failures by code, switches that are off, another sampler, and a KV cache that limits the length."""
    tally = tally_of(completion(prompt=8, cached=2, times=(0.0, 0.25, 0.5)), errors=["some_code"])
    switches = {"prefix_cache": False, "chunked_prefill": True}
    shown = dict(table(report_of(tally, max_sequence_len=64, toggles=switches, sampler="flashinfer")))
    assert shown["model"] == "toy, float32 on cpu"
    assert shown["requests"] == "1 completed, 1 failed (1 some_code)"
    assert shown["finished by"] == "1 length"
    assert shown["prompt tokens"] == "8 (25.0% from the prefix cache)"
    assert shown["TTFT mean/p50/p90/p95/p99"] == "250.0 / 250.0 / 250.0 / 250.0 / 250.0 ms"
    assert shown["longest sequence"] == "64 tokens fit the KV cache; the model allows 100"
    assert shown["switched off"] == "prefix-cache"
    reason = {"prefix_cache": "there is a state"}
    shown |= dict(table(report_of(tally, toggles=switches, switched_off_by_model=reason)))
    assert shown["switched off"] == "prefix-cache (there is a state)"
    assert shown["sampler"] == "flashinfer"
    assert not {"longest sequence", "sampler", "switched off"} & set(dict(table(report_of(tally))))


def test_images_are_told():
    """Of a job with images, nobody knew whether it waited for the encoder. Completions of a prompt have it once."""
    request = Request(0, (1,) * 4, SamplingParams(n=2), images=("one", "two"))
    row = structs.replace(completion(n=2), request=request)
    tally, first = Tally(), Tally()
    first.add_row([row, completion(sample=1, n=2)], ["length"] * 2)
    tally.merge(first.take())
    stats, other = EngineStats(images=1, image_seconds=0.5), EngineStats(images=2, image_seconds=0.25)
    stats.merge(other)
    report = report_of(tally, stats=stats)
    fields = {"images": 2, "images_per_s": 1.0, "encoded_images": 3, "image_s": 0.75}
    assert {name: report[name] for name in fields} == fields
    assert dict(table(report))["images"] == "2 (3 encoded in 0.75 s), 1.00 images/s"
    assert "images" not in dict(table(report_of(tally_of(completion()))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_switches_that_are_off_by_default(device):
    """Each report named one that nobody had switched off."""
    switches = asdict(Switches.resolve({}, device))
    assert not all(switches.values())
    assert "switched off" not in dict(table(report_of(tally_of(completion()), device=device, toggles=switches)))


def test_a_run_without_completions():
    """Guards against a division by zero and percentiles of nothing."""
    report = report_of(tally_of(errors=["some_code"]))
    assert (report["cache_hit_rate"], report["ttft_s"], report["tpot_s"]) == (0.0, {}, {})
    shown = dict(table(report))
    assert (shown["TTFT mean/p50/p90/p95/p99"], shown["finished by"]) == ("-", "-")


def test_print_report_to_a_file():
    """Plain lines without colours or frames."""
    stream = io.StringIO()
    report = report_of(tally_of(completion()))
    print_report(report, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == throughput_line(report)
    assert lines[1:] == [f"{label}: {value}" for label, value in table(report)]
    assert "\x1b" not in stream.getvalue()


def test_print_report_to_a_terminal():
    """The same values, aligned."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    print_report(report_of(tally_of(completion())), stream)
    assert "Throughput:" in stream.getvalue() and "1 completed, 0 failed" in stream.getvalue()


def test_write_report(tmp_path):
    """JSON with a final newline; a missing folder gives the user one line."""
    report = report_of(tally_of(completion()))
    write_report(report, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == report
    with pytest.raises(UserError, match="No such file"):
        write_report(report, tmp_path / "none" / "report.json")
