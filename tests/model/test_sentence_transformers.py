"""What a folder of sentence-transformers says of its embeddings."""

import json

import pytest

from rosebatch.core.errors import RowError, UserError
from rosebatch.core.pooling_params import Dense, ModelPooling, PoolingParams
from rosebatch.model.hf.config import read_model_config
from rosebatch.model.sentence_transformers import (
    longest_prompt,
    pooling_or_refusal,
    prompts_or_none,
    read_pooling,
    read_prompts,
)

_PACKAGE = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path):
    def make(pooling, *further):
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"{_PACKAGE}.{kind}"}
            for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), *further])
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
        ({"pooling_mode_max_tokens": True}, [NORMALIZE], PoolingParams(pooling="max", normalize=True)),
        ({"pooling_mode": "max"}, [], PoolingParams(pooling="max", normalize=False)),
        ({"pooling_mode_cls_token": True}, [NORMALIZE], PoolingParams(pooling="cls", normalize=True)),
        ({"pooling_mode": "cls"}, [], PoolingParams(pooling="cls", normalize=False)),
        ({"pooling_mode": ["mean"]}, [NORMALIZE], PoolingParams(pooling="mean", normalize=True)),
    ],
)
def test_served(folder, pooling, further, expected):
    """Another pooling than the model was trained with gives vectors that compare badly."""
    assert read_pooling(folder(pooling, *further)) == expected


def test_a_model_that_says_nothing(tmp_path):
    """Most models are no embedding models: nothing is decided for them, and nothing refused."""
    assert pooling_or_refusal(tmp_path) == ModelPooling(PoolingParams(), refused=None)
    assert pooling_or_refusal(None) == ModelPooling(PoolingParams(), refused=None)


@pytest.mark.parametrize(
    ("pooling", "further", "message"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, [], "mean_sqrt_len_tokens.*--pooling"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, [], "--pooling"),
        ({}, [], "nothing"),
        (LAST, [("2_LayerNorm", "LayerNorm")], "LayerNorm"),
        (LAST, [NORMALIZE, ("3_Dense", "Dense")], "normalised before a part 'Dense'"),
        (LAST, [("../2_Normalize", "Normalize")], "no folder beside it"),
    ],
)
def test_refused(folder, pooling, further, message):
    """What is not served would be left out without a word."""
    made = folder(pooling, *further)
    with pytest.raises(UserError, match=message):
        read_pooling(made)
    assert pooling_or_refusal(made).refused


DENSE = {"in_features": 8, "out_features": 3, "bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}


def test_products_after_the_pooling(folder):
    """Without them a vector is of another space."""
    made = folder(LAST, ("2_Dense", "Dense"), ("3_Dense", "Dense"), ("4_Normalize", "Normalize"))
    for name, values in {"2_Dense": DENSE, "3_Dense": {"in_features": 3, "out_features": 5}}.items():
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(values))
    found = pooling_or_refusal(made)
    # The class has a bias and tanh where its config says nothing.
    assert found.dense == (Dense(made / "2_Dense", 8, 3, False, True), Dense(made / "3_Dense", 3, 5, True, True))
    assert (found.size(8), ModelPooling().size(8)) == (5, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "'GELU' is not supported"),
        ({"out_features": -1}, "no sizes"),
        ({"out_features": None}, "no sizes"),
        ({"bias": 1}, "bias"),
        ({"module_output_name": "token_embeddings"}, "module_output_name"),
        ({"use_residual": True}, "use_residual"),
    ],
)
def test_products_that_are_refused(folder, changes, message):
    """Another activation, or a product of each token, would change every vector."""
    made = folder(LAST, ("2_Dense", "Dense"))
    (made / "2_Dense").mkdir()
    (made / "2_Dense" / "config.json").write_text(json.dumps({**DENSE, **changes}))
    assert message in str(pooling_or_refusal(made).refused)


def test_tokens_that_are_normalised(folder):
    """The mean of normalised states is another vector; former versions wrote no config of such a part."""
    made = folder(LAST, NORMALIZE)
    (made / "2_Normalize").mkdir()
    for name, told in (("sentence_embedding", None), ("token_embeddings", "module_input_name 'token_embeddings'")):
        write(made / "2_Normalize", "config.json", {"module_input_name": name, "module_output_name": None})
        assert told in str(pooling_or_refusal(made).refused) if told else pooling_or_refusal(made).params.normalize


