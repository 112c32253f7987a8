"""Penalties, biases, least lengths, log-probabilities and several completions equal transformers' own in fp32.

Each is tested with the plainest schedule, and with a cache that is too small, so that prompts come in chunks and
sequences are preempted.
"""

import dataclasses
import functools
import json
import shutil
from collections import Counter

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.running import run, run_choices

MODELS = ["gpt2", "qwen3"]
PLENTY = {"prefix_cache": False, "chunked_prefill": False}
CRAMPED = {"chunk": 16, "block_size": 4, "blocks": 28}
SCHEDULES = pytest.mark.parametrize("limits", [PLENTY, CRAMPED], ids=["plenty", "cramped"])
# Two implementations of an fp32 model add the same products in another order. Logits are below 16, where a unit in the
# last place is 1e-6. Differences of 8 such units were seen after three layers.
FP32_ROUNDING = 2e-5
# Values of ``min_tokens``.
MINIMUM = (0, 1, 7, NEW_TOKENS)
# The sampling fields of each kind of row, under our names.
CHANGES = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.1},
    "both": {"presence_penalty": -1.5, "frequency_penalty": 1.5},
    "bias": {"logit_bias": ((5, 4.0), (7, -100.0), (60, 6.5), (198, 5.5))},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": ((5, 4.0), (60, 6.5), (198, 5.5)),
    },
}


@pytest.fixture(scope="module")
def options_of(transformers):
    """Kind of row -> the options of ``generate`` for prompts of a length, in the order in which servers apply them."""

    class Penalties(transformers.LogitsProcessor):
        """OpenAI's definition, for generated tokens: logit - count * frequency - (count > 0) * presence."""

        def __init__(self, frequency, presence, prompt_length):
            self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

        def __call__(self, input_ids, scores):
            scores = scores.clone()
            for row, ids in zip(scores, input_ids[:, self.prompt_length :].tolist(), strict=True):
                for token, count in Counter(ids).items():
                    row[token] -= count * self.frequency + (count > 0) * self.presence
            return scores

    def options(change, prompt_length):
        values, processors = CHANGES[change], transformers.LogitsProcessorList()
        if "logit_bias" in values:
            bias = [[[token], value] for token, value in values["logit_bias"]]
            processors.append(transformers.SequenceBiasLogitsProcessor(sequence_bias=bias))
        if "repetition_penalty" in values:
            processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty=values["repetition_penalty"]))
        penalties = values.get("frequency_penalty", 0.0), values.get("presence_penalty", 0.0)
        return {"logits_processor": [*processors, Penalties(*penalties, prompt_length)]}

    return options


@pytest.fixture(scope="module")
def changed(goldens, reference_tokens, options_of):
    """Model and kind of row -> index of a prompt -> transformers' tokens."""

    @functools.cache
    def tokens(model, change):
        expected = reference_tokens(model, goldens(model).prompts[:32], functools.partial(options_of, change))
        assert len(expected) >= 24, "too many prompts are decided by rounding"
        return expected

    return tokens


def requests_of(prompts, kinds):
    """Requests for as many tokens as the references have; the kinds take turns."""
    return [
        Request(
            i, tuple(prompt), SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True} | kinds[i % len(kinds)])
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.matrix
@SCHEDULES
@pytest.mark.parametrize("model", MODELS)
def test_changed_logits(model, limits, goldens, changed, make_engine):
    """A penalty must not count the wrong tokens, apply twice after a preemption, or reach a neighbour."""
    kinds, prompts = list(CHANGES), goldens(model).prompts[:32]
    engine = make_engine(goldens(model).folder, **limits)
    for shift in (0, 4):
        # Prompt lengths repeat every 8 rows: shift the kinds, so that each meets all lengths.
        change_of = [kinds[(i + i // 8 + shift) % len(kinds)] for i in range(len(prompts))]
        done = run(engine, requests_of(prompts, [CHANGES[change] for change in change_of]))
        actual = {i: list(c.token_ids) for i, c in done.items() if i in changed(model, change_of[i])}
        assert actual == {i: changed(model, change_of[i])[i] for i in actual}
    assert (engine.stats.preemptions > 0) is (limits is CRAMPED)


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "none"])
@pytest.mark.parametrize("model", MODELS)
def test_the_changes_are_felt(model, change, goldens, changed):
    """A penalty that never changes a token would prove nothing above."""
    expected = goldens(model).expected
    assert sum(tokens != expected[i] for i, tokens in changed(model, change).items()) >= 3


@pytest.fixture(scope="module")
def with_ends(goldens, tmp_path_factory):
    """Model -> its folder with six end tokens in the config that greedy decoding produces early, and these tokens."""

    @functools.cache
    def make(model):
        golden = goldens(model)
        folder = tmp_path_factory.mktemp("ends") / model
        shutil.copytree(golden.folder, folder)
        early = Counter(token for tokens in golden.expected for token in tokens[:4])
        ends = [token for token, _ in early.most_common(6)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return folder, ends

    return make


@pytest.fixture(scope="module")
def ended(goldens, with_ends, reference_tokens):
    """Model -> index of a prompt -> transformers' tokens. The minimum lengths of ``MINIMUM`` take turns."""

    @functools.cache
    def tokens(model):
        prompts, (_, ends), found = goldens(model).prompts, with_ends(model), {}
        for turn, minimum in enumerate(MINIMUM):
            options = {"eos_token_id": ends, "min_new_tokens": minimum}
            expected = reference_tokens(model, prompts[turn :: len(MINIMUM)], lambda length, options=options: options)
            found |= {turn + len(MINIMUM) * i: cut_behind(chosen, ends) for i, chosen in expected.items()}
        assert len(found) >= 48, "too many prompts are decided by rounding"
        assert sum(len(chosen) == MINIMUM[i % len(MINIMUM)] + 1 for i, chosen in found.items()) >= 9, (
            "they end too late"
        )
        return found

    return tokens


@pytest.mark.matrix
@SCHEDULES
@pytest.mark.parametrize("model", MODELS)
def test_min_tokens(model, limits, goldens, with_ends, ended, make_engine):
    """No end token, the model's or the row's, comes before the minimum; the first likely one after it ends the row."""
    folder, ends = with_ends(model)
    engine = make_engine(folder, **limits)
    whose = [{"ignore_eos": False}, {"stop_token_ids": tuple(ends)}]
    kinds = [{"min_tokens": MINIMUM[i % len(MINIMUM)]} | whose[i // 8 % 2] for i in range(16)]
    done = run(engine, requests_of(goldens(model).prompts, kinds))
    assert {i: list(done[i].token_ids) for i in ended(model)} == ended(model)
    for completion in done.values():
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ends else "length")
    assert (engine.stats.preemptions > 0) is (limits is CRAMPED)


def cut_behind(tokens, ends):
    """Tokens up to and including the first end token."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), None)]


@pytest.fixture(scope="module")
def check_logprobs(reference_model):
    """Compares a completion's report with one plain forward pass of transformers over all its tokens."""

    def check(model, done):
        sampling, prompt = done.request.sampling, list(done.request.prompt_token_ids)
        with torch.inference_mode():
            logits = reference_model(model)(torch.tensor([[*prompt, *done.token_ids]])).logits[0]
        behind_prompt, reference = len(prompt) - 1, logits.log_softmax(-1)
        if sampling.prompt_logprobs is not None:
            compare(done.prompt_logprobs, prompt[1:], sampling.prompt_logprobs, reference[:behind_prompt])
        if sampling.logprobs is not None:
            compare(done.logprobs, done.token_ids, sampling.logprobs, reference[behind_prompt:-1])

    def compare(scored, token_ids, limit, reference):
        assert [each.token_id for each in scored] == list(token_ids)
        assert_close([each.logprob for each in scored], reference[range(len(scored)), token_ids])
        if limit and scored:
            ids = torch.tensor([[token_id for token_id, _ in each.top] for each in scored])
            values = [[value for _, value in each.top] for each in scored]
            assert all(len(set(row)) == limit for row in ids.tolist())
            # The likeliest come in order; two that differ only by rounding may swap.
            assert_close(values, reference.topk(limit).values)
            assert_close(values, reference.gather(1, ids))
        else:
            assert all(each.top == () for each in scored)

    def assert_close(values, expected):
        torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=FP32_ROUNDING)

    return check


@SCHEDULES
@pytest.mark.parametrize("model", MODELS)
def test_logprobs(model, limits, goldens, make_engine, check_logprobs):
    """They come from the model's own logits, before penalties, temperature and filters, and only for rows that ask."""
    kinds = [
        {"logprobs": 5},
        {"logprobs": 0, **CHANGES["all"]},
        {},
        {"logprobs": 20, "temperature": 0.7, "top_k": 9, "seed": 3, "min_tokens": 4},
        {"logprobs": 1, "temperature": 1.4, "seed": 4, **CHANGES["repetition"]},
    ]
    engine = make_engine(goldens(model).folder, **limits)
    done = run(engine, requests_of(goldens(model).prompts[:32], kinds))
    for i, completion in done.items():
        check_logprobs(model, completion)
        assert bool(completion.logprobs) is ("logprobs" in kinds[i % len(kinds)])
        assert completion.prompt_logprobs == ()
    assert (engine.stats.preemptions > 0) is (limits is CRAMPED)


@pytest.mark.parametrize(
    "limits",
    [
        PLENTY,
        {},
        {"chunk": 3, "block_size": 2, "blocks": 500},
        {"chunk": 1, "blocks": 100},
        CRAMPED,
        CRAMPED | {"prefix_cache": False},
    ],
    ids=["whole", "shared", "chunks-of-3", "chunks-of-1", "cramped", "cramped-unshared"],
)
@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_prompt_logprobs(model, limits, goldens, make_engine, check_logprobs):
    """Chunk ends, cached prefixes and prompts computed twice must not lose or double a position."""
    kinds = [{"prompt_logprobs": 4}, {}, {"prompt_logprobs": 0, "logprobs": 2}, {"temperature": 0.9, "seed": 5}]
    prompts = goldens(model).prompts[: 6 if limits.get("chunk", 16) < 16 else 24]
    engine = make_engine(goldens(model).folder, **limits)
    for _ in range(2):
        done = run(engine, requests_of([*prompts, *prompts[:5]], kinds))
        for i, completion in done.items():
            check_logprobs(model, completion)
            assert not completion.cached_tokens or i % 2 == 1
            if i % 2 == 1:
                assert completion.prompt_logprobs == ()
    assert (engine.stats.preemptions > 0) is (limits.get("blocks") == CRAMPED["blocks"])
    assert any(completion.cached_tokens for completion in done.values()) is (limits.get("prefix_cache") is not False)


@pytest.mark.parametrize(
    "limits",
    [PLENTY, {}, {"chunk": 7, "block_size": 5, "blocks": 200, "seqs": 2}, CRAMPED, CRAMPED | {"prefix_cache": False}],
    ids=["whole", "shared", "two-at-a-time", "cramped", "cramped-unshared"],
)
@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_three_greedy_completions(model, limits, goldens, make_engine, check_logprobs):
    """A fork must not write into another's block or continue from a wrong token."""
    golden, count = goldens(model), 10 if "seqs" in limits else 24
    engine = make_engine(golden.folder, **limits)
    rows = requests_of(golden.prompts[:count], [{"n": 3, "logprobs": 1}, {"n": 3}, {"n": 3}])
    done = run_choices(engine, rows)
    assert {key: list(completion.token_ids) for key, completion in done.items()} == {
        (i, sample): golden.expected[i] for i in range(count) for sample in range(3)
    }
    for completion in done.values():
        check_logprobs(model, completion)
    assert (engine.stats.preemptions > 0) is (limits.get("blocks") == CRAMPED["blocks"])


@SCHEDULES
@pytest.mark.parametrize("model", MODELS)
def test_three_sampled_completions(model, limits, goldens, make_engine):
    """Each equals a request of its own with that seed, the first the request with n = 1; they differ."""
    folder, prompts = goldens(model).folder, goldens(model).prompts[:24]
    kinds = [{"top_p": 0.9}, CHANGES["all"], {"min_tokens": 5, "top_k": 30}]
    rows = requests_of(
        prompts, [{"n": 3, "temperature": 1.1, "seed": 70 + i} | kinds[i % len(kinds)] for i in range(24)]
    )
    engine = make_engine(folder, **limits)
    done = {key: completion.token_ids for key, completion in run_choices(engine, rows).items()}
    assert (engine.stats.preemptions > 0) is (limits is CRAMPED)
    for sample in range(3):
        own = [SequenceState.start(row, id=0, max_model_len=256, sample=sample).sampling for row in rows]
        assert {each.seed for each in own}.isdisjoint({row.sampling.seed for row in rows}) is (sample > 0)
        alone = [
            Request(row.id, row.prompt_token_ids, dataclasses.replace(each, n=1))
            for row, each in zip(rows, own, strict=True)
        ]
        expected = run(make_engine(folder, **PLENTY), alone)
        assert {i: done[i, sample] for i in expected} == {i: c.token_ids for i, c in expected.items()}
    # A prompt of one token may leave few likely tokens.
    assert sum(len({done[i, sample] for sample in range(3)}) == 3 for i in range(24)) >= 20


@pytest.mark.parametrize(
    "limits", [PLENTY, {}, {"chunk": 10, "block_size": 1, "blocks": 2000}], ids=["whole", "shared", "chunks"]
)
@pytest.mark.parametrize("model", MODELS)
def test_the_prompt_of_three_completions_is_computed_once(model, limits, goldens, make_engine):
    """Each further completion computes only the prompt's last token again, for its logits."""
    prompts = goldens(model).prompts[:10]
    engine = make_engine(goldens(model).folder, **limits)
    # Wrong drafts are computed, too.
    engine.drafter = None
    done = run_choices(engine, requests_of(prompts, [{"n": 3, "temperature": 1.0}]))
    generated = sum(len(completion.token_ids) for completion in done.values())
    # The last generated token is never fed back.
    computed = engine.stats.computed_tokens - (generated - len(done))
    cached = sum(completion.cached_tokens for (_, sample), completion in done.items() if sample == 0)
    assert computed == sum(map(len, prompts)) - cached + 2 * len(prompts)
    assert generated == 3 * NEW_TOKENS * len(prompts)


@pytest.mark.parametrize("limits", [PLENTY, {}, {"chunk": 7, "block_size": 5, "blocks": 900}, CRAMPED])
def test_prompt_logprobs_of_several_completions(limits, goldens, make_engine, check_logprobs):
    """The row reports the prompt's, however its completions got their blocks."""
    engine = make_engine(goldens("llama").folder, **limits)
    rows = requests_of(goldens("llama").prompts[:16], [{"n": 3, "prompt_logprobs": 2, "temperature": 1.0}])
    done = run_choices(engine, rows)
    assert len(done) == 48
    for (_, sample), completion in done.items():
        if sample == 0:
            check_logprobs("llama", completion)
