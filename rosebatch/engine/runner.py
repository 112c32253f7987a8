"""The only forward pass: a plan in, sampled tokens out."""

import torch

from rosebatch.config import ModelConfig
from rosebatch.engine.attention import PagedAttention
from rosebatch.engine.batch import build_batch
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.sampler import sample
from rosebatch.model.layers import Model
from rosebatch.ops import Ops


class Runner:
    """Carries out step plans on one device.

    Args:
        model: the weights.
        config: its shape.
        cache: its KV cache.
        ops: the operators of this run.
    """

    def __init__(self, model: Model, config: ModelConfig, cache: KVCache, ops: Ops) -> None:
        self.model = model
        self.config = config
        self.cache = cache
        self.ops = ops

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute all chunks in one packed forward pass, sample the rows that ask for it."""
        batch = build_batch(plan, self.cache.block_size, self.cache.data.device)
        self.cache.copy(plan.copies)
        attention = PagedAttention(batch, self.cache, self.config, self.ops)
        hidden = self.model.forward(batch.input_ids, batch.positions, attention)
        if not batch.sampling:
            return StepResult([])
        logits = self.model.logits(hidden[batch.sample_rows])
        return StepResult(sample(logits, batch.sampling, batch.sample_positions, self.ops))
