"""The other ranks: they compute each plan of the leader."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rosebatch.engine.engine import StepRunner
from rosebatch.engine.plan import StepResult
from rosebatch.ranks import messages as m


def follow(runner: StepRunner, hear: Callable[[], Any], lookahead: int) -> None:
    """Compute plans for ever.

    Args:
        runner: of this process.
        hear: waits for the next message of the leader.
        lookahead: plans that may be under way while the next one is launched.
    """
    masks: deque[Any] = deque()
    launched: deque[Callable[[], StepResult]] = deque()

    def next_masks() -> Any:
        """The leader sends them before anything that follows them."""
        if not masks:
            message = hear()
            assert isinstance(message, m.Masks), "the leader sends masks where they are needed"
            masks.append(message.masks)
        return masks.popleft()

    while True:
        message = hear()
        if isinstance(message, m.Masks):
            masks.append(message.masks)
            continue
        plan = message.plan
        if plan.reset:
            masks.clear()
            while launched:
                # Nobody reads the result, or why there is none.
                with suppress(Exception):
                    launched.popleft()()
        launched.append(runner.launch(plan, next_masks))
        while len(launched) > lookahead:
            launched.popleft()()
