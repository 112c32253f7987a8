"""What an engine needs of a runner."""

from collections.abc import Callable
from typing import Any, Protocol

from rosebatch.engine.plan import StepPlan, StepResult

# The masks of a plan's guided sequences, in the order of its ``sampled_ids``: ``[R, ceil(V / 32)]`` int32 of numpy. One
# with drafts has a mask for each token that is sampled.
# Token 0 is the lowest bit of the first word; a token with bit 0 must not come next.
Masks = Callable[[], Any]


class StepRunner(Protocol):
    """Carries out plans: one of the runners, or a fake in tests."""

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """Begin to compute a plan, after those launched before.

        Args:
            plan: the next one.
            masks: makes the grammars' masks when they are needed. The results of earlier plans must have been waited
                for.

        Returns:
            a function that waits for the result.
        """
        ...
