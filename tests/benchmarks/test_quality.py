"""``python -m benchmarks.quality``: its figures beside transformers' logits and plain formulas."""

import json
import math
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import quality
from benchmarks.quality_figures import Scores, agreement, divergence, wilson
from rosebatch import UserError
from tests.helpers.byte_tokenizer import byte_backend, save_backend
from tests.helpers.small_llama import save_llama, save_tokenizer

TEXTS = ["A river carries sand, clay and gravel to the sea. " * 2, "Bees hum.", "x"]
WINDOW = 40
_NUMBER = r"\d+(?:\.\d+)?"
SETTINGS = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "32MiB"}
# Token ids are bytes.
WINDOWS = [text.encode()[start : start + WINDOW] for text in TEXTS for start in range(0, len(text), WINDOW)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with a tokenizer of bytes; the worked examples fit them."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for folder, spread in zip(folders, (0.1, 0.12), strict=True):
        save_llama(folder, max_position_embeddings=2048, initializer_range=spread)
        save_tokenizer(folder)
    return [str(folder) for folder in folders]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "questions.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "2 + 3 = 5. #### 5"}\n')
    flags = ["--texts", str(tmp_path / "texts.jsonl"), "--questions", str(tmp_path / "questions.jsonl")]
    flags += ["--window", str(WINDOW), "--tokens", "9", "--answer-tokens", "3"]
    flags += ["--settings", json.dumps(SETTINGS), "--against-settings", json.dumps(SETTINGS)]

    def call(*more):
        monkeypatch.setattr(sys, "argv", ["quality", *flags, *more])
        quality.main()
        return capsys.readouterr().out

    return call


def log_softmax(folder):
    """transformers' log-probabilities of each window's tokens from the second on, and these tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = [window for window in WINDOWS if len(window) > 1]
    with torch.inference_mode():
        logits = [model(torch.tensor([list(window)])).logits[0, :-1] for window in windows]
    tokens = torch.tensor([token for window in windows for token in window[1:]])
    return torch.cat(logits).double().log_softmax(-1), tokens


def plain_divergence(ours, theirs, tokens):
    """With a dictionary a position: the tokens that both list, and one bucket for the rest."""
    found = []
    for p, q, token in zip(ours.numpy(), theirs.numpy(), tokens.tolist(), strict=True):
        both = ({*np.argsort(-p)[:20]} | {token}) & ({*np.argsort(-q)[:20]} | {token})
        bucket = [1 - sum(math.exp(each[t]) for t in both) for each in (p, q)]
        listed = sum(math.exp(p[t]) * (p[t] - q[t]) for t in both)
        found.append(listed + bucket[0] * math.log(bucket[0] / bucket[1]))
    return np.array(found)


def test_figures_equal_those_of_all_logits(run, models, transformers):
    """Windows must not share tokens, first tokens are not scored, and divergence is of the reference from the other."""
    one, two = models
    result = json.loads(run("-m", two, one, "--against", one, "--json"))
    (ours, tokens), (theirs, _) = log_softmax(one), log_softmax(two)
    assert result["scored_tokens"] == len(tokens)
    for row, logits in ((result["reference"], ours), (result["models"][0], theirs)):
        loss = torch.nn.functional.cross_entropy(logits, tokens).item()
        assert row["nats_per_token"] == pytest.approx(loss, abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    expected = plain_divergence(ours, theirs, tokens)
    other, same = result["models"]
    assert other["kl_mean"] == pytest.approx(expected.mean(), rel=1e-4)
    assert other["kl_mean"] > 0.001
    assert other["kl_p99"] == pytest.approx(np.percentile(expected, 99), rel=1e-4)
    # All of the vocabulary differs more than some of it in a bucket.
    assert other["kl_mean"] <= (ours.exp() * (ours - theirs)).sum(-1).mean()
    assert (same["kl_mean"], same["kl_p99"], same["equal_share"], same["tokens_before_difference"]) == (0, 0, 1, 9)
    assert other["equal_share"] < 1


def test_greedy_tokens_are_the_models_own(models, transformers):
    """A text is continued from its beginning; an end token does not end it."""
    work = quality.Work(TEXTS, [("", Decimal(1))], "", WINDOW, 9, 1)
    said = quality.ask(work, models[0], SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    for text, tokens in zip(TEXTS, said.continued, strict=True):
        ids = list(text.encode())[:32]
        with torch.inference_mode():
            for _ in range(9):
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert tokens == ids[-9:]


def test_windows_fit_the_model(models):
    """A text that is longer than the model is scored whole, in windows as long as the model takes."""
    work = quality.Work(["a" * 150], [("", Decimal(1))], "", 1 << 20, 4, 1)
    said = quality.ask(work, models[0], SETTINGS | {"max_model_len": 64})
    assert [len(window) for window in said.windows] == [63, 63, 24]
    assert len(said.scores.own) == 147


def test_a_table_for_people(run, models):
    """The reference has nothing that it is compared with."""
    lines = run("-m", models[1], "--against", models[0]).splitlines()
    assert any("KL mean" in line for line in lines)
    assert sum(line.count(" - ") for line in lines) == 4


def test_other_tokens_are_refused(run, models, tmp_path):
    """Perplexity of other tokens is another figure, and positions would not match."""
    save_llama(tmp_path, max_position_embeddings=2048)
    backend = byte_backend(b"er")
    backend.add_tokens(["river"])
    save_backend(backend, tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(UserError, match="its tokenizer is not the reference's"):
        run("-m", str(tmp_path), "--against", models[0])


def scores(*listed):
    return Scores.of([0] * len(listed), [{0: quality_logprob(0.1), **each} for each in listed], 4)


def quality_logprob(probability):
    return type("Logprob", (), {"logprob": math.log(probability)})()


def test_lists_of_other_tokens():
    """A token that one model alone lists belongs to the rest, in any order and number of tokens."""
    p = {7: quality_logprob(0.5), 8: quality_logprob(0.2)}
    q = {9: quality_logprob(0.3), 7: quality_logprob(0.4), 4: quality_logprob(0.05)}
    expected = 0.5 * math.log(0.5 / 0.4) + 0.4 * math.log(0.4 / 0.5)
    assert divergence(scores(p, p), scores(q, p)) == pytest.approx([expected, 0])
    certain = {7: quality_logprob(0.9)}
    assert np.isfinite(divergence(scores(certain), scores(q))).all()


def test_agreement():
    """Equal answers count whole; a shorter one differs where it ends."""
    share, tokens = agreement([[1, 2, 3], [1, 2, 3], [4]], [[1, 2, 3], [1, 9, 3], [4, 5]])
    assert (share, tokens) == (pytest.approx(1 / 3), pytest.approx(5 / 3))


@pytest.mark.parametrize(("right", "count"), [(0, 10), (3, 40), (20, 40), (40, 40)])
def test_the_interval_has_the_shares_that_do_not_contradict(right, count):
    """Wilson's ends are the shares from which the observed one is 1.96 of their deviations away."""
    share, ends = right / count, wilson(right, count)
    for end in ends:
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), rel=1e-6)
    assert ends[0] <= share <= ends[1]
    assert (ends[0] == 0, ends[1] == 1) == (right == 0, right == count)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 * 4 = 12. #### 12", 12),
        ("It costs $1,250.50.", Decimal("1250.5")),
        ("5-3", 3),
        ("They lose -7 dollars", -7),
        ("none", None),
        ("18.00 in all.", 18),
    ],
)
def test_the_last_number(text, number):
    """Commas, signs, and a full stop behind the number."""
    assert quality.last_number(text) == number


