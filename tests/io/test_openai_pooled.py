"""Lines of vLLM's pooling endpoints, and their answers as its server gives them."""

from array import array
from base64 import b64decode
from dataclasses import replace

import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Completion, Request
from rosebatch.io.labelled_tokens import LabelledTokens
from rosebatch.io.openai.lines import BatchShape, parse_request
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.scored_tokens import TokenTable
from rosebatch.io.tasks.classify import CLASSIFY
from rosebatch.io.tasks.score import SCORE
from rosebatch.job.chat_rows import for_model
from rosebatch.model.vision.vision import Vision
from tests.helpers.results import make_result


def parse(url, **body):
    line = {"custom_id": "a", "url": url, "body": {"model": "m", **body}}
    return parse_request(line, index=0, where="line 1", defaults={"temperature": 0.5})


def answer(row, *outputs, labels=("no", "yes"), **params):
    pooling = PoolingParams(task="classify", labels=labels, **params)
    done = [
        Completion(
            request=Request(i, (1, 2), pooling=pooling), sample=0, token_ids=(), finish_reason="classified",
            cached_tokens=0, arrival_time=0.0, finish_time=0.0,
        )
        for i in range(len(outputs))
    ]  # fmt: skip
    pooled = [array("f", each) for each in outputs]
    counts = {"prompt_tokens": 7, "completion_tokens": 0, "cached_tokens": 0}
    tokens = [LabelledTokens((), each, pooling, None, TokenTable(None)) for each in pooled if pooling.of_tokens]
    result = make_result(index=0, metadata=row.metadata, pooled=pooled, completions=done, tokens=tokens, **counts)
    return BatchShape("model", 1700000000).result(result)["response"]["body"]


@pytest.mark.parametrize("url", ["/v1/classify", "/classify", "http://localhost:8000/v1/classify"])
def test_classify(url):
    """Each input has an entry, with the label by the largest number."""
    row = parse(url, input=["a", [1, 2]], user="u")
    assert isinstance(row, Row)
    assert (row.prompts, row.pooling, row.ignored) == (("a", (1, 2)), CLASSIFY, ("user",))
    body = answer(row, [0.25, 0.75], [0.5, 0.5])
    assert [(each["index"], each["label"], each["num_classes"]) for each in body["data"]] == [
        (0, "yes", 2),
        (1, "no", 2),
    ]
    assert body["data"][0]["probs"] == [0.25, 0.75]
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
    assert (body["object"], body["model"], body["created"]) == ("list", "model", 1700000000)


def test_chats_with_images():
    """They are embedded by a model that sees; where labels are wanted it was said that parts are texts alone."""
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    messages, seeing = [{"role": "user", "content": content}], Vision(0, (), lambda *_: None, lambda _: None)
    row = parse("/v1/pooling", messages=messages, task="embed")
    assert [each.source for each in row.images] == ["a.png"]
    assert for_model(row, None, seeing) is row
    for url in ("/v1/pooling", "/v1/classify"):
        refused = for_model(parse(url, messages=messages), None, seeing)
        assert refused.error.message == "messages[0].content[1]: what is scored or classified has no images"


@pytest.mark.parametrize("url", ["/pooling", "/v1/pooling"])
def test_pooling(url):
    """Numbers of prompts, of tokens, and vectors have one endpoint; an activation that is off is left out."""
    row = parse(url, input=["a", [1, 2]], use_activation=False, truncate_prompt_tokens=9)
    assert (row.prompts, row.options.truncate_prompt_tokens) == (("a", (1, 2)), 9)
    assert row.pooling == PoolingParams(task="classify", activation="none")
    body = answer(row, [0.25, 0.75], [0.5, 0.5])
    assert body["data"] == [
        {"index": 0, "object": "pooling", "data": [0.25, 0.75]},
        {"index": 1, "object": "pooling", "data": [0.5, 0.5]},
    ]
    assert body["id"] == "pool-0"
    of_tokens = answer(row, [0.25, 0.75, 1, 0], pooling="all")
    assert of_tokens["data"] == [{"index": 0, "object": "pooling", "data": [[0.25, 0.75], [1, 0]]}]
    packed = parse(url, input="a", encoding_format="base64", task="token_classify")
    (found,) = answer(packed, [0.25, 0.75], pooling="all")["data"]
    assert array("f", b64decode(found["data"])).tolist() == [0.25, 0.75]
    with pytest.raises(RowError, match="task token_classify: the model's head is for whole prompts"):
        answer(packed, [0.25, 0.75])
    vector = parse(url, input="a", task="embed", dimensions=2, use_activation=False)
    assert vector.pooling == PoolingParams(dimensions=2, normalize=False)
    assert parse(url, input="a").pooling == CLASSIFY


