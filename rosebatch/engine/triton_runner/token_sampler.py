"""From a step's logits to tokens, which are fed back on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.plan import DecodeWindow, SequenceSpec, StepPlan
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.sampling.sampler import sample
from rosebatch.engine.staging import Staging
from rosebatch.engine.step_runner import Masks
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.engine.triton_runner.state import DeviceState, sampling_of
from rosebatch.ops.device import DeviceOps
from rosebatch.ops.ops import Ops


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sequences of a plan that get tokens.

    Attributes:
        specs: their specs.
        slots: their slots, int32.
        positions: those of their next tokens.
        features: what they need together.
        guided: the numbers of those that have a grammar.
        masks: makes the masks of these, see ``StepRunner.launch``.
    """

    specs: list[SequenceSpec]
    slots: np.ndarray
    positions: list[int]
    features: Features
    guided: list[int]
    masks: Masks

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots, masks: Masks) -> "Sampled":
        """Those of a plan that the slots have taken over."""
        positions: list[int]
        if isinstance(plan, DecodeWindow):
            positions = [row.end for row in plan.rows if row.length]
        else:
            # A property would take as long again.
            positions = [chunk.start + len(chunk.token_ids) for chunk in plan.chunks if chunk.sampled]
        ids = plan.sampled_ids
        specs = [slots.specs[sequence_id] for sequence_id in ids]
        return cls(
            specs,
            np.array([slots.slot_of[sequence_id] for sequence_id in ids], np.int32),
            positions,
            Features.of(specs),
            [number for number, spec in enumerate(specs) if spec.guided],
            masks,
        )


class TokenSampler:
    """Samples rows of logits, and advances the state of their sequences.

    Args:
        state: the state of all sequences.
        ops, kernels: the operators of this run.
        eos_token_ids: the model's end tokens.
        batched: sample like rows together, where no kernel samples all rows.
        invariant: a row's bits do not depend on what other rows ask for.

    Attributes:
        fits_graphs: whether one kernel samples all rows, so that sampling can be part of a graph.
        first_tokens: ``[1, num_slots]`` int32, of the last packed step.
    """

    def __init__(
        self,
        state: DeviceState,
        ops: Ops,
        kernels: DeviceOps,
        eos_token_ids: tuple[int, ...],
        *,
        batched: bool,
        invariant: bool = False,
    ) -> None:
        device = state.fields.device
        self._invariant = invariant
        self.state = state
        self.ops = ops
        self.kernels = kernels
        self.batched = batched
        self.fits_graphs = kernels.sample_rows is not None
        self.first_tokens = torch.empty(1, state.fields.shape[1], dtype=torch.int32, device=device)
        self._end_tokens = torch.tensor(eos_token_ids, dtype=torch.int32, device=device)

    def sample(self, logits: Tensor, sampled: Sampled, columns: Tensor, staging: Staging, *, decodes: bool) -> None:
        """The next tokens of these sequences from their logits ``[S, V]``, outside of any graph.

        Args:
            logits: one row for each of the sequences, in order.
            sampled: the sequences.
            columns: ``[S]``, their slots on the device.
            staging: copies masks and parameters in stream order.
            decodes: see ``next_tokens``.
        """
        masks = None
        if sampled.guided:
            words = sampled.masks()
            flat, rows = staging.send(words.reshape(-1), np.array(sampled.guided, np.int32))
            masks = flat.view(words.shape), rows

        def in_groups(changed: Tensor) -> Tensor:
            params = [spec.sampling for spec in sampled.specs]
            return sample(changed, params, sampled.positions, self.ops, staging, batched=self.batched)

        self.next_tokens(logits, sampled.features, columns, masks, in_groups, decodes=decodes)

    def next_tokens(
        self,
        logits: Tensor,
        features: Features,
        columns: Tensor | None,
        masks: tuple[Tensor, Tensor] | None = None,
        in_groups: Callable[[Tensor], Tensor] | None = None,
        *,
        decodes: bool,
    ) -> Tensor:
        """Logits ``[S, V]`` to tokens ``[S]``, which are fed back.

        Args:
            logits: one row for each sequence.
            features: what the step does in addition to sampling.
            columns: ``[S]``, the rows' slots; None for the first S.
            masks: those of grammars, and the rows that they are for.
            in_groups: samples without a kernel for all rows.
            decodes: whether ``DeviceState.history`` keeps the tokens; else they are the first ones of prompts.
        """
        state, places = self.state, slice(len(logits)) if columns is None else columns
        history, step = (state.history, state.step) if decodes else (self.first_tokens, None)

        def choose_unchanged() -> Tensor:
            return self._choose(logits if masks is None else _copy(logits), places, masks, in_groups)

        if features.adjusts:
            bias = state.bias if features.biased else None
            changed = self.kernels.adjust(logits, state.token_counts, bias, columns, **state.penalties(places))
            tokens = self._choose(changed, places, masks, in_groups)
            if self._invariant and logits.dtype != torch.float32:
                # Adjusted logits are fp32, and the compiler has each type added up in another order.
                tokens = torch.where(state.adjusts(places), tokens, choose_unchanged())
        else:
            tokens = choose_unchanged()
        if features.logprobs is not None:
            rows = self.kernels.logprob_rows(logits, tokens, features.logprobs, MAX_LOGPROBS)
            state.keep_logprobs(rows, places, step)
        if features.adjusts:
            self.kernels.count_(state.token_counts, tokens, columns)
        self.kernels.advance(tokens, state.fields, columns, history, step, self._end_tokens)
        return tokens

    def verify(self, logits: Tensor, rows: Tensor, own: Tensor, tokens: Tensor, firsts: Tensor) -> Tensor:
        """Logits ``[B · Q, V]`` of a step with drafts to tokens ``[B · Q]``, of which the right ones are fed back.

        Args:
            logits: one row for each of ``rows``.
            rows: ``[NUM_FIELDS, B · Q]``, see ``rosebatch_kernels.drafts``.
            own, tokens, firsts: the sequences' fields, and their tokens.
        """
        assert self.kernels.sample_rows is not None, "one kernel samples all rows"
        state, chosen = self.state, self.kernels.sample_rows(logits, **sampling_of(rows))
        self.kernels.verify(chosen, rows, own, tokens, firsts, state.history, state.step, self._end_tokens)
        return chosen

    def _choose(
        self,
        logits: Tensor,
        places: Tensor | slice,
        masks: tuple[Tensor, Tensor] | None,
        in_groups: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Tokens ``[S]`` from logits, which masks change in place."""
        if masks is not None:
            self.kernels.mask_(logits, *masks)
        if self.kernels.sample_rows is None:
            assert in_groups is not None, "outside of a graph, the rows to sample are known"
            return in_groups(logits)
        return self.kernels.sample_rows(logits, **self.state.sampling(places))


def _copy(logits: Tensor) -> Tensor:
    """Rows that begin on 16 bytes, as the model's own do: kernels add up numbers in an order that goes by it."""
    rows, size = logits.shape
    return logits.new_empty(rows, -(-size // 8) * 8)[:, :size].copy_(logits)
