"""The main function of a worker that holds a shard of a model: it computes the plans of the driver."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from rosebatch.core.errors import UserError
from rosebatch.host.child_process import Failed, ParentLink, run_child
from rosebatch.launch import messages as m

if TYPE_CHECKING:
    from rosebatch.engine.plan import StepResult
    from rosebatch.engine.step_runner import StepRunner


def main() -> NoReturn:
    """Follow the driver until it ends."""
    run_child(_work, ParentLink)


def _work(link: ParentLink) -> None:
    try:
        _load_and_follow(link)
    except Exception as error:
        link.send(Failed.of(error))


def _load_and_follow(link: ParentLink) -> None:
    setup: m.Setup = link.receive()
    from rosebatch.engine.load import load_engine
    from rosebatch.launch.group import TorchGroup, open_store
    from rosebatch.launch.launch import split_threads
    from rosebatch.launch.plan import plan_launch

    plan = plan_launch(setup.config, quiet=True)
    if plan.source.state != setup.state:
        raise UserError(f"{plan.source.name}: the model's files changed while its ranks loaded them")
    split_threads(plan)
    store = open_store(setup.store, setup.shard.size)
    link.send(m.Ready())
    group = TorchGroup(setup.shard, store, plan.device)
    engine = load_engine(plan.source, plan.config, plan.switches, plan.device, group).engine
    follow(engine.runner, link.receive, engine.async_depth)


def follow(runner: "StepRunner", receive: Callable[[], Any], async_depth: int) -> None:
    """Compute plans forever.

    Args:
        runner: of this process.
        receive: waits for the next message of the driver.
        async_depth: plans that may be under way while the next one is launched.
    """
    masks: deque[Any] = deque()
    launched: deque[Callable[[], StepResult]] = deque()

    def next_masks() -> Any:
        """The driver sends them before anything that follows them."""
        if not masks:
            message = receive()
            assert isinstance(message, m.Masks), "the driver sends masks where they are needed"
            masks.append(message.masks)
        return masks.popleft()

    while True:
        message = receive()
        if isinstance(message, m.Masks):
            masks.append(message.masks)
            continue
        plan = message.plan
        if plan.reset:
            # The driver may have made the masks of aborted plans or not; the runner forgets these plans.
            masks.clear()
            launched.clear()
        launched.append(runner.launch(plan, next_masks))
        while len(launched) > async_depth:
            launched.popleft()()
