"""On a GPU in 16 bits: where greedy tokens part from transformers' own, it was a close call for both.

Rounding differs between any two implementations, so tokens may part, and after that the sequences have nothing in
common. Up to the first difference they are the same computation. There each side's token must be among the likeliest
few of both, and below the likeliest by no more than rounding explains. The judges are the logits of transformers' own
run, and those that the engine computes for the common prefix from the K and V in its cache. And no more sequences may
part than rounding to 16 bits explains, for which transformers in fp32 is the measure.

The rule itself is tested on made-up logits, without a GPU.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from rosebatch.config import EngineConfig, ModelConfig
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine
from rosebatch.model.source import ModelSource
from rosebatch.request import Request, SamplingParams
from rosebatch.toggles import Toggles

FAMILIES = ["GPT2", "Llama", "Qwen3"]
DTYPES = [torch.float16, torch.bfloat16]
NEW_TOKENS = 32
# Tokens that count as the likeliest few.
FEW = 5
# Most that a logit may lie below the largest, in units of the dtype's eps times the largest magnitude: the size of one
# rounding of a logit. Three layers of rounding and the last one on either side made up to 5 where this was measured.
ROUNDINGS = 16


@dataclass(frozen=True)
class Divergence:
    """Where a sequence's tokens first differ: ``position`` counts generated tokens from 0."""

    sequence: int
    position: int
    ours: int
    theirs: int


def first_divergences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Divergence]:
    """At most one for each sequence, of those with different tokens."""
    found = []
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(other), f"sequence {index} has {len(mine)} tokens instead of {len(other)}"
        parted = [i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b]
        if parted:
            found.append(Divergence(index, parted[0], mine[parted[0]], other[parted[0]]))
    return found


def objection(divergence: Divergence, our_logits: Tensor, their_logits: Tensor, dtype: torch.dtype) -> str:
    """Why a divergence is no close call; empty if it is one. Logits ``[V]`` fp32, of the common prefix."""
    for side, logits in (("rosebatch", our_logits), ("transformers", their_logits)):
        if not logits.isfinite().all():
            return f"{side} has logits that are not finite"
        allowed = ROUNDINGS * torch.finfo(dtype).eps * logits.abs().max().item()
        for owner, token in (("rosebatch", divergence.ours), ("transformers", divergence.theirs)):
            # Equal logits share a place: rounding makes many of them.
            place = 1 + int((logits > logits[token]).sum())
            if place > FEW:
                return f"the token of {owner} is number {place} for {side}"
            gap = (logits.max() - logits[token]).item()
            if gap > allowed:
                return f"the token of {owner} is {gap:.3f} below the likeliest for {side}, allowed are {allowed:.3f}"
    return ""


def assert_close_calls(
    divergences: Sequence[Divergence],
    our_logits: Callable[[Divergence], Tensor],
    their_logits: Callable[[Divergence], Tensor],
    dtype: torch.dtype,
    *,
    most: int,
    total: int,
) -> None:
    """Every divergence is a close call, and of ``total`` sequences at most ``most`` diverge."""
    why = {d: objection(d, our_logits(d), their_logits(d), dtype) for d in divergences}
    rejected = [f"{divergence}: {reason}" for divergence, reason in why.items() if reason]
    summary = f"{len(divergences)} of {total} sequences diverged, {most} may; {len(rejected)} were no close call"
    assert not rejected and len(divergences) <= most, "\n".join([summary, *rejected[:10]])


def most_divergences(exact: Sequence[Sequence[int]], rounded: Sequence[Sequence[int]]) -> int:
    """How many sequences may diverge, of the same implementation's tokens in fp32 and in 16 bits.

    Two roundings that have nothing in common differ from each other by 1.4 times as much as either does from the exact
    result. Twice as many, and two more for the luck of small numbers.
    """
    return 2 * len(first_divergences(exact, rounded)) + 2


