"""A fake model and a tokenizer of bytes: the whole job runs without a tensor, and every answer is known."""

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import Chunk, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.request import Logprobs
from rosebatch.request import Sequence as Sampled
from rosebatch.sampling_params import MOST_LOGPROBS

BYTES, EOS = 256, 256
# After this many tokens an answer with a grammar ends as soon as the grammar allows.
_LONG = 30


class FakeModel:
    """Continues every prompt by a function of its tokens, and of the seed if it samples.

    If a grammar forbids the chosen token, the same function picks an allowed one. If the token would end the completion
    before ``min_tokens``, a plus sign replaces it. Penalties and biases have no effect.

    Args:
        answers: prompt text -> the bytes that follow it, then the end token. Other prompts get pseudo-random letters.
        before_step: called with the plan of every step.
        vocab_size: bits of a grammar's mask.
    """

    def __init__(
        self,
        answers: dict[str, bytes] | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        vocab_size: int = BYTES + 1,
    ):
        self._answers = {prompt.encode(): answer for prompt, answer in (answers or {}).items()}
        self._before_step = before_step
        self._vocab_size = vocab_size

    def next_token(self, token_ids: Sequence[int], prompt: Sequence[int], seed: int | None) -> int:
        answer = self._answers.get(bytes(min(i, 255) for i in prompt))
        if answer is not None:
            position = len(token_ids) - len(prompt)
            return answer[position] if position < len(answer) else EOS
        return ord("a") + _number(token_ids, seed) % 26

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self._before_step is not None:
            self._before_step(plan)
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        allowed = self._allowed(sampled)
        token_ids = [self._sample(sequence, allowed.get(row)) for row, sequence in enumerate(sampled)]
        result = StepResult(
            [[token_id] for token_id in token_ids],
            [
                [] if (most := s.sampling.logprobs) is None else [scored(token_id, len(s.token_ids), most)]
                for s, token_id in zip(sampled, token_ids, strict=True)
            ],
            {number: found for number, chunk in enumerate(plan.chunks) if (found := _prompt_logprobs(chunk))},
            seconds=1e-3,
            syncs=1,
        )
        return lambda: result

    def _allowed(self, sequences: Sequence[Sampled]) -> dict[int, list[int]]:
        """The tokens that may come next, for each sequence with a grammar."""
        guided = {row: s.constraint for row, s in enumerate(sequences) if s.constraint is not None}
        if not guided:
            return {}
        constraints = list(guided.values())
        masks = np.full((len(constraints), -(-self._vocab_size // 32)), -1, np.int32)
        type(constraints[0]).fill_all(constraints, masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return {row: np.flatnonzero(own).tolist() for row, own in zip(guided, bits, strict=True)}

    def _sample(self, sequence: Sampled, allowed: list[int] | None) -> int:
        sampling, prompt = sequence.sampling, sequence.request.prompt_token_ids
        seed = None if sampling.greedy else sampling.seed
        token = self.next_token(sequence.token_ids, prompt, seed)
        length = len(sequence.token_ids) - len(prompt)
        if length < sampling.min_tokens and token in sequence.stop_ids:
            return ord("+")
        if allowed is None:
            return token
        if length >= _LONG:
            # Inside a string every character is allowed: close the string.
            closing = b'"' if ord("z") in allowed else b"}]"
            allowed = [token for token in (EOS, *closing) if token in allowed][:1] or allowed
        return token if token in allowed else allowed[_number(sequence.token_ids, seed) % len(allowed)]

    def complete(self, prompt: str, max_tokens: int, seed: int | None = None) -> str:
        """The completion of a prompt, computed without an engine."""
        ids = list(prompt.encode())
        tokens = list(ids)
        for _ in range(max_tokens):
            tokens.append(self.next_token(tokens, ids, seed))
        return bytes(tokens[len(ids) :]).decode()


def scored(token_id: int, position: int, most: int) -> Logprobs:
    """The log-probabilities of a token. They depend only on the token and its position, and are exact in JSON."""
    return Logprobs(token_id, _logprob(token_id, position), _likeliest(position)[:most])


def _logprob(token_id: int, position: int) -> float:
    return -(1 + (token_id * 31 + position * 7) % 257) / 8


@cache
def _likeliest(position: int) -> tuple[tuple[int, float], ...]:
    ids = sorted(range(BYTES + 1), key=lambda token_id: _logprob(token_id, position), reverse=True)
    return tuple((token_id, _logprob(token_id, position)) for token_id in ids[:MOST_LOGPROBS])


def _prompt_logprobs(chunk: Chunk) -> list[Logprobs]:
    most, end = chunk.sequence.sampling.prompt_logprobs, chunk.start + chunk.length
    behind = chunk.sequence.request.prompt_token_ids[chunk.start + 1 : end + 1]
    return [] if most is None else [scored(token, chunk.start + 1 + i, most) for i, token in enumerate(behind)]


def _number(token_ids: Sequence[int], seed: int | None) -> int:
    return zlib.crc32(array("q", token_ids).tobytes() + repr(seed).encode())


def make_engine(
    model: FakeModel, *, seqs=4, budget=64, blocks=64, block_size=4, max_model_len=1000, vocab_size=BYTES + 1
) -> Engine:
    """An engine that runs the fake model."""
    pool = BlockPool(blocks, block_size)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget)
    return Engine(scheduler, model, vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=[EOS])


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def byte_backend(*extra: bytes) -> tokenizers.Tokenizer:
    """Token i is byte i. Then come the end token and tokens of several bytes, which encoding never produces."""
    characters = byte_characters()
    vocab = {characters[byte]: byte for byte in range(BYTES)} | {"<eos>": EOS}
    for i, token in enumerate(extra):
        vocab["".join(characters[byte] for byte in token)] = EOS + 1 + i
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
