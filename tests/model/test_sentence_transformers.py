"""What a folder of sentence-transformers says of its embeddings."""

import json

import pytest

from rosebatch.errors import UserError
from rosebatch.model.sentence_transformers import pooling_or_refusal, read_pooling
from rosebatch.pooling_params import PoolingParams

_PACKAGE = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path):
    def make(pooling, *further):
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *further]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"{_PACKAGE}.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
        return tmp_path

    return make


NORMALIZE = ("2_Normalize", "Normalize")
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}


@pytest.mark.parametrize(
    ("pooling", "further", "expected"),
    [
        (LAST, [NORMALIZE], PoolingParams(pooling="last", normalize=True)),
        (LAST, [], PoolingParams(pooling="last", normalize=False)),
        ({"pooling_mode_mean_tokens": True}, [NORMALIZE], PoolingParams(pooling="mean", normalize=True)),
        ({"pooling_mode": "lasttoken"}, [NORMALIZE], PoolingParams(pooling="last", normalize=True)),
        ({"pooling_mode": ["mean"]}, [NORMALIZE], PoolingParams(pooling="mean", normalize=True)),
    ],
)
def test_served(folder, pooling, further, expected):
    """Another pooling than the model was trained with gives vectors that compare badly."""
    assert read_pooling(folder(pooling, *further)) == expected


def test_a_model_that_says_nothing(tmp_path):
    """Most models are no embedding models: nothing is decided for them, and nothing refused."""
    assert pooling_or_refusal(tmp_path) == (PoolingParams(), None)
    assert pooling_or_refusal(None) == (PoolingParams(), None)


@pytest.mark.parametrize(
    ("pooling", "further", "message"),
    [
        ({"pooling_mode_cls_token": True}, [], "cls_token.*--pooling"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, [], "--pooling"),
        ({}, [], "nothing"),
        (LAST, [("2_Dense", "Dense")], "Dense"),
        (LAST, [("../2_Normalize", "Normalize")], "no folder beside it"),
    ],
)
def test_refused(folder, pooling, further, message):
    """What is not served would be left out without a word."""
    made = folder(pooling, *further)
    with pytest.raises(UserError, match=message):
        read_pooling(made)
    assert pooling_or_refusal(made)[1]


def test_a_broken_list(tmp_path):
    """It is an error of one line, not a traceback."""
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"modules.json: unreadable"):
        read_pooling(tmp_path)
