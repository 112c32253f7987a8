"""The report of a run as plain values, and the files that hold it.

Fields have the names of ``vllm bench throughput`` and similar tools where they mean the same.
"""

import json
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rosebatch.core.errors import FailedRunError
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.host.paths import open_stream, takes_rows_in_order
from rosebatch.job.report.provenance import provenance
from rosebatch.job.report.table import provenance_rows, table, throughput_line
from rosebatch.job.report.tally import Tally


def build_report(
    tally: Tally,
    stats: EngineStats,
    description: dict[str, Any],
    startup: dict[str, float],
    seconds: float,
    resumed: int = 0,
    *,
    resumed_exactly: bool = True,
    input: str | None = None,
    output: str | None = None,
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report as plain values.

    Args:
        tally: counts over the rows.
        stats: counts of the engine.
        description: model, device, sampler, limits and switches.
        startup: seconds of each part of the start-up, generation left out.
        seconds: wall time of the job, start-up left out.
        resumed: rows that an earlier run finished. No other field counts them.
        resumed_exactly: whether the output equals that of a run without a break, whatever the batches were.
        input, output: names of the job's files.
        machine: fields of others, where this process has no engine.
    """
    total = tally.prompt_tokens + tally.output_tokens
    rows = tally.completed + tally.failed
    return {
        "requests": rows,
        "completed": tally.completed,
        "failed": tally.failed,
        "resumed": resumed,
        "resumed_exactly": resumed_exactly,
        "errors": dict(tally.errors),
        "ignored_fields": dict(tally.ignored),
        "unclear_fields": dict(tally.unclear),
        "adapters": dict(sorted(tally.adapters.items())),
        "adapter_loads": stats.adapter_loads,
        "finish_reasons": dict(tally.finish_reasons),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "cache_hit_rate": tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0,
        "output_tokens": tally.output_tokens,
        "images": tally.images,
        "encoded_images": stats.images,
        "elapsed_s": seconds,
        "requests_per_s": tally.completed / seconds,
        "prompt_tokens_per_s": tally.prompt_tokens / seconds,
        "output_tokens_per_s": tally.output_tokens / seconds,
        "total_tokens_per_s": total / seconds,
        "images_per_s": tally.images / seconds,
        "prefill_s": stats.prefill_seconds,
        "decode_s": stats.decode_seconds,
        "image_s": stats.image_seconds,
        "startup_s": startup,
        "steps": stats.steps,
        "decode_steps": stats.decode_steps,
        "syncs": stats.syncs,
        "preemptions": stats.preemptions,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "forced_tokens": stats.forced,
        "copied_blocks": stats.copied_blocks,
        "restored_blocks": stats.restored_blocks,
        "computed_tokens": stats.computed_tokens,
        "max_running": stats.max_running,
        "max_blocks_used": stats.max_blocks_used,
        "ttft_s": tally.ttft.summary(),
        "tpot_s": tally.tpot.summary(),
        "itl_s": stats.itl.summary(),
        "e2e_s": tally.e2e.summary(),
        "host_us_per_row": {name: seconds / rows * 1e6 for name, seconds in tally.host_seconds.items()} if rows else {},
        "timeline": stats.timeline.as_dict(),
        "peak_memory_bytes": peak_memory(),
        "engine": description,
        **provenance(input, output),
        **(machine or {}),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the report: a page if the name ends in ``.html``, else JSON. A pipe, device or descriptor is a stream.

    Raises:
        FailedRunError: the file cannot be written.
    """
    if path.suffix.lower() in (".html", ".htm"):
        from rosebatch.job.report.page import page

        content = page(report, throughput_line(report), [*table(report), *provenance_rows(report)])
    else:
        content = json.dumps(report, indent=2) + "\n"
    write_text(path, content)


def write_text(path: Path, content: str) -> None:
    """Write a file. A pipe, device or descriptor is a stream.

    Raises:
        FailedRunError: it cannot be written.
    """
    try:
        if takes_rows_in_order(path):
            with open_stream(path, "wb") as stream:
                stream.write(content.encode())
        else:
            _write_whole(path, content.encode())
    except OSError as error:
        raise FailedRunError(f"{path}: {error.strerror}; only this report is missing") from None


def _write_whole(path: Path, content: bytes) -> None:
    file = path.open("wb")
    try:
        with file:
            file.write(content)
    except OSError:
        # Half a report is none.
        with suppress(OSError):
            path.resolve().unlink()
        raise


def peak_memory() -> dict[str, int]:
    """The most bytes that this process has held so far, on the host and on the GPU if there is one."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    # A process that has not imported PyTorch has nothing on a GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak
