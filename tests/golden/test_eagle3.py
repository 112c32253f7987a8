"""Drafts of a head are those of the published definition, in every way that tokens are computed; no answer changes."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.golden.test_speculation import DTYPES, results
from tests.helpers.eagle3_heads import CHAIN, LAYERS, VOCAB, PlainHead, save_chain, save_head, save_target, successor
from tests.helpers.shared_folder import make_once

FORMS = {
    "published": {},
    "layers.0": {"layer": "layers.0", "own_embedding": True, "norm_before_residual": True},
    "prefixed": {"layer": "model.midlayer", "draft_vocab_size": None},
}
CRAMPED = {"chunk": 24, "block_size": 4, "blocks": 30}


@pytest.fixture(scope="module")
def target(shared_folder):
    """The folder of a random model."""
    return make_once(shared_folder / "eagle3-target", lambda folder: save_target(folder) and None)


@pytest.fixture(scope="module")
def chain(shared_folder):
    """The folders of a model whose next token follows from its last one, and of a head that knows the half of them."""

    def save(folder):
        save_chain(folder / "target", folder / "head", CHAIN // 2)

    return make_once(shared_folder / "eagle3-chain", save)


def prompts(vocab, shared=40):
    """Most have a beginning in common, which ends anywhere in a block; one is a single token."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(vocab, (shared,), generator=generator).tolist()
    own = torch.randint(vocab, (40,), generator=generator).tolist()
    return [common[:n] + own[:m] for n, m in ((1, 0), (32, 3), (33, 1), (40, 20), (40, 0), (40, 0), (0, 30), (18, 9))]


def asked_of(engine):
    """Takes what is asked of the head: the tokens so far of each sequence, and its drafts."""
    ask, found = engine.drafter.head.ask, []

    def record(requests):
        drafts = ask(requests)
        started = engine.scheduler.queues.started
        found.extend(([*started[each.id].token_ids], own) for each, own in zip(requests, drafts, strict=True))
        assert all(started[each.id].num_tokens == each.position + 1 for each in requests)
        return drafts

    engine.drafter.head.ask = record
    return found


def without_copies(engine):
    """The head alone drafts."""
    engine.drafter._copy = lambda *_, **__: (0, [])


def always(engine):
    """Drafts in each step of each row, however often they are wrong."""
    without_copies(engine)
    engine.drafter.free_tokens = 10**6
    engine.drafter.head.most = lambda: 4


@pytest.mark.parametrize("limits", [{}, CRAMPED], ids=["plenty", "cramped"])
@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_definition(form, limits, target, tmp_path, make_engine):
    """Also behind cached prefixes, copies of blocks, several chunks, other completions, and after a preemption.

    Nearly all drafts of a random head are wrong: what they left in the cache counted as true tokens.
    """
    save_head(tmp_path / "head", **FORMS[form])
    plain = PlainHead(tmp_path / "head", AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    if form == "prefixed":
        plain.tensors = {name.removeprefix("model."): each for name, each in plain.tensors.items()}
    engine = make_engine(target, speculative_model=str(tmp_path / "head"), **limits)
    always(engine)
    found, params = asked_of(engine), SamplingParams(max_tokens=12, temperature=0.7, n=2, seed=5)
    # One after the other, so that later ones find the first in the cache; then all at once.
    cached = 0
    for batch in ([prompts(VOCAB)[3]], [prompts(VOCAB)[3]], prompts(VOCAB)):
        for number, prompt in enumerate(batch):
            engine.add(Request(number, tuple(prompt), params))
        while engine.has_unfinished:
            cached += sum(each.cached_tokens for each in engine.step())
            engine.scheduler.check_integrity()
    assert (engine.stats.preemptions > 0) is bool(limits) and cached > 100
    assert len(found) > 100 and len({tuple(tokens) for tokens, _ in found}) > 60
    expected = [plain.drafts(tokens, len(drafts)) for tokens, drafts in found]
    assert [drafts for _, drafts in found] == expected
    assert len({draft for drafts in expected for draft in drafts}) > 20


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 6]}, (1, 5, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}}, (1, 5, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, LAYERS // 2, LAYERS - 3)),
    ],
)
def test_layers_that_a_head_names(values, layers, target, tmp_path, make_engine):
    """SGLang names layers by their outputs, vLLM by their inputs."""
    save_head(tmp_path / "head", **values)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    engine = make_engine(target, speculative_model=str(tmp_path / "head"))
    always(engine)
    found = asked_of(engine)
    results(engine, [Request(1, tuple(prompts(VOCAB)[3]), SamplingParams(max_tokens=6))])
    plain = PlainHead(tmp_path / "head", model, layers)
    assert found and [plain.drafts(tokens, len(drafts)) for tokens, drafts in found] == [each for _, each in found]


