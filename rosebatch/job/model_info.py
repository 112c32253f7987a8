"""What a job needs of its model, as plain values: they may come from another process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Decided before anything is loaded.

    Attributes:
        name: of the model, as results and reports have it.
        identity: what decides the results of a run, apart from its files: fields of the manifest.
        sampling: the model's own defaults, as fields of a row.
        pooling: the model's own, as fields of ``PoolingParams``.
        prompt_names: of the model's own texts that may precede a prompt.
        hidden_size: numbers of a vector that it embeds to.
        refused: see ``rosebatch.io.tasks.registry.refusals``.
        independent: whether no completion depends on its batch.
        shares_prefixes: whether what is computed for a prefix serves other rows, too.
        fit: what the model takes of the device, in one line; not of the model, so it may differ.
    """

    name: str
    identity: Mapping[str, Any]
    sampling: Mapping[str, Any]
    independent: bool
    pooling: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    prompt_names: Sequence[str] = ()
    hidden_size: int | None = None
    shares_prefixes: bool = True
    fit: str = field(default="", compare=False)
