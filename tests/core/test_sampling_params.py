"""What scripts pass as sampling parameters: loose values mean what they mean elsewhere, wrong types are named."""

import json
import math
import tracemalloc

import msgspec
import numpy as np
import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import GREEDY, MAX_TOKENS, SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec, StructuredOutputsParams
from rosebatch.io.sampling_fields import fields_of, sampling_params

STOPS = {"stop_token_ids": (5,), "allowed_token_ids": (3,)}
BIAS = {"logit_bias": ((5, 1.5),), "ignore_eos": True}


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {}),
        ({"stop": []}, {}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
        ({"stop_token_ids": None}, {}),
        ({"logit_bias": {5: 1.5, 6: -2}}, {"logit_bias": ((5, 1.5), (6, -2))}),
        ({"logit_bias": {5: 1.5, "7": -2}}, {"logit_bias": ((5, 1.5), (7, -2))}),
        ({"logit_bias": {"5": 1.5}}, {"logit_bias": ((5, 1.5),)}),
        ({"logit_bias": None}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"max_tokens": None}, {"max_tokens": MAX_TOKENS}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": np.float32(0.5), "max_tokens": np.int64(7)}, {"temperature": 0.5, "max_tokens": 7}),
        ({"stop_token_ids": np.array([5, 6])}, {"stop_token_ids": (5, 6)}),
        ({"stop_token_ids": (np.int32(5),), "allowed_token_ids": [np.int8(3)]}, STOPS),
        ({"logit_bias": {np.int64(5): np.float16(1.5)}, "ignore_eos": np.True_}, BIAS),
    ],
)
def test_loose_values(loose, strict):
    """Scripts written for other libraries pass these, and parameters that mean the same must be equal and hashable.

    Row fields are made of them too: JSON has no numbers of NumPy's.
    """
    assert SamplingParams(**loose) == SamplingParams(**strict)
    assert json.loads(msgspec.json.encode(SamplingParams(**loose)))
    assert hash(SamplingParams(**loose)) == hash(SamplingParams(**strict))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", "0.5", "a number"),
        ("temperature", None, "a number"),
        ("temperature", True, "a number"),
        ("top_k", 1.5, "an integer"),
        ("top_k", True, "an integer"),
        ("top_p", "all", "a number"),
        ("min_p", [0.1], "a number"),
        ("max_tokens", "16", "an integer or None"),
        ("max_tokens", 16.0, "an integer or None"),
        ("seed", "7", "an integer or None"),
        ("stop", 5, "a string or a list of strings"),
        ("stop", ["a", 5], "made of non-empty strings"),
        ("stop", {"a"}, "a string or a list of strings"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", ["5"], "made of integers >= 0"),
        ("stop_token_ids", [True], "made of integers >= 0"),
        ("ignore_eos", "yes", "True or False"),
        ("ignore_eos", 1, "True or False"),
        ("n", "2", "an integer"),
        ("n", None, "an integer"),
        ("min_tokens", 1.0, "an integer"),
        ("presence_penalty", "1", "a number"),
        ("frequency_penalty", None, "a number"),
        ("repetition_penalty", (1,), "a number"),
        ("logit_bias", [5], "a mapping of token ids to numbers"),
        ("logit_bias", 5, "a mapping of token ids to numbers"),
        ("logit_bias", (5,), "a mapping of token ids to numbers"),
        ("logit_bias", {"five": 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {None: 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {5: "1"}, "a mapping of token ids to numbers"),
        ("logprobs", True, "an integer or None"),
        ("prompt_logprobs", "2", "an integer or None"),
        ("grammar", "[0-9]+", "a GrammarSpec or None"),
        ("grammar", {"regex": "a"}, "a GrammarSpec or None"),
    ],
)
def test_wrong_types(name, value, rule):
    """A TypeError from inside the library, or a run that fails at the first row, would not say which field it was."""
    with pytest.raises(ValueError, match=f"^{name} must be {rule}, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("given", [{}, {"seed": 1}, {**STOPS, **BIAS, "n": 3, "temperature": 0.5, "stop": ("a",)}])
def test_another_seed_changes_nothing_else(given):
    """It is set without the checks, so no field may be left out."""
    params = SamplingParams(**given)
    for seed in (0, 2**64 - 1):
        assert params.seeded(seed) == SamplingParams(**{**given, "seed": seed})
    assert params == SamplingParams(**given)


def test_given_are_the_fields_that_differ_from_their_defaults():
    """As the defaults of a file, all fields would override the model's own; and reports name these alone."""
    assert GREEDY.given() == {}
    assert SamplingParams(top_k=-1, stop=None, max_tokens=512).given() == {}
    assert SamplingParams(temperature=0.5, stop="a", seed=0).given() == {"temperature": 0.5, "stop": ("a",), "seed": 0}


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.5, top_k=3, seed=0, stop=["a", "b"], stop_token_ids=[5], n=2, logprobs=0),
        SamplingParams(logit_bias={5: 1.5, 6: -2.0}, max_tokens=None, prompt_logprobs=2),
        SamplingParams(grammar=GrammarSpec("json_object")),
        SamplingParams(grammar=GrammarSpec("json_schema", '{"type":"integer"}')),
        SamplingParams(grammar=GrammarSpec("regex", "[0-9]+")),
        SamplingParams(grammar=GrammarSpec("choice", '["yes","no"]')),
    ],
)
def test_parameters_as_fields_of_a_row(params):
    """Defaults of a file that are given as parameters: grammars and biases were lost, or ended the job."""
    assert sampling_params(fields_of(params)) == params


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["a", "b"]},
        {"stop_token_ids": [5], "temperature": 0.5},
        {"logit_bias": {"5": 1.5}},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
    ],
)
def test_flags_with_lists_and_objects_are_checked_once(given):
    """Their values cannot be hashed, and every row of a file was checked anew."""
    assert sampling_params(given) is sampling_params({**given})
    assert sampling_params(given) == sampling_params({**given, "max_tokens": 512})


