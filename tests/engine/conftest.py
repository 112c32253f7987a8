"""A fake model and short ways to make sequences, for everything that needs no tensors."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.request import Request, Sequence
from rosebatch.sampling_params import SamplingParams

FAKE_VOCAB = 50


def fake_next_token(token_ids: Iterable[int]) -> int:
    """The fake model: a token that depends on every token before it."""
    return hash(tuple(token_ids)) % FAKE_VOCAB


class FakeRunner:
    """Carries out plans with the fake model, looking at nothing but each sequence's tokens."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([[fake_next_token(c.sequence.token_ids)] for c in plan.chunks if c.samples])

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.run(plan)
        return lambda: result


@pytest.fixture
def fake_runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def fake_completion() -> Callable[..., list[int]]:
    """What the fake model generates for a prompt, without any engine."""

    def complete(prompt: Iterable[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
        tokens, out = list(prompt), []
        while len(out) < max_tokens:
            out.append(fake_next_token(tokens))
            tokens.append(out[-1])
            if out[-1] in stop:
                break
        return out

    return complete


@pytest.fixture
def make_sequence() -> Callable[..., Sequence]:
    def make(
        prompt: Iterable[int],
        max_tokens: int = 100,
        index: int = 0,
        max_model_len: int = 10**6,
        eos: frozenset[int] = frozenset(),
        choice: int = 0,
        **sampling: object,
    ) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = Request(index=index, prompt_token_ids=tuple(prompt), sampling=params, choice=choice)
        return Sequence.start(request, max_model_len=max_model_len, eos_token_ids=eos)

    return make


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """NaN in whatever is allocated without being filled."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split for each decoded sequence: what keys are divided into has its own tests, and programs take time."""
    from rosebatch_kernels.common import splits
    from rosebatch_kernels.hp1 import decode

    monkeypatch.setattr(splits, "TUNED", replace(splits.TUNED, splits=((0, 1),)))
    monkeypatch.setattr(decode, "TUNED", replace(decode.TUNED, programs=1))
    # A long group is computed to its end for a sequence of two keys.
    monkeypatch.setattr(decode, "_runs_and_keys", lambda *_: (16, 2))
