"""The report for people: the throughput line and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from rosebatch.config.switches import Switches, is_on
from rosebatch.core.words import counted
from rosebatch.io.row_names import TEXTS
from rosebatch.io.tasks.registry import IN_WORDS

_RANKS = "mean/p50/p90/p95/p99"


def throughput_line(report: dict[str, Any]) -> str:
    """The line that other engines' benchmarks print too."""
    return (
        f"Throughput: {report['requests_per_s']:.2f} requests/s, {report['total_tokens_per_s']:.2f} total tokens/s, "
        f"{report['output_tokens_per_s']:.2f} output tokens/s"
    )


def table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and values for people."""
    engine, startup = report["engine"], report["startup_s"]
    errors = ", ".join(f"{count} {code}" for code, count in report["errors"].items())
    finished = ", ".join(f"{count} {reason}" for reason, count in sorted(report["finish_reasons"].items()))
    # Nobody has switched off what is off by default.
    usual = {s.name for s in fields(Switches) if is_on(s, engine["device"])}
    reasons = engine.get("switched_off_by_model", {})
    off = [
        name.replace("_", "-") + (f" ({reasons[name]})" if name in reasons else "")
        for name, on in engine["toggles"].items()
        if not on and name in usual
    ]
    host_work = ", ".join(f"{name} {us:.0f} µs" for name, us in report["host_us_per_row"].items())
    rows = [
        ("model", f"{engine['model']}, {engine['dtype']} on {engine['device']}" + _remarks(engine)),
        (
            "requests",
            f"{report['completed']} completed, {report['failed']} failed" + (f" ({errors})" if errors else ""),
        ),
        ("finished by", finished or "-"),
        ("prompt tokens", f"{report['prompt_tokens']} ({report['cache_hit_rate']:.1%} from the prefix cache)"),
        ("output tokens", f"{report['output_tokens']}"),
        (
            "elapsed",
            f"{report['elapsed_s']:.2f} s (prefill {report['prefill_s']:.2f}, decode {report['decode_s']:.2f})",
        ),
        ("start-up", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in startup.items())),
        (f"TTFT {_RANKS}", _milliseconds(report["ttft_s"])),
        (f"TPOT {_RANKS}", _milliseconds(report["tpot_s"])),
        (f"ITL {_RANKS}", _milliseconds(report["itl_s"])),
        (f"E2E {_RANKS}", _milliseconds(report["e2e_s"])),
        (
            "steps",
            f"{report['steps']}, {counted(report['syncs'], 'sync')}, {counted(report['preemptions'], 'preemption')}",
        ),
        ("host work per row", host_work or "-"),
        ("KV cache", _cache(report)),
        (
            "peak memory",
            ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in report["peak_memory_bytes"].items()),
        ),
    ]
    if report["drafted_tokens"] or report["forced_tokens"]:
        drafts = f"{report['accepted_tokens']} of {counted(report['drafted_tokens'], 'draft')} right"
        rows.append(("speculation", f"{drafts}, {counted(report['forced_tokens'], 'token')} forced by grammars"))
    if report["images"]:
        encoded = f"{report['encoded_images']} encoded in {report['image_s']:.2f} s"
        rows.append(("images", f"{report['images']} ({encoded}), {report['images_per_s']:.2f} images/s"))
    groups = engine.get("kv_cache_groups", ())
    if any(group["window"] for group in groups):
        rows.append(("KV cache holds", "; ".join(map(_capacity, groups))))
    if report["resumed"]:
        doubt = "" if report["resumed_exactly"] else "; a row may differ from that of a run without a break"
        rows.append(("resumed", f"{counted(report['resumed'], 'row')} of an earlier run{doubt}"))
    if engine["max_sequence_len"] < engine["max_model_len"]:
        fit = counted(engine["max_sequence_len"], "token")
        limits = f"{fit} fit the KV cache; the model allows {engine['max_model_len']}"
        rows.append(("longest sequence", limits))
    if engine.get("sampling"):
        rows.append(("sampling", ", ".join(f"{name} {value}" for name, value in engine["sampling"].items())))
    if report["adapters"]:
        named = ", ".join(f"{name} ({count})" for name, count in report["adapters"].items())
        loads = f"; {engine['max_loras']} at a time, {counted(report['adapter_loads'], 'load')}"
        rows.append(("adapters", named + (loads if report["adapter_loads"] else "")))
    rows += field_rows(report["ignored_fields"], report["unclear_fields"])
    rows += [(name, in_words(engine[name])) for name, in_words in IN_WORDS.items() if name in engine]
    if engine["sampler"] != "rosebatch":
        rows.append(("sampler", engine["sampler"]))
    return [*rows, ("switched off", ", ".join(off))] if off else rows


def field_rows(ignored: Mapping[str, int], unclear: Mapping[str, int]) -> list[tuple[str, str]]:
    """Lines about fields that were not served, with the number of rows that have them."""
    kinds = (("ignored fields", ignored), ("not understood", unclear))
    found = [
        (label, ", ".join(f"{name} ({rows})" for name, rows in counts.items())) for label, counts in kinds if counts
    ]
    if texts := [f"{{{name}}}" for name in TEXTS if name in unclear]:
        found.append(
            ("hint", f"--prompt-template puts columns such as {texts[0]} into prompts; or use --system-prompt")
        )
    return found


def _cache(report: Mapping[str, Any]) -> str:
    engine = report["engine"]
    if not engine["kv_cache_blocks"]:
        return "none, nothing is kept of a prompt"
    form = ", fp8" if engine.get("kv_cache_dtype") == "fp8" else ""
    back = f", {report['restored_blocks']} restored from the host" if report["restored_blocks"] else ""
    return f"{report['max_blocks_used']} of {engine['kv_cache_blocks']} blocks used at most{back}{form}"


def _capacity(group: Mapping[str, int]) -> str:
    """What a group of layers has room for."""
    layers = f"in {counted(group['layers'], 'layer')}"
    if group["window"]:
        return f"the last {counted(group['window'], 'token')} of {counted(group['sequences'], 'sequence')} {layers}"
    return f"{group['tokens']} tokens {layers}"


def _remarks(engine: Mapping[str, Any]) -> str:
    """What is worth saying after the model's name."""
    by = f", {engine['quantization']}" if engine.get("quantization") else ""
    by += f", with {engine['lora']} by --lora" if engine.get("lora") else ""
    by += f", with {engine['speculative_model']} by --speculative-model" if engine.get("speculative_model") else ""
    by += ", by transformers' code" if engine.get("model_impl") == "transformers" else ""
    return by + (", the demo model: no --model was given" if engine.get("is_demo_model") else "")


def provenance_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rows = [(name, report[name]) for name in ("date", "command", "input", "output", "host", "gpu", "git_revision")]
    return [*((name.replace("_", " "), value) for name, value in rows if value), ("versions", versions)]


def print_report(report: dict[str, Any], stream: TextIO) -> None:
    """Print throughput line and table: in colour on a terminal, else as plain lines."""
    print_table(throughput_line(report), table(report), stream)


def print_table(title: str, rows: Sequence[tuple[str, str]], stream: TextIO) -> None:
    """Print a title over labels and values: aligned on a terminal, else as plain lines."""
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(title=title, title_justify="left", show_header=False, box=None)
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column()
        for label, value in rows:
            grid.add_row(label, value)
        Console(file=stream).print(grid)
    else:
        stream.write("\n".join([title, *(f"{label}: {value}" for label, value in rows)]) + "\n")


def _milliseconds(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value * 1000:.1f}" for value in percentiles.values()) + " ms" if percentiles else "-"
