"""Lines of ``/v1/embeddings``, and their answers under the client's own types."""

from array import array
from base64 import b64decode

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.openai.lines import BatchShape, parse_request
from rosebatch.io.rows import FailedRow, Row
from tests.helpers.results import make_result


def line(url="/v1/embeddings", **body):
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}}


def parse(values):
    return parse_request(values, index=0, where="line 1", defaults={"temperature": 0.5})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,)))],
)
@pytest.mark.parametrize("url", ["/v1/embeddings", "/embeddings", None])
def test_inputs(given, prompts, url):
    """A list of token ids is one input, a list of lists several; without a URL the body tells what it is."""
    row = parse(line(url, input=given, user="u", dimensions=3))
    assert isinstance(row, Row)
    assert (row.prompts, row.pooling) == (prompts, PoolingParams(dimensions=3))


@pytest.mark.parametrize(
    ("body", "code", "name"),
    [
        ({}, "missing_prompt", "input"),
        ({"input": ""}, "missing_prompt", "input"),
        ({"input": ["a", ""]}, "missing_prompt", "input"),
        ({"input": ["a", 1]}, "invalid_field", "input"),
        ({"input": "a", "dimensions": 0}, "invalid_dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_field", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "invalid_field", "truncate_prompt_tokens"),
        ({"input": "a", "temperature": 1}, "unknown_field", "temperature"),
    ],
)
def test_refused(body, code, name):
    """A body that cannot be served says which field is to blame."""
    row = parse(line(**body))
    assert isinstance(row, FailedRow)
    assert row.error.code == code
    assert name in row.error.message


@pytest.mark.parametrize("longest", [7, -1])
def test_long_inputs(longest):
    """vLLM's server cuts them on request; the field was unknown to this endpoint alone."""
    assert parse(line(input=["a", "b"], truncate_prompt_tokens=longest)).options.truncate_prompt_tokens == longest


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_answers_fit_the_types_of_the_client(encoding_format):
    """A field that is missing, or has another type, breaks scripts that read the answers by these types."""
    vectors = np.array([[0.6, -0.8], [1 / 3, 1e-7]], np.float32)
    row = parse(line(input=["a", "b"], encoding_format=encoding_format))
    answer = make_result(
        index=0,
        metadata=row.metadata,
        choices=[],
        prompt_tokens=7,
        completion_tokens=0,
        cached_tokens=4,
        pooled=[array("f", vector.tobytes()) for vector in vectors],
    )
    body = BatchShape("model", 1).result(answer)["response"]["body"]
    assert body.keys() == {"object", "data", "model", "usage"}
    found = [each["embedding"] for each in body["data"]]
    if encoding_format == "base64":
        found = [np.frombuffer(b64decode(each), "<f4").tolist() for each in found]
        # The client decodes before its types are made.
        body = {**body, "data": [{**one, "embedding": own} for one, own in zip(body["data"], found, strict=True)]}
    assert np.array(found, np.float32).tobytes() == vectors.tobytes()
    parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [each.index for each in parsed.data] == [0, 1]
    assert (parsed.usage.prompt_tokens, parsed.usage.total_tokens) == (7, 7)
