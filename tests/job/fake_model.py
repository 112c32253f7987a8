"""A fake model over a tokenizer of bytes: the whole job runs without a tensor, and every answer is known."""

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Logprobs
from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import Chunk, PackedStep, SequenceSpec, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.step_runner import Masks
from rosebatch.launch.launch import Launched, make_grammars
from rosebatch.launch.plan import LaunchPlan
from rosebatch.model.source import ModelSource
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import BYTES, EOS
from tests.helpers.model_configs import small_config

HIDDEN = 8
# After this many tokens an answer with a grammar ends as soon as the grammar allows.
_LONG = 30


class FakeModel:
    """Continues every prompt by a function of its tokens, and of the seed if it samples.

    If a grammar forbids the chosen token, the same function picks an allowed one. If the token would end the completion
    before ``min_tokens``, a plus sign replaces it. Penalties and biases have no effect.

    It also checks what plans tell a runner: sequences are started before they are computed and released once, and
    their tokens are those that it sampled itself.

    Args:
        answers: prompt text -> the bytes that follow it, then the end token. Other prompts get pseudo-random letters.
        before_step: called with the plan of every step.
    """

    def __init__(
        self, answers: dict[str, bytes] | None = None, before_step: Callable[[StepPlan], None] | None = None
    ) -> None:
        self._answers = {prompt.encode(): answer for prompt, answer in (answers or {}).items()}
        self._before_step = before_step
        self._live: set[int] = set()
        # A preempted sequence continues from these, so they outlive its release.
        self._specs: dict[int, SequenceSpec] = {}
        self._token_ids: dict[int, list[int]] = {}

    def next_token(self, token_ids: Sequence[int], prompt: Sequence[int], seed: int | None) -> int:
        answer = self._answers.get(bytes(min(i, 255) for i in prompt))
        if answer is not None:
            position = len(token_ids) - len(prompt)
            return answer[position] if position < len(answer) else EOS
        return ord("a") + _number(token_ids, seed) % 26

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        assert isinstance(plan, PackedStep)
        if self._before_step is not None:
            self._before_step(plan)
        self._update(plan)
        allowed = self._allowed(plan, masks)
        sampled, logprobs = [], []
        for sequence_id in plan.sampled_ids:
            spec, token_ids = self._specs[sequence_id], self._token_ids[sequence_id]
            token, limit = self._sample(spec, token_ids, allowed.get(sequence_id)), spec.sampling.logprobs
            sampled.append([token])
            logprobs.append([] if limit is None else [scored(token, len(token_ids), limit)])
            token_ids.append(token)
        reports = {i: _prompt_logprobs(chunk, self._specs[chunk.id]) for i, chunk in enumerate(plan.chunks)}
        of_prompts = {i: report for i, report in reports.items() if report}
        pooled = {i: self.pooled(self._token_ids[chunk.id]) for i, chunk in enumerate(plan.chunks) if chunk.pools}
        result = StepResult(sampled, logprobs, of_prompts, pooled, seconds=1e-3, syncs=1)
        return lambda: result

    def _update(self, plan: PackedStep) -> None:
        if plan.reset:
            self._live.clear()
        for sequence_id in plan.released:
            self._live.remove(sequence_id)
            spec, token_ids = self._specs[sequence_id], self._token_ids[sequence_id]
            if len(token_ids) == spec.max_len or token_ids[-1] in spec.stop_ids:
                del self._specs[sequence_id], self._token_ids[sequence_id]
        for spec in plan.started:
            self._live.add(spec.id)
            if self._specs.get(spec.id) is not spec:
                self._specs[spec.id], self._token_ids[spec.id] = spec, list(spec.prompt_token_ids)
        for chunk in plan.chunks:
            assert chunk.id in self._live
            spec, known = self._specs[chunk.id], self._token_ids[chunk.id]
            assert list(chunk.token_ids) == known[chunk.start : chunk.end]
            ends = chunk.end == len(known)
            assert (chunk.sampled, chunk.pools) == (ends and spec.generates, ends and spec.pooling is not None)
            output = known[len(spec.prompt_token_ids) :] if chunk.sampled and spec.sampling.adjusts else []
            assert list(chunk.output_token_ids) == output

    def _allowed(self, plan: PackedStep, masks: Masks) -> dict[int, list[int]]:
        """The tokens that may come next, for each sequence with a grammar."""
        guided = [sequence_id for sequence_id in plan.sampled_ids if self._specs[sequence_id].guided]
        if not guided:
            return {}
        bits = np.unpackbits(masks().view(np.uint8), axis=1, bitorder="little")
        return {sequence_id: np.flatnonzero(own).tolist() for sequence_id, own in zip(guided, bits, strict=True)}

    def _sample(self, spec: SequenceSpec, token_ids: list[int], allowed: list[int] | None) -> int:
        prompt, sampling = spec.prompt_token_ids, spec.sampling
        seed = None if sampling.greedy else sampling.seed
        token = self.next_token(token_ids, prompt, seed)
        length = len(token_ids) - len(prompt)
        if length < sampling.min_tokens and token in spec.stop_ids:
            return ord("+")
        if allowed is None:
            return token
        if length >= _LONG:
            # Inside a string every character is allowed: close the string.
            closing = b'"' if ord("z") in allowed else b"}]"
            allowed = [token for token in (EOS, *closing) if token in allowed][:1] or allowed
        return token if token in allowed else allowed[_number(token_ids, seed) % len(allowed)]

    def pooled(self, token_ids: Sequence[int]) -> np.ndarray:
        """The pooled hidden states of a prompt."""
        return np.random.default_rng(_number(token_ids, None)).standard_normal(HIDDEN, np.float32)

    def complete(self, prompt: str, max_tokens: int, seed: int | None = None) -> str:
        """The completion of a prompt, computed without an engine."""
        ids = list(prompt.encode())
        tokens = list(ids)
        for _ in range(max_tokens):
            tokens.append(self.next_token(tokens, ids, seed))
        return bytes(tokens[len(ids) :]).decode()


