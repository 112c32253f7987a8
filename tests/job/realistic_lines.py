"""Lines of batch files as people write them: 100 to be served, 20 that no server could."""

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "Name a color."}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# What the official client's ``model_dump()`` leaves in a request.
NULLS = dict.fromkeys(
    [
        *("audio", "logit_bias", "metadata", "n", "prediction", "response_format", "seed", "service_tier", "stop"),
        *("stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user"),
        "web_search_options",
    ]
)


def _named(schema):
    return {"name": "answer", "description": None, "strict": True, "schema": schema}


_CHATS = [
    {},
    NULLS,
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1, "top_p": 1, "n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0},
    {"max_tokens": 5.0},
    {"max_completion_tokens": 3},
    {"max_tokens": None, "max_completion_tokens": 3},
    {"n": 2},
    {"n": 2, "best_of": 2},
    {"stop": ["a", "b"]},
    {"stop": []},
    {"seed": -5},
    {"seed": 5.0},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": False, "top_logprobs": 0},
    {"logit_bias": {"97": 5, "98": -100}},
    {"logit_bias": {}},
    {"user": "me", "metadata": {"run": "7"}, "store": True, "service_tier": "flex"},
    {"safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"stream": False, "stream_options": None},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": _named(SCHEMA)}},
    {"modalities": ["text"]},
    {"reasoning_effort": "low"},
    {"verbosity": "low"},
    {"parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none"},
    {"functions": [], "function_call": "none"},
    {"top_k": -1, "min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"ignore_eos": True},
    {"min_tokens": 2},
    {"stop_token_ids": [97]},
    {"skip_special_tokens": False},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"include_stop_str_in_output": True, "stop": "a"},
    {"bad_words": ["color"]},
    {"allowed_token_ids": [97, 98]},
    {"truncate_prompt_tokens": 4},
    {"prompt_logprobs": 1},
    {"guided_choice": ["red", "green"]},
    {"guided_regex": "[a-z]{3}"},
    {"guided_json": SCHEMA},
    {"guided_grammar": 'start: "a" | "b"'},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"json": SCHEMA}, "guided_decoding_backend": "auto"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"continue_final_message": False},
    {"priority": 3, "request_id": "r", "cache_salt": "s"},
    {"use_beam_search": False, "length_penalty": 1.0, "echo": False},
    {"return_token_ids": False, "return_tokens_as_token_ids": False, "include_reasoning": True},
]
_MESSAGES = [
    [SYSTEM, USER],
    [{"role": "developer", "content": "Be terse."}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "a color."}]}],
    [USER, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "Another."}],
    [USER, {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}, USER],
    [{"role": "user", "content": "Ünïcödé 🌹", "name": None}],
]
_TEXTS = [
    {},
    NULLS | {"echo": None, "suffix": None, "best_of": None, "logprobs": None},
    {"prompt": ["One", "Two"]},
    {"prompt": [72, 105]},
    {"prompt": [[72], [105]]},
    {"prompt": "x" * 200},
    {"temperature": 0},
    {"max_tokens": 1},
    {"max_tokens": 4.0, "n": 1.0},
    {"n": 3},
    {"best_of": 1},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 2, "max_tokens": 0},
    {"echo": True, "logprobs": 2, "prompt": [72, 105]},
    {"logprobs": 0},
    {"logprobs": 5},
    {"stop": ["\n"]},
    {"stop": "a", "include_stop_str_in_output": True},
    {"logit_bias": {"97": 1.5}},
    {"seed": 1, "temperature": 1.5},
    {"suffix": ""},
    {"user": "me"},
    {"stream": False},
    {"presence_penalty": 1, "frequency_penalty": 1},
    {"regex": "[ab]+"},
    {"json_schema": '{"type": "null"}'},
    {"max_new_tokens": 3, "sampling_seed": 4, "min_new_tokens": 1},
    {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2},
]
_RESPONSES = [
    {},
    {"input": [USER]},
    {"instructions": "Be terse.", "max_output_tokens": 4.0},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": None}},
    {"top_logprobs": 1, "include": None, "store": False, "truncation": "disabled", "previous_response_id": None},
]
_URLS = [CHAT, "/chat/completions", "https://api.openai.com/v1/chat/completions", f"{CHAT}/", None]


def _line(number, url, body):
    prompt = {TEXT: {"prompt": "Hello"}, RESPONSE: {"input": "Hello"}}.get(url, {"messages": [USER]})
    body = {"model": "some-model", **prompt, **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


def good_lines():
    """100 lines; their answers are at most 8 tokens, unless a line says otherwise."""
    bodies = [(CHAT, body) for body in _CHATS] + [(CHAT, {"messages": each}) for each in _MESSAGES]
    bodies += [(TEXT, body) for body in _TEXTS] + [(url, {}) for url in _URLS]
    bodies += [(RESPONSE, body) for body in _RESPONSES]
    return [_line(number, url, body) for number, (url, body) in enumerate(bodies)]


def bad_lines():
    """20 lines; each is a mistake of whoever wrote it, or asks for what a text model has not."""
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    chats = [
        {"messages": []},
        {"messages": "Hello"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [image]}]},
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 2},
        {"n": 0},
        {"max_tokens": 1.5},
        {"stream": True},
        {"audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
        {"logprobs": True, "top_logprobs": 99},
        {"temprature": 0.5},
    ]
    lines = [_line(f"bad-{number}", CHAT, body) for number, body in enumerate(chats)]
    lines.append(_line("bad-prompt", TEXT, {"prompt": {"text": "Hello"}}))
    lines.append(_line("bad-best", TEXT, {"best_of": 5}))
    lines.append({**_line("bad-url", CHAT, {}), "url": "/v1/images/generations"})
    lines.append({**_line("bad-method", CHAT, {}), "method": "GET"})
    return lines
