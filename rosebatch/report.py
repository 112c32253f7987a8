"""What a run did and how fast: counted while it runs, then one line, a table, or JSON.

Names follow ``vllm bench throughput`` and its kin where they mean the same: TTFT is the time from entering the engine
to the first token, TPOT the mean time between a request's further tokens, E2E from entering to the last token.
"""

import json
import platform
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from rosebatch import __version__
from rosebatch.durations import Durations
from rosebatch.engine.stats import EngineStats
from rosebatch.errors import RowError, UserError
from rosebatch.request import Completion
from rosebatch.toggles import Toggles

_PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Tally:
    """Counts over the completions of a run; times in seconds.

    Attributes:
        host_seconds: of each kind of work that is done for a row beside the engine's.
    """

    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    host_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ttft: Durations = field(default_factory=Durations)
    tpot: Durations = field(default_factory=Durations)
    e2e: Durations = field(default_factory=Durations)

    def add(self, completion: Completion) -> None:
        """Count a row that has one completion."""
        self.add_row([completion], [completion.finish_reason])

    def add_row(self, completions: Sequence[Completion], finish_reasons: Iterable[str]) -> None:
        """Count a row.

        Args:
            completions: of each of its prompts ``n``, one behind the other.
            finish_reasons: of each, as the result has it.
        """
        self.completed += 1
        self.finish_reasons.update(finish_reasons)
        for completion in completions:
            tokens = len(completion.token_ids)
            if completion.request.choice % completion.request.sampling.n == 0:
                self.prompt_tokens += len(completion.request.prompt_token_ids)
                self.cached_tokens += completion.cached_tokens
            self.output_tokens += tokens
            self.ttft.add(completion.first_token_time - completion.arrival_time)
            self.e2e.add(completion.finish_time - completion.arrival_time)
            if tokens > 1:
                self.tpot.add((completion.finish_time - completion.first_token_time) / (tokens - 1))

    def add_error(self, error: RowError) -> None:
        """Count a row that failed."""
        self.errors[error.code] += 1

    @property
    def failed(self) -> int:
        """Rows that failed."""
        return self.errors.total()


def build_report(
    tally: Tally,
    stats: EngineStats,
    description: dict[str, Any],
    startup: dict[str, float],
    seconds: float,
    resumed: int = 0,
) -> dict[str, Any]:
    """The report as plain values.

    Args:
        tally: of the rows.
        stats: of the engine.
        description: model, device, sampler, limits, toggles.
        startup: seconds of each part of the start-up, apart from generation.
        seconds: wall time of the job after start-up.
        resumed: rows that an earlier run finished, which count nowhere else.
    """
    total = tally.prompt_tokens + tally.output_tokens
    rows = tally.completed + tally.failed
    return {
        "requests": rows,
        "completed": tally.completed,
        "failed": tally.failed,
        "resumed": resumed,
        "errors": dict(tally.errors),
        "finish_reasons": dict(tally.finish_reasons),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "cache_hit_rate": tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0,
        "output_tokens": tally.output_tokens,
        "elapsed_s": seconds,
        "requests_per_s": tally.completed / seconds,
        "prompt_tokens_per_s": tally.prompt_tokens / seconds,
        "output_tokens_per_s": tally.output_tokens / seconds,
        "total_tokens_per_s": total / seconds,
        "prefill_s": stats.prefill_seconds,
        "decode_s": stats.decode_seconds,
        "startup_s": startup,
        "steps": stats.steps,
        "decode_steps": stats.decode_steps,
        "syncs": stats.syncs,
        "preemptions": stats.preemptions,
        "copied_blocks": stats.copied_blocks,
        "computed_tokens": stats.computed_tokens,
        "max_running": stats.max_running,
        "max_blocks_used": stats.max_blocks_used,
        "ttft_s": tally.ttft.percentiles(_PERCENTILES),
        "tpot_s": tally.tpot.percentiles(_PERCENTILES),
        "e2e_s": tally.e2e.percentiles(_PERCENTILES),
        "host_us_per_row": {name: seconds / rows * 1e6 for name, seconds in tally.host_seconds.items()} if rows else {},
        "timeline": stats.timeline.as_dict(),
        "peak_memory_bytes": peak_memory(),
        "engine": description,
        "versions": {"rosebatch": __version__, "python": platform.python_version(), **_versions()},
    }


