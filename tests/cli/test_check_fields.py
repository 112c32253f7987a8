"""``rosebatch check`` tells what becomes of each field of a batch line, as the page of the documentation says."""

from rosebatch.io.openai.fields import IGNORED, REFUSED, GenerationBody
from tests.helpers.json_lines import write_lines

# A value of each field that is served, other than null.
_SERVED = {
    "add_generation_prompt": True,
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": False,
    "echo": False,
    "frequency_penalty": 0.5,
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "null"},
    "guided_regex": "a",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "json_schema": '{"type": "null"}',
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_new_tokens": 5,
    "max_tokens": 5,
    "min_new_tokens": 1,
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "any",
    "n": 2,
    "no_stop_trim": True,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "Hello"},
    "presence_penalty": 0.5,
    "prompt_logprobs": 1,
    "regex": "a",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "sampling_seed": 5,
    "seed": 5,
    "skip_special_tokens": False,
    "stop": "a",
    "stop_token_ids": [5],
    "structured_outputs": {"regex": "a"},
    "suffix": "",
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [],
    "top_k": 5,
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
}
# Served where the model's template or its reasoning knows them, which this model's do not.
_BY_MODEL = {"reasoning_effort": "low", "verbosity": "low", "max_reasoning_tokens": 5, "thinking_token_budget": 5}


def test_check_tells_what_becomes_of_every_field(cli, model_folder, tmp_path):
    """A file with each field of the API and of other servers: served, ignored or refused as the page says."""
    served = {name: _SERVED[name] for name in sorted(_SERVED)}
    assert served.keys() | _BY_MODEL.keys() == set(GenerationBody.__struct_fields__) - {"messages"}
    names = [*served, *_BY_MODEL, *IGNORED, *REFUSED]
    values = {**dict.fromkeys([*IGNORED, *REFUSED], "x"), **served, **_BY_MODEL}
    bodies = {name: {"messages": [{"role": "user", "content": "Hi"}], name: values[name]} for name in names}
    rows = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in bodies.items()]
    source = write_lines(tmp_path / "in.jsonl", rows)
    lines = cli("check", source, "--model", model_folder, "--dtype", "float32").out.splitlines()
    place = {name: f"line {number}: " for number, name in enumerate(names, start=1)}
    # A chat reads both as tools before this rule holds.
    as_tools = {"functions", "function_call"}
    refused = {
        f"{place[name]}unsupported_field: {name} is not supported: {field.why}"
        for name, field in REFUSED.items()
        if name not in as_tools
    }
    assert refused <= set(lines)
    budgets = [line for line in lines if "max_reasoning_tokens: how this model writes its reasoning is unknown" in line]
    expected = [place[name] for name in ("max_reasoning_tokens", "thinking_token_budget")]
    assert [line.partition(": ")[0] + ": " for line in budgets] == expected
    told = [line for line in lines if line.startswith("line ")]
    assert len(told) == len(refused) + len(budgets) + len(as_tools)
    (ignored,) = [line for line in lines if line.startswith("ignored fields: ")]
    expected = {f"{name} (1)" for name in (*IGNORED, "reasoning_effort", "verbosity")}
    assert sorted(ignored.partition(": ")[2].split(", ")) == sorted(expected)