def test_answers_are_counted():
    """The last number counts, as a number; no number is a wrong answer."""
    work = quality.Work([], [("", Decimal(n)) for n in (5, 5, 5)], "", 1, 1, 1)
    found = quality.figures(work, quality.Said([], [], scores({}), [], ["4 + 1 = 5.0", "5 or 6", "?"]))
    assert (found["right"], found["right_share"]) == (1, pytest.approx(1 / 3))


def test_the_questions_have_their_answers():
    """Each step of an answer is computed again, and the last result is the answer."""
    rows = [row for name in ("questions", "examples") for row in quality.rows_of(quality._DATA / f"{name}.jsonl")]
    assert len(rows) == 44
    for row in rows:
        steps, _, answer = row["answer"].partition("#### ")
        equations = re.findall(rf"({_NUMBER}(?: [-+*/] {_NUMBER})+) = ({_NUMBER})", steps)
        assert equations, row
        for left, right in equations:
            assert eval(left) == pytest.approx(float(right)), row
        assert Decimal(equations[-1][1]) == Decimal(answer), row
        numbers = set(re.findall(r"\d+", row["question"]))
        assert not numbers or numbers & set(re.findall(r"\d+", steps)), row


def test_a_question_without_a_number_is_refused(tmp_path):
    """It would count as wrong for every model."""
    (tmp_path / "q.jsonl").write_text('{"question": "?", "answer": "42"}')
    with pytest.raises(UserError, match="no number after ####"):
        quality.read_work(quality._DATA / "texts.jsonl", tmp_path / "q.jsonl", window=1, tokens=1, answer_tokens=1)
