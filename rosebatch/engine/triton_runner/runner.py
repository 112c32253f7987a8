"""The forward pass by kernels: packed prompts eagerly, decode steps as graphs; sampled tokens stay on the device.

The host launches and goes on. What a decode step needs lies in ``DeviceState``, which the step advances itself, so
that steps follow each other without the host; tokens come back through pinned memory when somebody asks. Where a
grammar decides what may come next, a step's tokens are sampled when the host has seen those before, while the device
computes its logits.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.engine.extras import Extras
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.logits import constraint_masks
from rosebatch.engine.logprobs import logprob_rows, prompt_logprobs, read_all
from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.sampler import sample
from rosebatch.engine.triton_runner.attention import AttentionContext, DecodeAttention, PackedAttention
from rosebatch.engine.triton_runner.graphs import Ran, StepGraphs
from rosebatch.engine.triton_runner.packing import MOST_PADDED_TOKENS, Layout, PackedInputs, pack, padded_size
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.engine.triton_runner.staging import Staging
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.model.layers import Model
from rosebatch.ops import DeviceOps, Ops
from rosebatch.request import Logprobs, Sequence
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
        self.state = DeviceState(max_num_seqs, width, window, device, config.vocab_size)
        self.context = AttentionContext(config, cache, self.state, ops, kernels, toggles)
        self.decodes = StepGraphs(self._decode_step, enabled=toggles.cuda_graph)
        self.packed = StepGraphs(self._packed_step, enabled=toggles.cuda_graph)
        cells = self._layout(MOST_PADDED_TOKENS).num_cells
        self._packed_cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.up, self.down = Staging(device), Staging(device)
        self.end_tokens = torch.tensor(config.eos_token_ids, dtype=torch.int32, device=device)
        self._first_tokens = torch.empty(1, max_num_seqs, dtype=torch.int32, device=device)
        self._steps = 0
        self._logits = torch.empty(0, device=device)
        # Sampling that waits for the host: which tokens a grammar allows depends on the token before.
        self._deferred: Callable[[], None] | None = None

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.engine.StepRunner``."""
        self._settle()
        return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        clock = _Clock(self.state.fields.device)
        self.state.apply(self.slots.update(plan), self.up, batched=self.toggles.batched_rollover)
        self.cache.copy(plan.copies)
        sampling = _Sampling.of(plan, self.slots)
        self.state.make_room(sampling.extras)
        if plan.decode_steps:
            return self._launch_decodes(plan, sampling, clock)
        return self._launch_packed(plan, sampling, clock)

    def _launch_decodes(self, plan: StepPlan, sampling: "_Sampling", clock: "_Clock") -> Callable[[], StepResult]:
        inside = self.toggles.fused_sampler and not sampling.guided
        bucket = self.slots.bucket(plan.chunks)
        ran = self.decodes.run(_Decode(bucket, sampling.extras if inside else None), plan.decode_steps)
        window = len(self.state.history)
        steps = [(self._steps + i) % window for i in range(plan.decode_steps)]
        self._steps += plan.decode_steps
        fetched: list[Callable[[], np.ndarray]] = []

        def finish() -> None:
            if not inside:
                assert plan.decode_steps == 1, "tokens are sampled outside of the graph"
                (columns,) = self.up.send(sampling.slots)
                self._sample(ran.out[columns], sampling, columns, self.state.history, self.state.step)
            fetched.append(self.down.fetch(self.state.history))
            if sampling.extras.logprobs is not None:
                fetched.append(self.down.fetch(self.state.logprobs[:-1]))
            clock.stop()

        def wait() -> StepResult:
            # Its own sampling only: that of a plan launched since needs what is read here.
            if self._deferred is finish:
                self._settle()
            where = np.ix_(np.array(steps), sampling.slots)
            rows = fetched[0]()[where].T.tolist()
            ids = [_until_ended(row[: chunk.length]) for row, chunk in zip(rows, plan.chunks, strict=True)]
            logprobs = (
                [] if len(fetched) == 1 else read_all(fetched[1]()[where].swapaxes(0, 1), sampling.sequences, ids)
            )
            return _result(ids, logprobs, clock, ran)

        self._deferred = finish
        if not sampling.guided:
            self._settle()
        return wait

    def _launch_packed(self, plan: StepPlan, sampling: "_Sampling", clock: "_Clock") -> Callable[[], StepResult]:
        if sampling.sequences:
            self.state.tell_tokens(list(zip(sampling.slots.tolist(), sampling.sequences, strict=True)), self.up)
        ran, columns, of_prompts = self._run_packed(plan, sampling)
        count = len(sampling.sequences)
        if not count:
            clock.stop()
            return lambda: _result([], [], clock, ran, of_prompts)
        self._sample(self.model.logits(ran.out[:count]), sampling, columns, self._first_tokens, None)
        fetch = self.down.fetch(self._first_tokens[0, :count])
        asked = sampling.extras.logprobs is not None
        fetch_logprobs = self.down.fetch(self.state.logprobs[-1, :count]) if asked else None
        clock.stop()

        def wait() -> StepResult:
            ids = [[token] for token in fetch().tolist()]
            rows = None if fetch_logprobs is None else fetch_logprobs()[:, None]
            return _result(ids, [] if rows is None else read_all(rows, sampling.sequences, ids), clock, ran, of_prompts)

        return wait

    def _run_packed(self, plan: StepPlan, sampling: "_Sampling") -> tuple[Ran, Tensor, dict[int, list[Logprobs]]]:
        """Of each chunk that samples, the last token's final hidden state, and the slot; and what prompts report."""
        reports = any(chunk.sequence.needs_prompt_logprobs for chunk in plan.chunks)
        padded = self.packed.enabled and plan.num_tokens <= MOST_PADDED_TOKENS and not reports
        tile_rows = self.kernels.tile_rows
        layout = self._layout(padded_size(plan.num_tokens)) if padded else Layout.exact(plan, tile_rows)
        cells, columns = self.up.send(pack(plan, self.slots, layout, tile_rows), sampling.slots)
        if padded:
            self._packed_cells[: len(cells)].copy_(cells)
            return self.packed.run(layout.size), columns, {}
        inputs = layout.inputs(cells)
        hidden = self._forward(inputs)
        of_prompts = prompt_logprobs(plan, hidden, self.model.logits) if reports else {}
        return Ran(hidden[inputs.last_rows]), columns, of_prompts

    def _packed_step(self, size: int) -> Tensor:
        inputs = self._layout(size).inputs(self._packed_cells)
        return self._forward(inputs)[inputs.last_rows]

    def _forward(self, inputs: PackedInputs) -> Tensor:
        attention = PackedAttention(self.context, inputs.rows, inputs.positions, inputs.tiles)
        return self.model.forward(inputs.input_ids, inputs.positions, attention)

    def _layout(self, size: int) -> Layout:
        return Layout.padded(size, self.kernels.tile_rows, self.slots.num_slots)

    def _decode_step(self, kind: "_Decode") -> Tensor:
        """One decode step of the first rows: tokens ``[size]``, or logits ``[size, V]`` where others sample them."""
        fields, size = self.state.fields, kind.size
        attention = DecodeAttention(self.context, size)
        hidden = self.model.forward(fields[layout.TOKEN, :size], fields[layout.POSITION, :size], attention)
        logits = self.model.logits(hidden)
        if kind.extras is not None:
            return self._choose(logits, kind.extras, None, self.state.history, self.state.step)
        if not len(self._logits):
            self._logits = torch.empty(self.slots.num_slots, logits.shape[1], dtype=logits.dtype, device=logits.device)
        # A graph keeps what it returns, and logits of every size would be a lot to keep.
        return self._logits[:size].copy_(logits)

    @torch.inference_mode()
    def _settle(self) -> None:
        """Do what was put off until the results before it were known."""
        if self._deferred is not None:
            finish, self._deferred = self._deferred, None
            finish()

    def _sample(
        self, logits: Tensor, sampling: "_Sampling", columns: Tensor, history: Tensor, step: Tensor | None
    ) -> None:
        """Choose tokens from logits ``[S, V]`` of these sequences, outside of any graph."""
        masks = None
        if sampling.guided:
            rows = [row for row, sequence in enumerate(sampling.sequences) if sequence.constraint is not None]
            words = constraint_masks(
                [c for s in sampling.sequences if (c := s.constraint) is not None], logits.shape[1]
            )
            flat, where = self.up.send(words.reshape(-1), np.array(rows, np.int32))
            masks = flat.view(words.shape), where
        sampler = None
        if not self.toggles.fused_sampler:

            def sampler(changed: Tensor) -> Tensor:
                params = [sequence.sampling for sequence in sampling.sequences]
                return sample(changed, params, sampling.positions, self.ops, batched=self.toggles.batched_sampling)

        self._choose(logits, sampling.extras, columns, history, step, masks, sampler)

    def _choose(
        self,
        logits: Tensor,
        extras: Extras,
        columns: Tensor | None,
        history: Tensor,
        step: Tensor | None,
        masks: tuple[Tensor, Tensor] | None = None,
        sampler: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits ``[S, V]`` to tokens ``[S]``, which are fed back; columns None are the first S."""
        state, places = self.state, slice(len(logits)) if columns is None else columns
        changed = logits
        if extras.adjusts:
            bias = state.bias if extras.biased else None
            changed = self.kernels.adjust(logits, state.marks, bias, columns, **state.penalties(places))
        if masks is not None:
            changed = changed.clone() if changed is logits else changed
            self.kernels.mask_(changed, *masks)
        tokens = sampler(changed) if sampler else self.kernels.sample_rows(changed, **state.sampling(places))
        if extras.logprobs is not None:
            state.keep_logprobs(logprob_rows(logits, tokens, extras.logprobs), places, step)
        if extras.adjusts:
            self.kernels.count_(state.marks, tokens, columns)
        self.kernels.advance(tokens, state.fields, columns, history, step, self.end_tokens)
        return tokens


class _Decode(NamedTuple):
    """A kind of decode step: its rows, and what it does beside sampling them; None where they are sampled outside."""

    size: int
    extras: Extras | None


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The sequences of a plan that are sampled: their slots as int32, and the positions that their tokens will have."""

    sequences: list[Sequence]
    slots: np.ndarray
    positions: list[int]
    extras: Extras
    guided: bool

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots) -> "_Sampling":
        chunks = [chunk for chunk in plan.chunks if chunk.samples]
        sequences = [chunk.sequence for chunk in chunks]
        return cls(
            sequences,
            np.array([slots.slot_of[sequence] for sequence in sequences], np.int32),
            [chunk.start + chunk.length for chunk in chunks],
            Extras.of(sequences),
            any(sequence.constraint is not None for sequence in sequences),
        )


def _result(
    ids: list[list[int]],
    logprobs: list[list[Logprobs]],
    clock: "_Clock",
    ran: Ran,
    of_prompts: Mapping[int, list[Logprobs]] | None = None,
) -> StepResult:
    return StepResult(
        ids,
        logprobs,
        of_prompts or {},
        seconds=clock.seconds(),
        syncs=int(bool(ids)),
        graph_replays=ran.replays,
        graph_captures=ran.captures,
    )


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
