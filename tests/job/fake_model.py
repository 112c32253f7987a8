"""A fake model and a tokenizer of bytes: the whole job without a tensor, every answer known beforehand."""

import zlib
from array import array
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rosebatch.engine.block_pool import BlockPool
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import Chunk, StepPlan, StepResult
from rosebatch.engine.scheduler import Scheduler

BYTES, EOS = 256, 256


class FakeModel:
    """Continues every prompt by a function of its tokens, and of the seed where it samples.

    Args:
        answers: prompt text -> the bytes that follow it, then the end token; other prompts get pseudo-random letters.
        before_step: called with the plan of every step.
    """

    def __init__(self, answers: dict[str, bytes] | None = None, before_step: Callable[[StepPlan], None] | None = None):
        self._answers = {prompt.encode(): answer for prompt, answer in (answers or {}).items()}
        self._before_step = before_step

    def next_token(self, token_ids: Sequence[int], prompt: Sequence[int], seed: int | None) -> int:
        answer = self._answers.get(bytes(min(i, 255) for i in prompt))
        if answer is not None:
            position = len(token_ids) - len(prompt)
            return answer[position] if position < len(answer) else EOS
        return ord("a") + zlib.crc32(array("q", token_ids).tobytes() + repr(seed).encode()) % 26

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self._before_step is not None:
            self._before_step(plan)
        result = StepResult([[self._sample(chunk)] for chunk in plan.chunks if chunk.samples], seconds=1e-3, syncs=1)
        return lambda: result

    def _sample(self, chunk: Chunk) -> int:
        request = chunk.sequence.request
        seed = None if request.sampling.greedy else request.sampling.seed
        return self.next_token(chunk.sequence.token_ids, request.prompt_token_ids, seed)

    def complete(self, prompt: str, max_tokens: int, seed: int | None = None) -> str:
        """What comes out for a prompt, without any engine."""
        ids = list(prompt.encode())
        tokens = list(ids)
        for _ in range(max_tokens):
            tokens.append(self.next_token(tokens, ids, seed))
        return bytes(tokens[len(ids) :]).decode()


def make_engine(
    model: FakeModel, *, seqs=4, budget=64, blocks=64, block_size=4, max_model_len=1000, vocab_size=BYTES + 1
) -> Engine:
    """An engine of the fake model."""
    pool = BlockPool(blocks, block_size)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget)
    return Engine(scheduler, model, vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=[EOS])


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def byte_backend(*extra: bytes) -> tokenizers.Tokenizer:
    """Token i is byte i; then come the end token and tokens of several bytes, which text is never encoded to."""
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
