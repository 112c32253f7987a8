"""Lines of input files with values at and past every limit, in every place."""

import json
import random
from functools import cache

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
PLAIN = [
    {"prompt": "hello", "max_tokens": 2, "stop": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    {"messages": CHAT, "max_tokens": 1, "seed": 3, "extra": {"deep": [1, {"a": None}]}},
    {"prompt_token_ids": [1, 2, 3], "max_tokens": 1, "ignore_eos": True, "stop_token_ids": [4]},
    {"prompt": "hello", "max_tokens": 3, "n": 2, "min_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
    {"prompt": "hello", "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 2, "logit_bias": {"5": 1}},
    {"prompt": "hello", "max_tokens": 9, "n": 2, "structured_outputs": {"regex": "[0-9](a|b)", "choice": None}},
    {"messages": CHAT, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "structured_outputs": {"choice": ["yes"]}},
]
SCHEMA = {"name": "any", "schema": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}}
BATCH = [
    {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, "max_tokens": 2}},
    {"url": "/v1/completions", "body": {"prompt": ["hello"], "max_tokens": 1, "stop": "x"}},
    {"body": {"prompt": ["hello", [1, 2]], "n": 2, "max_tokens": 1, "logprobs": 2, "echo": True, "suffix": None}},
    {"body": {"messages": CHAT, "max_tokens": 9, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}},
    {"body": {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "max_tokens": 2}},
]

# Renders all that a chat can say, through filters that break on odd values.
CHATTY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m.extra | tojson if m.extra }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ 10 // divisor if divisor is defined }}{{ times + 1 if times is defined }}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [
    {"role": "developer", "content": "brief"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "extra": {"a": 1}},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]
AT_LIMITS = [
    *PLAIN[:-2],
    {"prompt": "hello", "suffix": None, "truncate_prompt_tokens": 3, "seed": 7, "min_p": 0.1, "temperature": 1},
    {"messages": TOOLS, "chat_template_kwargs": {"divisor": 2, "times": 1, "a": [1]}, "add_generation_prompt": True},
    {"messages": CHAT, "continue_final_message": True, "logprobs": True, "top_logprobs": 2, "carried": {"a": [1.5]}},
]
EDGES = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400]
NUMBERS = ["0", "NaN", "Infinity", "-Infinity", "1e308", "1e309", "5e-324", "-0.0"]
NUMBERS += [f"{sign}{number}" for number in EDGES for sign in ("", "-")]
SHORT = ["null", "true", "false", '""', '" "', '"\\u0000"', '"\\ud800"', '"{}"']
SHORT += ["[]", "{}", "[null]", '[""]', '{"a": 1}', '["x", 1]']
DEEP = [f"{'[' * depth}1{']' * depth}" for depth in (15, 490, 590, 990, 10_000)]
DEEP += ['{"a":' * depth + "1" + "}" * depth for depth in (15, 490, 590, 990, 10_000)]
# Parsing this schema alone takes minutes and many GiB: llguidance looks for a text that all patterns match.
PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(23)]}
# Tokens of a sequence.
LIMIT = 40
# Grammars have limits of their own.
GRAMMARS = ("response_format", "structured_outputs")


@cache
def long_values():
    """Ten megabytes of each kind."""
    return [f'"{character * 10_000_000}"' for character in (" ", "x", "(", "é")] + [f"[{'1,' * 5_000_000}1]"]


def places(value, path=()):
    """The paths to all values inside of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def replaced(value, path, text):
    """The JSON of a value with another one, given as JSON, in one place."""
    if path == ():
        return text
    if path is None or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {replaced(v, path[1:] if k == path[0] else None, text)}" for k, v in value.items()]
        return "{" + ", ".join(parts) + "}"
    return "[" + ", ".join(replaced(v, path[1:] if i == path[0] else None, text) for i, v in enumerate(value)) + "]"


def at_limits(good, values, rng, limit):
    """Lines that each have one value at or past a limit, somewhere."""
    cases = [(line, path, text) for line in good for path in places(line) for text in values]
    return [replaced(*case) for case in rng.sample(cases, min(limit, len(cases)))]


def limit_lines(kind, values, limit):
    """Lines with these values, of one kind of file."""
    rng = random.Random(kind)
    if kind == "jsonl":
        return at_limits(AT_LIMITS, values, rng, limit)
    good = []
    for number, line in enumerate(BATCH):
        body = {name: value for name, value in line["body"].items() if name not in GRAMMARS}
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        good.append({"custom_id": f"any {number}", "url": url, "body": body})
    return at_limits(good, values, rng, limit)


# What the job foresees. Anything else is a fault of ours that only the last net caught.
FORESEEN = {
    *("invalid_json", "invalid_line", "missing_prompt", "empty_prompt", "invalid_prompt", "prompt_too_long"),
    *("invalid_token_id", "invalid_field", "invalid_sampling", "invalid_messages", "duplicate_id", "unsupported_field"),
    *("unknown_field", "unsupported_url"),
}