def scored(token_id: int, position: int, limit: int) -> Logprobs:
    """The log-probabilities of a token. They depend only on the token and its position, and are exact in JSON."""
    return Logprobs(token_id, _logprob(token_id, position), _likeliest(position)[:limit])


def _logprob(token_id: int, position: int) -> float:
    return -(1 + (token_id * 31 + position * 7) % 257) / 8


@cache
def _likeliest(position: int) -> tuple[tuple[int, float], ...]:
    ids = sorted(range(BYTES + 1), key=lambda token_id: _logprob(token_id, position), reverse=True)
    return tuple((token_id, _logprob(token_id, position)) for token_id in ids[:MAX_LOGPROBS])


def _prompt_logprobs(chunk: Chunk, spec: SequenceSpec) -> list[Logprobs]:
    if not spec.is_scored(chunk.end):
        return []
    limit, first = spec.sampling.prompt_logprobs or 0, max(chunk.start + 1, spec.first_scored)
    behind = spec.prompt_token_ids[first : chunk.end + 1]
    found = [scored(token, first + i, limit) for i, token in enumerate(behind)]
    if spec.scoring is not None and chunk.end == len(spec.prompt_token_ids):
        found += [scored(token, chunk.end, limit) for token in spec.scoring.next_token_ids]
    return found


def _number(token_ids: Sequence[int], seed: int | None) -> int:
    return zlib.crc32(array("q", token_ids).tobytes() + repr(seed).encode())


def make_engine(
    model: FakeModel, *, seqs=4, budget=64, blocks=64, block_size=4, max_model_len=1000, vocab_size=BYTES + 1
) -> Engine:
    """An engine that runs the fake model."""
    pool = BlockPool(blocks, block_size)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget)
    return Engine(
        scheduler, model, vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=[EOS], hidden_size=HIDDEN
    )


def launch_fake(engine: Engine, tokenizer: Tokenizer | None, **settings: Any) -> Launched:
    """What ``rosebatch.launch.launch.launch`` returns, around a fake engine; settings are of ``RunConfig``."""
    sizes = {"vocab_size": engine.vocab_size, "hidden_size": HIDDEN, "max_model_len": engine.max_model_len}
    config = small_config(**sizes, eos_token_ids=(EOS,))
    source = ModelSource("fake", config, None, "dummy", torch.float32)
    switches = Switches.resolve({}, "cpu")
    plan = LaunchPlan(RunConfig(**settings), torch.device("cpu"), switches, source, None, 0.0)
    grammars = None if tokenizer is None else make_grammars(tokenizer, config, plan.config)
    return Launched(plan, engine, tokenizer, grammars, {"model": "fake"}, 0.0)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
