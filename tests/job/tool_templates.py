"""Chat templates with tools in the ways of four families, and a tokenizer that has their marks.

The templates are our own. Each uses the features that its family's templates use.
"""

from pathlib import Path
from typing import Any

from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend, save_backend

_HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall one as\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {%- if thinks is defined and thinks %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
_LLAMA3 = """{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + first | trim + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {%- set role = message.role if message.role != 'tool' else 'ipython' %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
{#- "<|python_tag|>" begins a call in code #}"""
_MISTRAL = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + value | tojson }}{{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' }}{{- ', ' if not loop.last }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
_GPT_OSS = """
{%- macro kind(schema) -%}
    {{- {'integer': 'number', 'string': 'string'}.get(schema.type, 'any') }}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') if reasoning_effort is defined }}
{%- if tools or messages[0].role in ('developer', 'system') %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role in ('developer', 'system') %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- 'namespace functions {\\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '// ' + (tool.description or '') + '\\ntype ' + tool.name + ' = (_: {\\n' }}
            {%- for name, schema in ((tool.parameters or {}).properties or {}).items() %}
                {{- name + ': ' + kind(schema) + ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n' }}
        {%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
_QWEN3_CODER = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.' if tools }}
{%- endif %}
{%- if tools %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
        {{- '\\n<description>' ~ tool.description | trim ~ '</description>' }}
        {%- for name, schema in ((tool.parameters or {}).properties or {}) | items %}
            {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
            {{- '\\n<type>' ~ schema.type | string ~ '</type>\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one as\\n<tool_call>\\n<function=name>...' }}
{%- endif %}
{{- '<|im_end|>\\n' if tools or messages[0].role == 'system' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is string and message.content | trim %}{{- '\\n' + message.content | trim }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set is_plain = value is string or value is not sequence %}
                {%- set value = value | string if is_plain and value is not mapping else value | tojson %}
                {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "hermes": _HERMES,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "gpt_oss": _GPT_OSS,
    "qwen3_coder": _QWEN3_CODER,
}
_MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[INST]", "[/INST]"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
)


def chat_backend() -> Any:
    """Bytes, the end token, and every family's marks."""
    backend = byte_backend()
    backend.add_special_tokens(list(_MARKS))
    return backend


def chat_tokenizer(form: str) -> Tokenizer:
    """With the template of a family."""
    return Tokenizer(chat_backend(), TEMPLATES[form], {"bos_token": "<s>", "eos_token": "<eos>"})


def both_tokenizers(folder: Path, backend: Any, template: str) -> tuple[Tokenizer, Any]:
    """rosebatch's and transformers' tokenizer of one folder."""
    import transformers

    config = {"bos_token": "<s>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    save_backend(backend, folder, **config)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as a row writes it."""
    function: dict[str, Any] = {"name": name, "description": f"It does {name}."}
    return {"type": "function", "function": function | ({"parameters": parameters} if parameters is not None else {})}
