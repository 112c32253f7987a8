"""The messages between the driver, which is rank 0, and the workers; see ``rosebatch.host.child_process``."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rosebatch.config.run import RunConfig
from rosebatch.engine.plan import StepPlan
from rosebatch.ops.shard import Shard


@dataclass(frozen=True, slots=True)
class Setup:
    """To a worker, first of all.

    Attributes:
        config: of the run.
        shard: of the process.
        store: path of the store where the processes find each other.
        state: of the model's files, see ``rosebatch.model.source.ModelSource``.
    """

    config: RunConfig
    shard: Shard
    store: str
    state: str


class Launch(NamedTuple):
    """To a worker: compute a plan."""

    plan: StepPlan


class Masks(NamedTuple):
    """To a worker: which tokens the grammars of a plan allow, see ``rosebatch.engine.step_runner.Masks``."""

    masks: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: it has found the model, and joins the group now."""
