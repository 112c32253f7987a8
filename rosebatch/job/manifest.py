"""What decides the results of a run. Written at its start; compared when another run wants to continue it."""

import hashlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rosebatch.config import in_bytes
from rosebatch.errors import UserError
from rosebatch.host.threads import in_background
from rosebatch.launch import LaunchPlan
from rosebatch.model.source import tokenizer_fingerprint
from rosebatch.version import __version__

_MISSING = "nothing"
# Differs between two runs of the same kind.
_OF_ONE_RUN = {"created"}


def build_manifest(
    plan: LaunchPlan,
    input_digest: str | None,
    *,
    input_format: str,
    sampling: Mapping[str, Any],
    seed: int | None,
    result_column: str | None,
    return_token_ids: bool,
) -> Callable[[], dict[str, Any]]:
    """Begin to make the manifest of a run. The returned function waits for the hash of the weights and gives it.

    Threads hash the weights meanwhile, so loading need not wait. The manifest has no limits of memory or batch: a run
    may resume with other ones.

    Args:
        plan: model, device, dtype, switches.
        input_digest: SHA-256 of the input; None for a stream.
        input_format: how it is read.
        sampling: the run's defaults, as far as they were given.
        seed: of the job.
        result_column: the one field of a row that holds its result; None: its fields are fields of the row.
        return_token_ids: whether rows have ``token_ids``.

    Raises:
        UserError: ``SOURCE_DATE_EPOCH`` is no time, or a file of the model is unreadable.
    """
    values = {
        "created": now(),
        "input": input_digest,
        "input_format": input_format,
        "model": {"name": plan.source.name},
        "load_format": plan.source.load_format,
        "tokenizer": _tokenizer(plan),
        "chat_template": _digest(plan.config.chat_template),
        "max_prompt_bytes": in_bytes(plan.config.max_prompt_bytes),
        "dtype": str(plan.source.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "sampler": plan.config.sampler,
        "sampling": dict(sampling),
        "seed": seed,
        "result_column": result_column,
        "return_token_ids": return_token_ids,
        "toggles": asdict(plan.toggles),
        "versions": {
            "rosebatch": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "tokenizers": version("tokenizers"),
        },
    }
    fingerprint = in_background(plan.source.fingerprint)
    return lambda: {**values, "model": {"name": plan.source.name, "fingerprint": fingerprint()}}


def _tokenizer(plan: LaunchPlan) -> dict[str, str] | None:
    """The tokenizer of ``--tokenizer``; None for the model's own."""
    if plan.config.tokenizer is None or plan.tokenizer_folder is None:
        return None
    return {"name": plan.config.tokenizer, "fingerprint": tokenizer_fingerprint(plan.tokenizer_folder)}


def _digest(path: str | None) -> str | None:
    """SHA-256 of a file's contents; None without one."""
    return None if path is None else hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()


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
