"""What decides the results of a run. Written at its start; compared when another run wants to continue it."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.core.errors import UserError
from rosebatch.io.columns import Columns
from rosebatch.job.config import JobConfig
from rosebatch.job.model_info import ModelInfo

_MISSING = "nothing"
# Differs between two runs of the same kind.
_OF_ONE_RUN = {"created"}


def build_manifest(
    job: JobConfig,
    facts: ModelInfo,
    fingerprint: Callable[[], str],
    input_digest: str | None,
    *,
    input_format: str,
    columns: Columns,
) -> Callable[[], dict[str, Any]]:
    """Begin to make the manifest of a run. The returned function waits for the hash of the weights and gives it.

    The manifest has no limits of memory or batch, and not how many processes share the rows: a run may resume with
    others. Its values are as JSON gives them back, lists in place of tuples: another run's come from a file.

    Args:
        job: with the run's sampling defaults.
        facts: of the model.
        fingerprint: waits for the hash of the weights, which others compute, so loading need not wait.
        input_digest: SHA-256 of the input; None for a stream.
        input_format: how it is read.
        columns: what the names of columns mean.

    Raises:
        UserError: ``SOURCE_DATE_EPOCH`` is no time.
    """
    values = {
        "created": now(),
        "input": input_digest,
        "input_format": input_format,
        "model": {"name": facts.name},
        **facts.identity,
        "sampling": dict(job.sampling),
        "seed": job.seed,
        "result_column": job.result_column,
        "columns": columns.as_dict(),
        "max_row_bytes": in_bytes(job.max_row_bytes),
        "return_token_ids": job.return_token_ids,
        "echo_model": job.echo_model,
        **({} if job.shard is None else {"shard": job.shard}),
        **job.task.description(facts.pooling),
    }

    def wait() -> dict[str, Any]:
        whole = {**values, "model": {"name": facts.name, "fingerprint": fingerprint()}}
        return msgspec.json.decode(msgspec.json.encode(whole, enc_hook=str), type=dict[str, Any])

    return wait


def now() -> int:
    """Seconds since 1970, or SOURCE_DATE_EPOCH, the usual variable for reproducible builds.

    Raises:
        UserError: the variable is no time.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if not given:
        return int(time.time())
    if re.fullmatch(r"[0-9]{1,12}", given) is None:
        raise UserError(f"SOURCE_DATE_EPOCH={given}: must be whole seconds since 1970, such as 1700000000")
    return int(given)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How two manifests differ, for people: ``sampling.temperature was 0.7, is 1.0``."""
    old, new = dict(_flat(before)), dict(_flat(now))
    names = dict.fromkeys([*old, *new])
    return [
        f"{name} was {old.get(name, _MISSING)}, is {new.get(name, _MISSING)}"
        for name in names
        if name not in _OF_ONE_RUN and old.get(name, _MISSING) != new.get(name, _MISSING)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
