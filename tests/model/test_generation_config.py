"""Sampling defaults out of generation_config.json: which fields, what they mean, and broken files."""

import json

import pytest

from rosebatch.core.errors import UserError
from rosebatch.model.hf.generation_config import sampling_defaults, unserved_defaults


@pytest.fixture
def read(tmp_path):
    """The defaults of a folder with this generation_config.json."""

    def call(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
        return sampling_defaults(tmp_path)

    return call


def test_a_folder_without_the_file(tmp_path):
    """Many have none."""
    assert sampling_defaults(tmp_path) == {}


def test_sampling_that_is_not_served(tmp_path):
    """Such fields were dropped without a word."""
    assert unserved_defaults(tmp_path) == []
    stored = {"typical_p": 1.0, "num_beams": 1, "stop_strings": None, "no_repeat_ngram_size": 0, "suppress_tokens": []}
    stored |= {"num_return_sequences": 1}
    for name in stored:
        asks = {"typical_p": 0.9, "num_beams": 4, "stop_strings": ["x"], "suppress_tokens": [5]}.get(name, 3)
        (tmp_path / "generation_config.json").write_text(json.dumps(QWEN3 | stored | {name: asks}))
        assert unserved_defaults(tmp_path) == [name]


# Of which only sampling is ours.
QWEN3 = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "do_sample": True}
QWEN3 |= {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        pytest.param(QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, id="qwen3"),
        pytest.param({"eos_token_id": 2, "max_length": 4096, "typical_p": 0.9}, {}, id="nothing-known"),
        pytest.param({"do_sample": True, "min_p": 0.1}, {"min_p": 0.1, "temperature": 1.0}, id="no-temperature"),
        pytest.param({"do_sample": True}, {"temperature": 1.0}, id="sample-alone"),
        pytest.param({"do_sample": False}, {"temperature": 0.0}, id="greedy"),
        pytest.param(
            {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
            {"temperature": 0.0, "top_p": 0.6},
            id="greedy-and-fields",
        ),
        pytest.param({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6}, id="sample-left-out"),
        pytest.param({"top_p": 0.8}, {"top_p": 0.8, "temperature": 1.0}, id="filter-alone"),
        pytest.param(
            {"repetition_penalty": 1.05, "max_new_tokens": 2048},
            {"repetition_penalty": 1.05, "max_tokens": 2048},
            id="other-fields",
        ),
        pytest.param({"do_sample": None, "temperature": None, "top_k": None, "max_new_tokens": None}, {}, id="nulls"),
    ],
)
def test_what_the_fields_mean(read, stored, expected):
    """Wrong here, every row of a run is sampled in another way than its model's authors recommend."""
    assert read(stored) == expected


def test_numbers_have_the_type_of_the_field(read):
    """Files say 1 for 1.0, and a manifest compares what they say with what another run was given."""
    assert [type(value) for value in read({"do_sample": True, "temperature": 1, "top_p": 1}).values()] == [float, float]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ('{"temperature": ', "generation_config.json: "),
        ("[]", "not a JSON object"),
        ({"top_p": 1.5}, r"generation_config.json: top_p must be in \(0, 1\], got 1.5"),
        ({"temperature": "warm"}, "generation_config.json: .*temperature"),
        ({"top_k": 2.5}, "generation_config.json: .*top_k"),
        ({"do_sample": "no"}, "generation_config.json: do_sample"),
        ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens must be >= 1"),
        ({"max_new_tokens": 7.5}, "generation_config.json: max_new_tokens: "),
        ('{"temperature": NaN}', "temperature must be >= 0"),
    ],
)
def test_broken_files(read, stored, message):
    """One line that names the file and its own field, before any row is read."""
    with pytest.raises(UserError, match=message):
        read(stored)
