"""Carries out pickled plans in a process of its own: ``python -m tests.engine.remote_runner``."""

import pickle
import sys

from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.ops import select
from rosebatch.toggles import Toggles
from tests.engine.toy_model import CPU, ToyModel

BLOCKS, BLOCK_SIZE = 60, 4


def make_runner():
    import torch

    ops = select(Toggles.resolve({}, "cpu"))
    model = ToyModel(ops)
    cache = KVCache([spec.kv_shape for spec in model.attention], [BLOCKS], BLOCK_SIZE, torch.float32, CPU, ops)
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
