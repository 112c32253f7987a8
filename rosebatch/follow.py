"""The main function of a process that holds a part of a model, and follows another one's plans."""

import os
import signal
import sys
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn

from rosebatch.errors import UserError
from rosebatch.host.garbage import search_seldom
from rosebatch.host.parent_link import ParentLink
from rosebatch.ranks import messages as m


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
        link.tell(m.Failed(str(error)))
    except Exception as error:
        link.tell(m.Failed(f"{type(error).__name__}: {error}"))
    # To take PyTorch apart takes half a second.
    os._exit(1)


def _work(link: ParentLink, hear: Callable[[], Any]) -> None:
    setup: m.Setup = hear()
    from rosebatch.engine.load import load_engine
    from rosebatch.launch import divide_threads, plan_launch
    from rosebatch.ranks.following import follow
    from rosebatch.ranks.group import TorchGroup, find_store

    plan = plan_launch(setup.config, quiet=True)
    divide_threads(plan)
    store = find_store(setup.port, setup.share.size)
    link.tell(m.Ready())
    group = TorchGroup(setup.share, store, plan.device)
    engine = load_engine(plan.source, plan.config, plan.toggles, plan.device, group).engine
    follow(engine.runner, hear, engine.lookahead)
