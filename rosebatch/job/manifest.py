"""What decides the results of a run. Written at its start; compared when another run wants to continue it."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.switches import flag
from rosebatch.core.errors import UserError
from rosebatch.io.columns import Columns
from rosebatch.io.tasks.registry import described_by
from rosebatch.job.config import JobConfig
from rosebatch.job.model_info import ModelInfo

_MISSING = "not given"
# Differs between two runs of the same kind.
_OF_ONE_RUN = {"created"}
# What has no flag of its own name.
_NAMES = {
    "model.name": "--model",
    "tokenizer.name": "--tokenizer",
    "columns.prompt": "--prompt-column",
    "columns.id": "--id-column",
    "columns.carried": "--columns",
    "columns.image": "--image-column",
    "columns.shared": "--prompt",
    "columns.template": "--prompt-template",
    "columns.system": "--system-prompt",
    "columns.keeps_prompt": "--keep-prompt",
    "sampling.structured_outputs.regex": "--regex",
    "input_format": "the format of the input",
    "gpu": "the GPU",
    **{f"versions.{name}": f"the version of {name}" for name in ("rosebatch", "python", "torch", "tokenizers")},
}
# Left out where they are not given: older runs have none.
_OF_MEDIA = ("media_root", "media_domains")
# Of the model, and of no meaning for a task whose rows have no images.
_OF_IMAGES = ("limit_images", "max_pixels")
# Hashes and whole files, which say nothing to people.
_CONTENTS = {
    "input": "the content of the input",
    "model.fingerprint": "the content of the model",
    "tokenizer.fingerprint": "the content of --tokenizer",
    "chat_template": "--chat-template",
    "sampling.structured_outputs.json": "--json-schema",
}


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
        **{name: value for name, value in facts.identity.items() if job.task.takes_images or name not in _OF_IMAGES},
        "sampling": dict(job.sampling),
        "seed": job.seed,
        "result_column": job.result_column,
        "columns": columns.as_dict(),
        "max_row_bytes": in_bytes(job.max_row_bytes),
        "return_token_ids": job.return_token_ids,
        "echo_model": job.echo_model,
        **({} if job.shard is None else {"shard": job.shard}),
        **{name: value for name in _OF_MEDIA if (value := getattr(job, name)) is not None},
        **job.task.description(facts.pooling, facts.refused),
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
    """How two manifests differ, for people: ``--temperature was 0.7, is 1.0``."""
    was, task = described_by(before).name, described_by(now).name
    if was != task:
        return [f"the command was rosebatch {was}, is rosebatch {task}"]
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        _difference(name, old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name not in _OF_ONE_RUN and old.get(name) != new.get(name)
    ]


def _difference(name: str, old: Any, new: Any) -> str:
    if name in _CONTENTS and None not in (old, new):
        return f"{_CONTENTS[name]} differs"
    # The last part of a name is that of its flag: a field of a row, a switch, or a setting of an embedding.
    setting = _NAMES.get(name) or _CONTENTS.get(name) or flag(name.rpartition(".")[2])
    before, now = (_shown(name, value) for value in (old, new))
    return f"{setting} was {before}, is {now}"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return _MISSING
    if name in _CONTENTS:
        return "given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