def logits_after(engine: Engine, prefix: Sequence[int]) -> Tensor:
    """``[V]`` fp32 on the CPU: the engine's logits for the token after a prefix, with what it has cached of it."""
    seen: list[Tensor] = []
    model = engine.runner.model
    compute = model.logits

    def record(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    model.logits = record
    try:
        list(engine.run([Request(index=0, prompt_token_ids=tuple(prefix), sampling=SamplingParams(max_tokens=1))]))
    finally:
        del model.logits
    assert [len(rows) for rows in seen] == [1]
    return seen[0][0].float().cpu()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """256 of few lengths, which transformers runs in as many batches: around blocks and tiles of 64, and short ones."""
    numbers = random.Random(0)
    lengths = (1, 3, 17, 32, 47, 64, 65, 90)
    shared = [numbers.randrange(199) for _ in range(64)]
    made = []
    for index in range(256):
        length = lengths[index % len(lengths)]
        common = numbers.choice([0, length // 2, length - 1]) if length < 66 else 64
        made.append(shared[:common] + [numbers.randrange(199) for _ in range(length - common)])
    return made


@pytest.fixture(scope="module")
def theirs(reference: Callable, prompts: list[list[int]]) -> Callable[[str, torch.dtype], tuple[list, Tensor]]:
    """(family, dtype) -> transformers' tokens and logits for all prompts, made once."""
    made: dict[tuple[str, torch.dtype], tuple[list, Tensor]] = {}

    def get(family: str, dtype: torch.dtype) -> tuple[list, Tensor]:
        if (family, dtype) not in made:
            made[family, dtype] = reference(family, dtype, prompts, NEW_TOKENS)
        return made[family, dtype]

    return get


@pytest.fixture
def assert_agrees(prompts: list, theirs: Callable, make_engine: Callable, greedy: Callable) -> Callable[..., Engine]:
    """Run the first ``count`` prompts and hold them against transformers; the engine, for its counters."""

    def check(
        family: str, dtype: torch.dtype, count: int, seqs: int, switches: dict[str, bool] | None = None
    ) -> Engine:
        engine = make_engine(family, dtype, switches, seqs=seqs)
        ours = greedy(engine, prompts[:count], NEW_TOKENS)
        tokens, logits = theirs(family, dtype)

        def our_logits(divergence: Divergence) -> Tensor:
            generated = ours[divergence.sequence][: divergence.position]
            return logits_after(engine, [*prompts[divergence.sequence], *generated])

        assert_close_calls(
            first_divergences(ours, tokens[:count]),
            our_logits,
            lambda divergence: logits[divergence.sequence, divergence.position],
            dtype,
            most=most_divergences(theirs(family, torch.float32)[0][:count], tokens[:count]),
            total=count,
        )
        return engine

    return check


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 7, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_divergences_from_transformers_are_close_calls(
    family: str, dtype: torch.dtype, batch: int, assert_agrees: Callable
) -> None:
    """Guards what fp32 tests cannot see: 16-bit layouts, matrix products in tiles, overflow, lost precision."""
    engine = assert_agrees(family, dtype, count=max(batch, 16), seqs=batch)
    assert engine.stats.max_running == batch


@pytest.mark.gpu
@pytest.mark.parametrize("name", [f.name for f in fields(Toggles) if "cuda" in f.metadata["devices"]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_switch_off(family: str, dtype: torch.dtype, name: str, assert_agrees: Callable) -> None:
    """Every path beside the default one, in 16 bits too."""
    assert_agrees(family, dtype, count=64, seqs=64, switches={name: False})


# --- the rule, on logits that are made up ---

TOKEN = Divergence(sequence=0, position=0, ours=7, theirs=3)


def ranked(*order: int, step: float = 1e-3) -> Tensor:
    """Logits of 50 tokens, these on top in this order, ``step`` apart, the largest 8."""
    logits = torch.linspace(-8, 0, 50)
    logits[list(order)] = 8 - step * torch.arange(len(order))
    return logits


def test_only_the_first_difference_of_a_sequence_counts() -> None:
    ours = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    theirs = [[1, 2, 3], [4, 0, 0], [0, 0, 9]]
    assert first_divergences(ours, ours) == []
    assert first_divergences(ours, theirs) == [Divergence(1, 1, 5, 0), Divergence(2, 0, 7, 0)]


def test_a_missing_token_is_no_divergence_but_an_error() -> None:
    with pytest.raises(AssertionError, match="sequence 1 has 2 tokens instead of 3"):
        first_divergences([[1, 2, 3], [1, 2]], [[1, 2, 3], [1, 2, 3]])
    with pytest.raises(ValueError, match="zip"):
        first_divergences([[1]], [[1], [2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_close_tokens_in_either_order_are_a_close_call(dtype: torch.dtype) -> None:
    assert objection(TOKEN, ranked(7, 3), ranked(3, 7), dtype) == ""
    assert objection(TOKEN, ranked(9, 1, 2, 7, 3), ranked(3, 7), dtype) == ""


def test_equal_logits_share_a_place() -> None:
    everything_equal = torch.ones(50)
    assert objection(TOKEN, everything_equal, everything_equal, torch.bfloat16) == ""


@pytest.mark.parametrize("far", [ranked(7, 1, 2, 4, 5, 3), ranked(3, 1, 2, 4, 5, 7)])
def test_a_token_outside_of_the_first_few_of_either_side_is_rejected(far: Tensor) -> None:
    close = ranked(7, 3)
    assert "number 6 for rosebatch" in objection(TOKEN, far, close, torch.bfloat16)
    assert "number 6 for transformers" in objection(TOKEN, close, far, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_choice_by_a_wide_margin_is_rejected(dtype: torch.dtype) -> None:
    allowed = ROUNDINGS * torch.finfo(dtype).eps * 8
    near, wide = ranked(7, 3, step=0.9 * allowed), ranked(7, 3, step=1.1 * allowed)
    assert objection(TOKEN, near, near, dtype) == ""
    assert "below the likeliest for rosebatch" in objection(TOKEN, wide, near, dtype)
    assert "below the likeliest for transformers" in objection(TOKEN, near, wide, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_rejected(value: float) -> None:
    """No number is larger than NaN, so that every token would be the likeliest."""
    broken = ranked(7, 3)
    broken[40] = value
    assert "rosebatch has logits" in objection(TOKEN, broken, ranked(7, 3), torch.float16)
    assert "transformers has logits" in objection(TOKEN, ranked(7, 3), broken, torch.float16)


class MadeUp:
    """A model whose logits are random numbers that follow from the prefix, with some rounding of its own."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed = dtype, seed

    def logits(self, prefix: Sequence[int]) -> Tensor:
        exact = 2 * torch.randn(211, generator=torch.Generator().manual_seed(hash(tuple(prefix))))
        noise = torch.randn(211, generator=torch.Generator().manual_seed(hash((*prefix, self.seed))))
        return (exact + torch.finfo(self.dtype).eps * exact.abs().max() * noise).to(self.dtype).float()

    def generate(self, sequence: int) -> list[int]:
        tokens = [sequence]
        for _ in range(NEW_TOKENS):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[1:]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def made_up(request: pytest.FixtureRequest) -> tuple[Callable[[list[list[int]]], None], list[list[int]]]:
    """A check of tokens against those of a made-up model, and the tokens of another that rounds differently."""
    dtype = request.param
    engine, judge, exact = MadeUp(dtype, 1), MadeUp(dtype, 2), MadeUp(torch.float32, 0)
    theirs = [judge.generate(i) for i in range(64)]
    most = most_divergences([exact.generate(i) for i in range(64)], theirs)

    def check(ours: list[list[int]]) -> None:
        found = first_divergences(ours, theirs)

        def prefix(divergence: Divergence) -> list[int]:
            return [divergence.sequence, *theirs[divergence.sequence][: divergence.position]]

        assert_close_calls(
            found, lambda d: engine.logits(prefix(d)), lambda d: judge.logits(prefix(d)), dtype, most=most, total=64
        )

    return check, [engine.generate(i) for i in range(64)]


def test_other_rounding_passes(made_up: tuple) -> None:
    check, tokens = made_up
    check(tokens)


@pytest.mark.parametrize("sequence", range(0, 64, 9))
def test_one_shifted_token_is_rejected(made_up: tuple, sequence: int) -> None:
    """The negative control: an engine that once gives the id beside the right one."""
    check, tokens = made_up
    shifted = [list(row) for row in tokens]
    shifted[sequence][0] = (shifted[sequence][0] + 1) % 211
    with pytest.raises(AssertionError, match=r"of 64 sequences diverged, \d+ may; 1 were no close call"):
        check(shifted)


def test_too_many_close_calls_are_rejected() -> None:
    """An error that is small everywhere tips many close calls, none of which gives it away alone."""
    divergences = [Divergence(index, 0, 7, 3) for index in range(9)]
    close = {"our_logits": lambda _: ranked(7, 3), "their_logits": lambda _: ranked(3, 7), "dtype": torch.float16}
    assert_close_calls(divergences, most=9, total=64, **close)
    with pytest.raises(AssertionError, match="9 of 64 sequences diverged, 8 may; 0 were no close call"):
        assert_close_calls(divergences, most=8, total=64, **close)


def test_logits_of_an_engine_after_a_prefix() -> None:
    """The likeliest token is the one that the engine generates, and the engine is as it was before."""
    config = ModelConfig(
        family="gpt2",
        vocab_size=50,
        hidden_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=16,
        max_model_len=32,
        norm_eps=1e-5,
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    device = torch.device("cpu")
    source = ModelSource("tiny", config, None, "dummy", torch.float32)
    engine = load_engine(source, EngineConfig(kv_cache_memory=1 << 20), Toggles.resolve({}, "cpu"), device).engine
    sampling = SamplingParams(max_tokens=8)
    (done,) = engine.run([Request(index=0, prompt_token_ids=(4, 9), sampling=sampling)])
    for length in (1, 7):
        logits = logits_after(engine, [4, 9, *done.token_ids[:length]])
        assert logits.shape == (50,)
        assert int(logits.argmax()) == done.token_ids[length]
    assert "logits" not in vars(engine.runner.model)
