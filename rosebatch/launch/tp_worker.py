"""The main function of a process that holds a part of a model, and follows another one's plans."""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from rosebatch.core.errors import UserError
from rosebatch.host.garbage import search_seldom
from rosebatch.host.parent_link import ParentLink
from rosebatch.launch import messages as m

if TYPE_CHECKING:
    from rosebatch.engine.engine import StepRunner
    from rosebatch.engine.plan import StepResult


def main() -> NoReturn:
    """Follow the process at the connection whose descriptor is the first argument, until it ends."""
    # Ctrl-C in a terminal reaches all processes: the leader decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    search_seldom()
    inbox: SimpleQueue[Any] = SimpleQueue()
    link = ParentLink(int(sys.argv[1]), inbox.put)
    try:
        _work(link, inbox.get)
    except UserError as error:
        link.send(m.Failed(str(error)))
    except Exception as error:
        link.send(m.Failed(f"{type(error).__name__}: {error}"))
    # To take PyTorch apart takes half a second.
    os._exit(1)


def _work(link: ParentLink, receive: Callable[[], Any]) -> None:
    setup: m.Setup = receive()
    from rosebatch.engine.load import load_engine
    from rosebatch.launch.group import TorchGroup, find_store
    from rosebatch.launch.launch import plan_launch, split_threads

    plan = plan_launch(setup.config, quiet=True)
    split_threads(plan)
    store = find_store(setup.port, setup.shard.size)
    link.send(m.Ready())
    group = TorchGroup(setup.shard, store, plan.device)
    engine = load_engine(plan.source, plan.config, plan.switches, plan.device, group).engine
    follow(engine.runner, receive, engine.async_depth)


def follow(runner: "StepRunner", receive: Callable[[], Any], async_depth: int) -> None:
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
            message = receive()
            assert isinstance(message, m.Masks), "the leader sends masks where they are needed"
            masks.append(message.masks)
        return masks.popleft()

    while True:
        message = receive()
        if isinstance(message, m.Masks):
            masks.append(message.masks)
            continue
        plan = message.plan
        if plan.reset:
            # The leader may have made the masks of aborted plans or not; the runner forgets these plans.
            masks.clear()
            launched.clear()
        launched.append(runner.launch(plan, next_masks))
        while len(launched) > async_depth:
            launched.popleft()()
