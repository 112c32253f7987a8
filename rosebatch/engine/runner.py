"""The forward pass over packed chunks of any length: a plan in, sampled tokens out. Serves every device."""

import time
from collections.abc import Callable

import torch

from rosebatch.config import ModelConfig
from rosebatch.engine.attention import GatheredAttention
from rosebatch.engine.batch import build_batch
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.sampler import sample
from rosebatch.model.layers import Model
from rosebatch.ops import Ops


class Runner:
    """Carries out step plans one at a time, the tokens read at the end of each.

    Args:
        model: the weights.
        config: its shape.
        cache: its KV cache.
        ops: the operators of this run.
        batched_sampling: sample like rows together.
    """

    def __init__(
        self, model: Model, config: ModelConfig, cache: KVCache, ops: Ops, *, batched_sampling: bool = True
    ) -> None:
        self.model = model
        self.config = config
        self.cache = cache
        self.ops = ops
        self.batched_sampling = batched_sampling

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.engine.StepRunner``: the result is there at once."""
        started = time.perf_counter()
        token_ids = self._run(plan)
        result = StepResult([[i] for i in token_ids], time.perf_counter() - started, syncs=bool(token_ids))
        return lambda: result

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[int]:
        """Copy blocks, compute all chunks in one packed forward pass, sample the rows that ask for it."""
        assert not plan.decode_steps, "a window of decodes needs tokens that stay on the device"
        batch = build_batch(plan, self.cache.block_size, self.cache.data.device)
        self.cache.copy(plan.copies)
        attention = GatheredAttention(batch, self.cache, self.config, self.ops)
        hidden = self.model.forward(batch.input_ids, batch.positions, attention)
        if not batch.sampling:
            return []
        logits = self.model.logits(hidden[batch.sample_rows])
        tokens = sample(logits, batch.sampling, batch.sample_positions, self.ops, batched=self.batched_sampling)
        return tokens.tolist()
