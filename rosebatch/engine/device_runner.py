"""The forward pass by kernels: packed prompts eagerly, decode steps as graphs; sampled tokens stay on the device.

The host launches and goes on. What a decode step needs lies in ``DeviceState``, which the step advances itself, so
that steps follow each other without the host; tokens come back through pinned memory when somebody asks.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.engine.device_attention import AttentionContext, DecodeAttention, PackedAttention
from rosebatch.engine.device_state import DeviceState
from rosebatch.engine.graphs import Ran, StepGraphs
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.packing import MOST_PADDED_TOKENS, Layout, PackedInputs, pack, padded_size
from rosebatch.engine.plan import Chunk, StepPlan, StepResult
from rosebatch.engine.sampler import sample
from rosebatch.engine.slots import Slots
from rosebatch.engine.staging import Staging
from rosebatch.model.layers import Model
from rosebatch.ops import DeviceOps, Ops
from rosebatch.toggles import Toggles
from rosebatch_kernels.feedback import layout


class DeviceRunner:
    """Carries out step plans in order, without waiting for any.

    Args:
        model: the weights.
        config: its shape.
        cache: its KV cache, with one block more than the scheduler knows of.
        ops, kernels: the operators of this run.
        toggles: its switches.
        max_num_seqs: most sequences at a time.
        max_len: most tokens of a sequence.
        window: most decode steps in a plan.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        cache: KVCache,
        ops: Ops,
        kernels: DeviceOps,
        toggles: Toggles,
        *,
        max_num_seqs: int,
        max_len: int,
        window: int,
    ) -> None:
        device = cache.data.device
        width = -(-max_len // cache.block_size)
        self.model = model
        self.cache = cache
        self.ops = ops
        self.kernels = kernels
        self.toggles = toggles
        self.slots = Slots(max_num_seqs, width)
        self.state = DeviceState(max_num_seqs, width, window, device)
        self.context = AttentionContext(config, cache, self.state, ops, kernels, toggles)
        self.decodes = StepGraphs(self._decode_step, enabled=toggles.cuda_graph)
        self.packed = StepGraphs(self._packed_step, enabled=toggles.cuda_graph)
        cells = self._layout(MOST_PADDED_TOKENS).num_cells
        self._packed_cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.up, self.down = Staging(device), Staging(device)
        self.end_tokens = torch.tensor(config.eos_token_ids, dtype=torch.int32, device=device)
        self._first_tokens = torch.empty(1, max_num_seqs, dtype=torch.int32, device=device)
        self._steps = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.engine.StepRunner``."""
        clock = _Clock(self.state.fields.device)
        self.state.apply(self.slots.update(plan), self.up, batched=self.toggles.batched_rollover)
        self.cache.copy(plan.copies)
        if plan.decode_steps:
            return self._launch_decodes(plan, clock)
        return self._launch_packed(plan, clock)

    def _launch_decodes(self, plan: StepPlan, clock: "_Clock") -> Callable[[], StepResult]:
        slots = [self.slots.slot_of[chunk.sequence] for chunk in plan.chunks]
        ran = self.decodes.run(self.slots.bucket(plan.chunks), plan.decode_steps)
        if not self.toggles.fused_sampler:
            assert plan.decode_steps == 1, "tokens are sampled outside of the graph"
            (columns,) = self.up.send(np.array(slots, np.int32))
            self._sample_separately(ran.out[columns], plan.chunks, columns, self.state.history, self.state.step)
        window = len(self.state.history)
        rows = [(self._steps + i) % window for i in range(plan.decode_steps)]
        self._steps += plan.decode_steps
        fetch = self.down.fetch(self.state.history)
        clock.stop()

        def wait() -> StepResult:
            tokens = fetch()[np.ix_(rows, slots)].T.tolist()
            ids = [_until_ended(row[: chunk.length]) for row, chunk in zip(tokens, plan.chunks, strict=True)]
            return StepResult(ids, clock.seconds(), 1, ran.replays, ran.captures)

        return wait

    def _launch_packed(self, plan: StepPlan, clock: "_Clock") -> Callable[[], StepResult]:
        ran, columns = self._run_packed(plan)
        if not len(columns):
            clock.stop()
            return lambda: StepResult([], clock.seconds(), 0, ran.replays, ran.captures)
        logits = self.model.logits(ran.out[: len(columns)])
        if self.toggles.fused_sampler:
            tokens = self.kernels.sample_rows(logits, **self.state.sampling(columns))
            self.kernels.advance(tokens, self.state.fields, columns, self._first_tokens, None, self.end_tokens)
        else:
            sampling = [chunk for chunk in plan.chunks if chunk.samples]
            self._sample_separately(logits, sampling, columns, self._first_tokens, None)
        fetch = self.down.fetch(self._first_tokens[0, : len(columns)])
        clock.stop()
        return lambda: StepResult(
            [[token] for token in fetch().tolist()], clock.seconds(), 1, ran.replays, ran.captures
        )

    def _run_packed(self, plan: StepPlan) -> tuple[Ran, Tensor]:
        """Of each chunk that samples, the last token's final hidden state, and the slot."""
        padded = self.packed.enabled and plan.num_tokens <= MOST_PADDED_TOKENS
        tile_rows = self.kernels.tile_rows
        layout = self._layout(padded_size(plan.num_tokens)) if padded else Layout.exact(plan, tile_rows)
        slots = [self.slots.slot_of[chunk.sequence] for chunk in plan.chunks if chunk.samples]
        cells, columns = self.up.send(pack(plan, self.slots, layout, tile_rows), np.array(slots, np.int32))
        if not padded:
            return Ran(self._forward(layout.inputs(cells))), columns
        self._packed_cells[: len(cells)].copy_(cells)
        return self.packed.run(layout.size), columns

    def _packed_step(self, size: int) -> Tensor:
        return self._forward(self._layout(size).inputs(self._packed_cells))

    def _forward(self, inputs: PackedInputs) -> Tensor:
        attention = PackedAttention(self.context, inputs.rows, inputs.positions, inputs.tiles)
        return self.model.forward(inputs.input_ids, inputs.positions, attention)[inputs.last_rows]

    def _layout(self, size: int) -> Layout:
        return Layout.padded(size, self.kernels.tile_rows, self.slots.num_slots)

    def _decode_step(self, size: int) -> Tensor:
        """One decode step of the first ``size`` rows: logits ``[size, V]``, or tokens where it samples them itself.

        A graph keeps what it returns: logits of every size would be a lot to keep.
        """
        fields = self.state.fields
        attention = DecodeAttention(self.context, size)
        hidden = self.model.forward(fields[layout.TOKEN, :size], fields[layout.POSITION, :size], attention)
        logits = self.model.logits(hidden)
        if self.toggles.fused_sampler:
            tokens = self.kernels.sample_rows(logits, **self.state.sampling(slice(size)))
            self.kernels.advance(tokens, fields, None, self.state.history, self.state.step, self.end_tokens)
            return tokens
        return logits

    def _sample_separately(
        self, logits: Tensor, chunks: Sequence[Chunk], columns: Tensor, history: Tensor, step: Tensor | None
    ) -> None:
        params = [chunk.sequence.request.sampling for chunk in chunks]
        positions = [chunk.start + chunk.length for chunk in chunks]
        tokens = sample(logits, params, positions, self.ops, batched=self.toggles.batched_sampling)
        self.kernels.advance(tokens, self.state.fields, columns, history, step, self.end_tokens)


def _until_ended(tokens: list[int]) -> list[int]:
    """The tokens before the first -1, which stands where a sequence was no longer decoded."""
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens


class _Clock:
    """Seconds that the device spends between two points of its work."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._cuda = device.type == "cuda"
        self._started = self._stopped = time.perf_counter()
        self._mark()

    def stop(self) -> None:
        self._mark()
        self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the second point."""
        if not self._cuda:
            return self._stopped - self._started
        start, end = self._events
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds * 1e-3

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