KINDS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"logprobs": 3, "temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"n": 3, "temperature": 1.0, "seed": 3},
    {"presence_penalty": 0.2, "logprobs": 0},
    {"stop_token_ids": tuple(range(0, CHAIN, 9)), "temperature": 1.0, "seed": 4},
]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [{}, CRAMPED], ids=["plenty", "cramped"])
def test_answers_are_those_without_a_head(dtype, limits, chain, make_engine):
    """Right drafts, wrong ones, behind an end, beside prompts in chunks, preempted, and with grammars in between."""
    every = [
        Request(number, tuple(prompt), SamplingParams(max_tokens=40, **kind))
        for number, (prompt, kind) in enumerate(itertools.product(prompts(CHAIN)[1:5], KINDS))
    ]
    plain = make_engine(chain / "target", dtype, seqs=1)
    plain.drafter = None
    expected = results(plain, every)
    engine = make_engine(chain / "target", dtype, speculative_model=str(chain / "head"), **limits)
    engine.drafter.free_tokens = 10**6
    asked = asked_of(engine)
    assert results(engine, every) == expected
    assert (engine.stats.preemptions > 0) is bool(limits)
    assert len(asked) > 100 and 0 < engine.stats.accepted < engine.stats.drafted


def walk(token):
    """The tokens that follow this one in the chain."""
    after = successor().tolist()
    while True:
        token = after[token]
        yield token


def test_a_head_that_knows_the_model_saves_steps(tmp_path, make_engine):
    """A draft behind the first was made of the wrong state: all others of a step were wrong."""
    save_chain(tmp_path / "target", tmp_path / "head")
    engine = make_engine(tmp_path / "target", speculative_model=str(tmp_path / "head"))
    without_copies(engine)
    found, results = asked_of(engine), []
    engine.add(Request(0, (7, 3), SamplingParams(max_tokens=50)))
    while engine.has_unfinished:
        results += engine.step()
    assert list(results[0].token_ids) == list(itertools.islice(walk(3), 50))
    stats = engine.stats
    assert stats.accepted == stats.drafted > 40
    # The prompt's step, and one for each time that the head was asked; the last may have no room for drafts.
    assert stats.steps <= len(found) + 2 <= 12


def test_a_head_that_is_never_right_is_asked_no_more(target, tmp_path, make_engine):
    """Each step had drafts that were computed for nothing, and each new row tried anew."""
    save_head(tmp_path / "head")
    engine = make_engine(target, speculative_model=str(tmp_path / "head"))
    without_copies(engine)
    found, kinds = asked_of(engine), []
    for prompt in prompts(VOCAB)[3:7]:
        results(engine, [Request(1, tuple(prompt), SamplingParams(max_tokens=60))])
        kinds.append(len(found))
    assert engine.stats.accepted == 0
    # Then two tries in 60 steps.
    assert kinds[0] < 20 and kinds[-1] - kinds[0] <= 6


def test_copies_that_are_longer_take_the_place_of_the_head(tmp_path, make_engine):
    """A row that copies got seven drafts a step of the head, in place of fifteen."""
    save_chain(tmp_path / "target", tmp_path / "head")
    engine = make_engine(tmp_path / "target", speculative_model=str(tmp_path / "head"))
    found = asked_of(engine)
    cycle = list(itertools.islice(walk(3), CHAIN))
    results(engine, [Request(1, (*cycle, *cycle[:4]), SamplingParams(max_tokens=80))])
    assert 0 < len(found) < 5 and engine.stats.accepted == engine.stats.drafted
    assert 80 - engine.stats.accepted < 11
