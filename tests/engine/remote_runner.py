"""Carries out pickled plans in a process of its own: ``python -m tests.engine.remote_runner``."""

import pickle
import sys

from rosebatch.config.switches import Switches
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.windows import window_groups
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.ops.select import select
from tests.engine.toy_model import CPU, LAYERS, MAX_LEN, ToyModel

BLOCKS, BLOCK_SIZE = 60, 4
WINDOWS, GROUP_OF = window_groups([window for *_, window in LAYERS], MAX_LEN)


def make_runner():
    import torch

    ops = select(Switches.resolve({}, "cpu"))
    model = ToyModel(ops)
    layers = [spec.planes for spec in model.mixers]
    cache = KVCache(layers, [BLOCKS] * len(WINDOWS), BLOCK_SIZE, torch.float32, CPU, ops, GROUP_OF)
    return TorchRunner(model, cache, ops)


def main():
    """A plan after the other on stdin, its result on stdout."""
    runner = make_runner()
    while True:
        try:
            plan = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(runner.launch(plan, lambda: None)(), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
