"""The forward pass over packed chunks of any length: a plan in, sampled tokens out. Works on every device."""

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, islice
from typing import cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rosebatch.core.request import PackedLogprobs
from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.images import ImageEncoder
from rosebatch.engine.plan import PackedStep, RestartPolicy, StepPlan, StepResult
from rosebatch.engine.pooling.pooled_states import PooledStates, reads_all
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.sampling.logits import SampledRow, adjust, constrain
from rosebatch.engine.sampling.logprobs import prompt_logprobs, read_all
from rosebatch.engine.sampling.sampler import sample
from rosebatch.engine.staging import Staging
from rosebatch.engine.step_runner import Masks
from rosebatch.engine.torch_runner.attention import TorchAttention
from rosebatch.engine.torch_runner.batch import BlockTables, build_batch
from rosebatch.engine.torch_runner.head_drafts import HeadDrafts
from rosebatch.model.contract import NO_HEADS, Model, OpenModel, PoolingHeads, SeeingModel
from rosebatch.model.eagle3.head import Eagle3Head
from rosebatch.ops.adapters import AdapterRows
from rosebatch.ops.ops import Ops
from rosebatch_kernels.common import host_waits


class TorchRunner:
    """Carries out packed steps one at a time; the tokens are read at the end of each.

    Args:
        model: the weights.
        cache: its KV cache.
        ops: the operators of this run.
        states: those of the model's layers that have one; None for a model without them.
        restarts: finds the rotary rows of tokens; None if they are the positions.
        images: encodes them; None for a model of text.
        pooling_heads: see ``PooledStates``.
        batched_sampling: sample like rows together.
        trim_last_layer: compute only rows that are read after the last layer's attention.
        head: drafts between steps, and has its planes behind the model's; None for no such drafts.
        adapters: where the model's linears look for each row's; None for a model without them.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        ops: Ops,
        states: StatePool | None = None,
        *,
        restarts: RestartPolicy | None = None,
        images: ImageEncoder | None = None,
        pooling_heads: PoolingHeads = NO_HEADS,
        batched_sampling: bool = True,
        trim_last_layer: bool = True,
        head: Eagle3Head | None = None,
        adapters: AdapterRows | None = None,
    ) -> None:
        self.model = model
        self._cached = [spec for spec in model.mixers if spec.planes and not spec.shares]
        self.cache = cache
        self.ops = ops
        self.states = states
        self.batched_sampling = batched_sampling
        self.trim_last_layer = trim_last_layer
        self.adapters = adapters
        self.tables = BlockTables(len(cache.num_blocks))
        self.restarts = restarts
        self.images = images
        self.pooling = PooledStates(pooling_heads)
        self.staging = Staging(cache.device)
        self.drafts = None if head is None else HeadDrafts(head, cache, len(self._cached), self.tables)

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.step_runner.StepRunner``: the result is there at once."""
        assert isinstance(plan, PackedStep), "decode windows need tokens that stay on the device"
        started, waits = time.perf_counter(), host_waits.count()
        if plan.reset:
            # An interrupted plan may have left a fetch unread.
            self.staging = Staging(self.cache.device)
        result = self._run(plan, masks)
        result = structs.replace(result, seconds=time.perf_counter() - started, syncs=host_waits.count() - waits)
        if self.images is not None:
            encoded = self.images.take_encoded()
            result = structs.replace(result, images=encoded.images, image_seconds=encoded.seconds())
        return lambda: result

    @torch.inference_mode()
    def _run(self, plan: PackedStep, masks: Masks) -> StepResult:
        """Copy blocks, compute all chunks in one packed forward pass, and sample."""
        specs, blocks = self.tables.specs, self.tables.blocks
        self.tables.update(plan)
        self.pooling.update(plan)
        if self.states is not None:
            self.states.update(plan)
        sections = None if self.images is None else self.images.sections
        both_ways = "" if self.images is None else self.images.both_ways
        batch = build_batch(
            plan.chunks,
            specs,
            blocks,
            self.cache.block_size,
            self.cache.device,
            self.restarts,
            axes=0 if self.images is None else self.images.axes,
            both_ways=both_ways != "",
        )
        self.cache.change(plan, self.staging)
        if self.states is not None:
            self.states.load(plan, self.states.slots.__getitem__, self.staging)
        attention = TorchAttention(
            batch, self.cache, self._cached, self.ops, self.states, sections, everywhere=both_ways != "windows"
        )
        forward, of_tokens = self.model.forward, batch.positions if sections is None else batch.rotary_rows
        if self.images is not None and (images := self.images.rows_of(plan.chunks, specs)) is not None:
            forward = partial(cast(SeeingModel, self.model).forward, images=images)
        states = None
        if self.drafts is not None:
            states = self.drafts.states()
            forward = partial(cast(OpenModel, self.model).forward, states=states)
        adapted = self.adapters is not None and self.adapters.set(
            ((specs[chunk.id].adapter, len(chunk.token_ids)) for chunk in plan.chunks), self.cache.device
        )
        # The rows of adapters are those of the whole step.
        trimmed = self.trim_last_layer and not adapted and not reads_all(plan, specs)
        count, of_prompts = len(batch.sampled), dict[int, PackedLogprobs]()
        if trimmed:
            wanted = batch.last_rows if count < plan.num_tokens else None
            hidden = ends = forward(batch.input_ids, of_tokens, attention, wanted)
        else:
            hidden = forward(batch.input_ids, of_tokens, attention)
            ends = hidden[batch.last_rows]
            operators = self.model.logits, self.ops.logprob_rows
            of_prompts = prompt_logprobs(plan.chunks, specs, hidden, *operators, self.staging, self.staging)()
        if self.states is not None:
            self.states.save(plan, self.states.slots.__getitem__, self.staging)
        if self.drafts is not None and states is not None:
            self.drafts.follow(batch, states)
        pooled = self.pooling.fetch(plan, specs, ends[count:], hidden, self.staging, self.staging)()
        if not batch.sampled:
            return StepResult([], prompt_logprobs=of_prompts, pooled=pooled)
        logits = self.model.logits(ends[:count])
        changed = adjust(logits, batch.sampled, self.ops)
        guided = [number for number, row in enumerate(batch.sampled) if row.spec.guided]
        if guided:
            changed = constrain(changed, guided, masks(), self.ops)
        params, positions = [row.spec.sampling for row in batch.sampled], [row.position for row in batch.sampled]
        tokens = sample(changed, params, positions, self.ops, self.staging, batched=self.batched_sampling)
        flat = iter(host_waits.to_list(tokens))
        lengths = [chunk.sampled for chunk in plan.chunks if chunk.sampled]
        token_ids = [list(islice(flat, length)) for length in lengths]
        return StepResult(token_ids, self._logprobs(logits, tokens, batch.sampled, token_ids), of_prompts, pooled)

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, sampled: list[SampledRow], token_ids: list[list[int]]
    ) -> list[PackedLogprobs]:
        limit = Features.of(row.spec for row in sampled).logprobs
        if limit is None:
            return []
        rows = host_waits.to_numpy(self.ops.logprob_rows(logits, tokens, limit, MAX_LOGPROBS))
        ends = list(accumulate(map(len, token_ids)))
        return read_all(np.split(rows, ends[:-1]), [sampled[end - 1].spec for end in ends], token_ids)