def test_a_folder_whose_parts_pool_nothing(folder):
    """Some take the output of the model's own pooler: it got a mean that nobody asked for."""
    made = folder(LAST)
    write(made, "modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"{_PACKAGE}.Transformer"}])
    assert "none of its parts pools: give --pooling" in str(pooling_or_refusal(made).refused)


def test_texts_in_messages(folder):
    """sentence-transformers renders each text by the chat template: vectors of the text alone were others."""
    made = folder(LAST)
    for kinds, is_refused in (({"text": {}}, False), ({"text": {}, "message": {"format": "flat"}}, True)):
        write(made, "sentence_bert_config.json", {"modality_config": kinds})
        assert ("give messages in place of texts, and --pooling" in str(pooling_or_refusal(made).refused)) == is_refused
    head = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}
    with pytest.raises(UserError, match="its texts go through the chat template"):
        read_model_config(write(made, "config.json", head))


def test_small_letters(tmp_path):
    """Some models' tokenizers leave that to sentence-transformers: capitals would be unknown tokens."""
    assert not read_prompts(tmp_path).lower_case
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    assert read_prompts(tmp_path).lower_case
    assert longest_prompt(tmp_path) == 7


def test_the_first_token_of_a_decoder():
    """It sees no other token: all texts would have one vector, or that of a chunk's first token."""
    own = PoolingParams(pooling="cls")
    for model, asked in ((ModelPooling(own), PoolingParams()), (ModelPooling(), own)):
        with pytest.raises(RowError, match="sees no other"):
            model.of(asked)
    assert ModelPooling(own, bidirectional=True).of(PoolingParams()).pooling == "cls"


def test_a_broken_list(tmp_path):
    """It is an error of one line, not a traceback."""
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"modules.json: unreadable"):
        read_pooling(tmp_path)


def write(folder, name, values):
    (folder / name).write_text(json.dumps(values))
    return folder


def test_prompts(folder):
    """Without its instruction, a query is compared as if it were a document."""
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    made = write(
        folder(LAST), "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"}
    )
    found = read_prompts(made)
    assert [found.named(name) for name in (None, "query", "document")] == [prompts["query"], prompts["query"], ""]
    with pytest.raises(RowError, match="no prompt 'title'; it has document, query"):
        found.named("title")
    assert read_pooling(made).prompt_name == "query"
    # A name without a text was no prompts at all.
    assert read_prompts(write(made, "config_sentence_transformers.json", {"prompts": {"a": None}})).named("a") == ""


def test_a_folder_without_prompts(tmp_path):
    """And one without a default: nothing stands in front."""
    assert read_prompts(tmp_path).named(None) == ""
    with pytest.raises(RowError, match="it has none"):
        read_prompts(tmp_path).named("query")
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "Q: "}, "default_prompt_name": None})
    assert read_prompts(tmp_path).named(None) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": ["a"]}, "no texts by name"),
        ({"prompts": {"a": 1}}, "no texts by name"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "default prompt 'c'"),
        ({"prompts": {}, "default_prompt_name": ["c"]}, "default prompt"),
    ],
)
def test_broken_prompts(folder, values, message):
    """``embed`` refuses them; ``generate`` has no use for them."""
    made = write(folder(LAST), "config_sentence_transformers.json", values)
    with pytest.raises(UserError, match=message):
        read_pooling(made)
    assert not prompts_or_none(made).by_name


def test_a_mean_that_leaves_the_prompt_out(folder):
    """The prompt's tokens would count."""
    made = folder({"pooling_mode_mean_tokens": True, "include_prompt": False})
    assert read_pooling(made).pooling == "mean"
    with pytest.raises(UserError, match="without the prompt"):
        read_pooling(write(made, "config_sentence_transformers.json", {"prompts": {"query": "Q: "}}))


def test_the_longest_prompt(tmp_path):
    """Beyond it, vectors of such a model mean little."""
    assert longest_prompt(tmp_path) is None
    assert longest_prompt(write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 512})) == 512
    assert longest_prompt(write(tmp_path, "sentence_bert_config.json", {"max_seq_length": None})) is None
    with pytest.raises(UserError, match="max_seq_length"):
        longest_prompt(write(tmp_path, "sentence_bert_config.json", {"max_seq_length": "many"}))


def test_the_longest_prompt_of_later_versions(folder):
    """They leave it to the tokenizer: longer rows were served, where sentence-transformers cuts them."""
    made = write(folder(LAST), "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    assert longest_prompt(made) is None
    assert longest_prompt(write(made, "tokenizer_config.json", {"model_max_length": 40})) == 40
    assert longest_prompt(write(made, "tokenizer_config.json", {"model_max_length": 1e30})) is None
    assert longest_prompt(write(made, "tokenizer_config.json", {})) is None
    (made / "modules.json").unlink()
    # Of other models, the number is often that of an older one.
    assert longest_prompt(write(made, "tokenizer_config.json", {"model_max_length": 40})) is None