def throughput_line(report: dict[str, Any]) -> str:
    """The one line that people of this field know."""
    return (
        f"Throughput: {report['requests_per_s']:.2f} requests/s, {report['total_tokens_per_s']:.2f} total tokens/s, "
        f"{report['output_tokens_per_s']:.2f} output tokens/s"
    )


def table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value, for people."""
    engine, startup = report["engine"], report["startup_s"]
    errors = ", ".join(f"{count} {code}" for code, count in report["errors"].items())
    finished = ", ".join(f"{count} {reason}" for reason, count in sorted(report["finish_reasons"].items()))
    served = {switch.name for switch in fields(Toggles) if engine["device"] in switch.metadata["devices"]}
    off = [name.replace("_", "-") for name, on in engine["toggles"].items() if not on and name in served]
    rows = [
        ("model", f"{engine['model']}, {engine['dtype']} on {engine['device']}"),
        (
            "requests",
            f"{report['completed']} completed, {report['failed']} failed" + (f" ({errors})" if errors else ""),
        ),
        ("finished by", finished or "-"),
        (
            "prompt tokens",
            f"{report['prompt_tokens']} ({report['cache_hit_rate']:.1%} from the prefix cache)",
        ),
        ("output tokens", f"{report['output_tokens']}"),
        (
            "elapsed",
            f"{report['elapsed_s']:.2f} s (prefill {report['prefill_s']:.2f}, decode {report['decode_s']:.2f})",
        ),
        ("start-up", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in startup.items())),
        ("TTFT p50/p90/p99", _milliseconds(report["ttft_s"])),
        ("TPOT p50/p90/p99", _milliseconds(report["tpot_s"])),
        ("E2E p50/p90/p99", _milliseconds(report["e2e_s"])),
        ("steps", f"{report['steps']}, {report['syncs']} syncs, {report['preemptions']} preemptions"),
        ("host work a row", ", ".join(f"{name} {us:.0f} µs" for name, us in report["host_us_per_row"].items()) or "-"),
        ("KV cache", f"{report['max_blocks_used']} of {engine['kv_cache_blocks']} blocks used at most"),
        (
            "peak memory",
            ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in report["peak_memory_bytes"].items()),
        ),
    ]
    if report["resumed"]:
        rows.append(("resumed", f"{report['resumed']} rows of an earlier run"))
    if engine["max_sequence_len"] < engine["max_model_len"]:
        limits = f"{engine['max_sequence_len']} tokens, by the KV cache; the model allows {engine['max_model_len']}"
        rows.append(("longest sequence", limits))
    if engine["sampler"] != "rosebatch":
        rows.append(("sampler", engine["sampler"]))
    return [*rows, ("switched off", ", ".join(off))] if off else rows


def print_report(report: dict[str, Any], stream: TextIO) -> None:
    """Throughput line and table: with colour on a terminal, plain lines otherwise."""
    print_table(throughput_line(report), table(report), stream)


def print_table(title: str, rows: Sequence[tuple[str, str]], stream: TextIO) -> None:
    """A title over labels and values: laid out on a terminal, plain lines otherwise."""
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


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the report, as a page if the name ends in ``.html``, else as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    if path.suffix.lower() in (".html", ".htm"):
        from rosebatch.report_page import page

        content = page(report, throughput_line(report), table(report))
    else:
        content = json.dumps(report, indent=2) + "\n"
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def peak_memory() -> dict[str, int]:
    """Most bytes held by this process so far: of the host, and of the GPU where there is one."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def _milliseconds(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value * 1000:.1f}" for value in percentiles.values()) + " ms" if percentiles else "-"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "tokenizers", "safetensors")}
