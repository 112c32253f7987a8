"""Short ways to make sequences and to run them without tensors."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import FakeRunner, next_token
from tests.helpers.sizes import change_table


@pytest.fixture
def fake_runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def fake_completion() -> Callable[..., list[int]]:
    """What the fake model generates for a prompt, without any engine."""

    def complete(
        prompt: Iterable[int], max_tokens: int, stop: frozenset[int] = frozenset(), seed: int | None = None
    ) -> list[int]:
        tokens, out = list(prompt), []
        while len(out) < max_tokens:
            out.append(next_token(tokens, seed))
            tokens.append(out[-1])
            if out[-1] in stop:
                break
        return out

    return complete


@pytest.fixture
def make_sequence() -> Callable[..., SequenceState]:
    """Sequences whose requests have the same id."""

    def make(
        prompt: Iterable[int],
        max_tokens: int = 100,
        id: int = 0,
        *,
        max_model_len: int = 10**6,
        eos: frozenset[int] = frozenset(),
        sample: int = 0,
        **sampling: object,
    ) -> SequenceState:
        request = Request(id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))
        return SequenceState.start(request, id=id, sample=sample, max_model_len=max_model_len, eos_token_ids=eos)

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
    from rosebatch_kernels.hp1 import decode
    from rosebatch_kernels.hp1 import sizes as hp1_sizes
    from rosebatch_kernels.paged_attention import sizes

    change_table(monkeypatch, sizes, "decode", splits=((0, 1),))
    change_table(monkeypatch, hp1_sizes, programs=1)
    # A long group is computed to its end for a sequence of two keys.
    monkeypatch.setattr(decode, "runs_and_keys", lambda *_, **sizes: (16, 2))
