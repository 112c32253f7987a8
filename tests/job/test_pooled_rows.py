"""Rows that are pooled take the host little time, and have what each would have alone."""

from types import SimpleNamespace

import pytest
from tokenizers import processors

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import ModelPooling, PoolingParams
from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.fields import PromptOptions
from rosebatch.io.rows import Row
from rosebatch.io.tasks.score import SCORE
from rosebatch.job.prepared import Prepared, PreparedPrompt
from rosebatch.job.texts import Texts
from rosebatch.job.tickets import Tickets
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import FakeModel, make_engine


@pytest.fixture
def tokenizer():
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A ! $B !", special_tokens=[("!", 33)])
    return Tokenizer(backend, max_prompt_bytes=1000)


def row_of(index, *pairs, truncate=0):
    own = PromptOptions(truncate_prompt_tokens=truncate)
    return Row(index=index, where="", metadata={}, sampling=GREEDY, pairs=pairs, pooling=SCORE, options=own)


def encoded(rows, tokenizer):
    """Token ids, or the message of the error, of each prompt of each row."""
    found = Texts(rows, tokenizer, 2000, 1 << 20).encode()
    return [[str(ids) if isinstance(ids, RowError) else list(ids) for ids, _ in own] for own in found]


def test_pairs_of_many_rows_are_encoded_together(tokenizer, monkeypatch):
    """A call for each row used one core. A pair that is refused is the error of its row alone."""
    long = "x" * 2000
    rows = [
        row_of(0, ("a", "some words"), ("b", "more")),
        row_of(1, ("a", "w" * 60), truncate=9),
        row_of(2, ("fine", "too"), ("a", long)),
        row_of(3, ("c", "d")),
        Row(index=4, where="", metadata={}, sampling=GREEDY, prompt="no pair"),
        row_of(5, ("e" * 50, "f" * 60), truncate=9),
    ]
    alone = [encoded([row], tokenizer)[0] for row in rows]
    calls = []
    encode_pairs = tokenizer.encode_pairs
    monkeypatch.setattr(tokenizer, "encode_pairs", lambda *given: calls.append(given) or encode_pairs(*given))
    assert encoded(rows, tokenizer) == alone
    assert len(calls) == 2
    assert alone[0][0] == list(b"a!some words!")
    assert [len(ids) for ids in alone[1] + alone[5]] == [9, 9]
    assert alone[2] == ["the prompt has 2000 bytes; --max-prompt-bytes allows 1000"]


def test_pairs_without_a_tokenizer():
    """Each row is refused: none gets the error of another."""
    assert [len(own) for own in encoded([row_of(0, ("a", "b")), row_of(1, ("c", "d"))], None)] == [1, 1]


def test_no_thread_decodes_pooled_rows(tokenizer):
    """They have no text. A thread that decodes nothing took its turn with the one that makes results."""
    tickets = Tickets(tokenizer, SimpleNamespace(), {}, 1 << 20, lambda: None, False, False)
    row = Row(index=0, where="", metadata={}, sampling=GREEDY, prompt="a", pooling=PoolingParams())
    engine = make_engine(FakeModel())
    assert tickets.add(engine, Prepared(row, (PreparedPrompt((97,), GREEDY, "a"),), 100)) is None
    request = Request(0, (97,), GREEDY, PoolingParams(pooling="last", normalize=True))
    times = {"cached_tokens": 0, "arrival_time": 0.0, "finish_time": 1.0}
    done = Completion(request=request, sample=0, token_ids=(), finish_reason="embedded", pooled=[0.5], **times)
    tickets.take([done])
    assert list(tickets.finished(1)) == []
    (result,) = tickets.rest()
    assert result.pooled == [[0.5]]


def test_parameters_of_many_rows_are_completed_once():
    """To complete those of each row took a third of the host's time."""
    own = ModelPooling(params=PoolingParams(pooling="mean"))
    assert own.of(PoolingParams()) is own.of(PoolingParams())
    assert own.of(PoolingParams()) == PoolingParams(pooling="mean", normalize=True)
    other = ModelPooling(params=PoolingParams(pooling="last"))
    assert other.of(PoolingParams()) == PoolingParams(pooling="last", normalize=True)
