"""The forward pass over packed chunks of any length: a plan in, sampled tokens out. Serves every device."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.engine.extras import Extras
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.logits import adjust, constrain
from rosebatch.engine.logprobs import logprob_rows, prompt_logprobs, read_all
from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.sampler import sample
from rosebatch.engine.torch_runner.attention import GatheredAttention
from rosebatch.engine.torch_runner.batch import build_batch
from rosebatch.model.layers import Model
from rosebatch.ops import Ops
from rosebatch.request import Logprobs, Sequence


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
        result = self._run(plan)
        result = replace(result, seconds=time.perf_counter() - started, syncs=int(bool(result.token_ids)))
        return lambda: result

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute all chunks in one packed forward pass, sample the rows that ask for it."""
        assert not plan.decode_steps, "a window of decodes needs tokens that stay on the device"
        batch = build_batch(plan, self.cache.block_size, self.cache.data.device)
        self.cache.copy(plan.copies)
        attention = GatheredAttention(batch, self.cache, self.config, self.ops)
        hidden = self.model.forward(batch.input_ids, batch.positions, attention)
        of_prompts = prompt_logprobs(plan, hidden, self.model.logits)
        if not batch.sampling:
            return StepResult([], prompt_logprobs=of_prompts)
        logits = self.model.logits(hidden[batch.sample_rows])
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        changed = constrain(adjust(logits, sequences, self.ops), sequences, self.ops)
        tokens = sample(changed, batch.sampling, batch.sample_positions, self.ops, batched=self.batched_sampling)
        token_ids = [[token] for token in tokens.tolist()]
        return StepResult(token_ids, _logprobs(logits, tokens, sequences, token_ids), prompt_logprobs=of_prompts)


def _logprobs(
    logits: Tensor, tokens: Tensor, sequences: Seq[Sequence], token_ids: Seq[list[int]]
) -> list[list[Logprobs]]:
    most = Extras.of(sequences).logprobs
    if most is None:
        return []
    rows = logprob_rows(logits, tokens, most).cpu().numpy()[:, None]
    return read_all(rows, sequences, token_ids)