def test_pooling_of_chats():
    """A reward model sees whole conversations: no answer is opened."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = parse("/pooling", messages=chat, chat_template_kwargs={"x": 1})
    assert row.messages == chat
    assert row.options.template == {"add_generation_prompt": False, "continue_final_message": False, "x": 1}


def test_classes_of_chats():
    """vLLM's server classifies conversations too; the field was unknown."""
    chat = [{"role": "user", "content": "a"}]
    row = parse("/v1/classify", messages=chat)
    assert (row.messages, row.pooling, row.options.add_generation_prompt) == (chat, CLASSIFY, False)


@pytest.mark.parametrize(
    ("url", "body", "asked"),
    [
        ("/v1/classify", {"input": "a"}, CLASSIFY),
        ("/score", {"text_1": "a", "text_2": "b"}, SCORE),
        ("/rerank", {"query": "a", "documents": ["b"]}, SCORE),
    ],
)
def test_use_activation(url, body, asked):
    """The head's numbers as they are, where it is false. The field was unknown to all but /v1/pooling."""
    assert parse(url, **body, use_activation=False).pooling == replace(asked, activation="none")
    assert parse(url, **body, use_activation=True).pooling == parse(url, **body, use_activation=None).pooling == asked


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "d", (("q", "d"),)),
        ("q", ["d", "e"], (("q", "d"), ("q", "e"))),
        (["q", "r"], ["d", "e"], (("q", "d"), ("r", "e"))),
    ],
)
def test_score(names, first, second, pairs):
    """By each of vLLM's names; also without a URL: no other body has two texts."""
    texts = dict(zip(names, (first, second), strict=True))
    for url in ("/v1/score", "/score", None):
        row = parse(url, **texts, truncate_prompt_tokens=9, max_tokens_per_doc=0)
        assert (row.pairs, row.pooling, row.options.truncate_prompt_tokens) == (pairs, SCORE, 9)
    body = answer(row, *[[0.5]] * len(pairs))
    assert body["data"] == [{"index": i, "object": "score", "score": 0.5} for i in range(len(pairs))]


@pytest.mark.parametrize("url", ["/v1/rerank", "/rerank", "/v2/rerank", "https://host/v2/rerank/", None])
@pytest.mark.parametrize(("top", "order"), [(None, [2, 0, 1]), (0, [2, 0, 1]), (2, [2, 0]), (9, [2, 0, 1])])
def test_rerank(url, top, order):
    """The best first, by their numbers in the request; equal ones stay in its order."""
    row = parse(url, query="q", documents=["d", {"text": "e"}, "f"], top_n=top)
    assert row.pairs == (("q", "d"), ("q", "e"), ("q", "f"))
    results = answer(row, [0.25], [0.25], [0.75])["results"]
    assert [each["index"] for each in results] == order
    assert results[0] == {"index": 2, "document": {"text": "f"}, "relevance_score": 0.75}


def test_documents_of_an_answer():
    """One text is a document, and none come back where they are not wanted."""
    row = parse("/v2/rerank", query="q", documents="d", return_documents=False)
    assert row.pairs == (("q", "d"),)
    assert answer(row, [0.25])["results"] == [{"index": 0, "relevance_score": 0.25}]


@pytest.mark.parametrize(
    ("url", "body", "code"),
    [
        ("/v1/classify", {}, "missing_prompt"),
        ("/v1/classify", {"input": "a", "dimensions": 3}, "unknown_field"),
        ("/v1/score", {"text_1": "a"}, "missing_prompt"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_field"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "invalid_field"),
        ("/v1/rerank", {"query": "a", "documents": []}, "missing_prompt"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "invalid_field"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "invalid_field"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "missing_prompt"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "missing_prompt"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 9}, "unsupported_field"),
        ("/v2/score", {"text_1": "a", "text_2": "b"}, "unsupported_url"),
        ("/v1/v2/rerank", {"query": "a"}, "missing_prompt"),
        ("/v1/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "missing_prompt"),
        ("/v1/classification", {"input": "a"}, "unsupported_url"),
        ("/pooling", {}, "missing_prompt"),
        ("/pooling", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "missing_prompt"),
        ("/pooling", {"input": "a", "dimensions": 3}, "invalid_field"),
        ("/pooling", {"input": "a", "task": "embed", "dimensions": 0}, "invalid_dimensions"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "invalid_field"),
        ("/pooling", {"input": "a", "embed_dtype": "float16"}, "invalid_field"),
        ("/pooling", {"input": "a", "chat_template_kwargs": {"x": 1}}, "invalid_field"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 0}, "invalid_field"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": -2}, "invalid_field"),
    ],
)
def test_refused(url, body, code):
    """A body that cannot be served says why."""
    row = parse(url, **body)
    assert isinstance(row, FailedRow)
    assert row.error.code == code


def test_messages_name_the_fields_of_the_line():
    """They named text_1 and text_2 of vLLM's older form, which the line did not have."""
    row = parse("/v1/score", queries=["a", "b"], documents=["c"])
    assert row.error.message == "queries has 2 texts, and documents 1"
    assert parse("/v1/rerank", query="a", documents=["b"] * 1025).error.message.startswith("documents must have 1 to")
    assert parse("https://host/v2/chat", messages=[]).error.message.startswith("url /v2/chat is not supported")