def test_values_that_are_equal_as_json_only():
    """None of them is remembered for the other."""
    assert sampling_params({"stop": ["a"], "logprobs": True}) != sampling_params({"stop": ["a"], "logprobs": 1})
    for bad in (math.nan, math.inf):
        with pytest.raises(RowError, match="logit_bias"):
            sampling_params({"logit_bias": {"5": bad}})


def test_long_values_are_not_remembered():
    """A thousand schemas of a megabyte are a gigabyte."""
    for given in (
        {"stop": ["x" * 10_000]},
        {"stop": ("x" * 10_000,)},
        {"stop": "x" * 10_000},
        {"stop_token_ids": tuple(range(10_000))},
        {"structured_outputs": {"regex": "x" * 10_000}},
    ):
        assert sampling_params(given) == sampling_params(given)
        assert sampling_params(given) is not sampling_params(given)


def test_a_long_stop_string_is_one_text():
    """A list was made of its characters: 240 MB for a string of 30 MB."""
    tracemalloc.start()
    try:
        assert sampling_params({"stop": "s" * 60_000}).stop == ("s" * 60_000,)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_that_are_looked_for_at_every_token(name):
    """A million bad words took 13 s of the processor before the first token."""
    texts = [str(number) for number in range(4097)]
    assert len(getattr(SamplingParams(**{name: texts[1:]}), name)) == 4096
    with pytest.raises(ValueError, match=f"{name} must be at most 4096 texts") as found:
        SamplingParams(**{name: texts})
    assert len(str(found.value)) < 400


def test_bad_words_are_short():
    """One of 30 MB would be encoded as a whole, at 200 times its bytes."""
    assert SamplingParams(bad_words=["x" * 65_536]).bans
    with pytest.raises(ValueError, match="bad_words must be at most 65536 characters together"):
        SamplingParams(bad_words=["x" * 65_536, "y"])


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_more_values_than_any_model_has_tokens(name):
    """A bias of a million tokens took 430 MiB before the engine refused it; a library's call looked at each."""
    ids = range(2**19 + 1)
    given = dict.fromkeys(ids, 1.0) if name == "logit_bias" else list(ids)
    with pytest.raises(ValueError, match=f"{name} must be at most 524288 values, got 524289"):
        SamplingParams(**{name: given})
    del given[0]
    assert len(getattr(SamplingParams(**{name: given}), name)) == 2**19


def test_a_schema_that_holds_itself():
    """It was a RecursionError, which no caller expects of wrong parameters."""
    schema = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(ValueError, match=r"^a schema or list of choices is nested too deeply$"):
        StructuredOutputsParams(json=schema)
