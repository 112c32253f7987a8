"""What the leading process tells the others, and they it: plain values, pickled."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rosebatch.config.run import RunConfig
from rosebatch.engine.plan import StepPlan
from rosebatch.ops.shard import Shard


@dataclass(frozen=True, slots=True)
class Setup:
    """To another rank, first of all.

    Attributes:
        config: of the run.
        shard: of the process.
        port: of the store where the processes find each other.
    """

    config: RunConfig
    shard: Shard
    port: int


class Launch(NamedTuple):
    """To another rank: compute a plan."""

    plan: StepPlan


class Masks(NamedTuple):
    """To another rank: which tokens the grammars of a plan allow, see ``rosebatch.engine.engine.Masks``."""

    masks: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """From another rank: it has found the model, and joins the group now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From another rank, the last thing: why it cannot go on."""

    message: str
