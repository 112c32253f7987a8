"""Chat templates in the ways of the families: rendered as transformers renders them, from the same folder.

The templates are our own. Each uses the features that its family's templates use.
"""

import pytest

from rosebatch.core.errors import RowError
from rosebatch.text.chat_template import ChatTemplate
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.tool_templates import both_tokenizers

SYSTEM = {"role": "system", "content": "Be <b>brief</b>."}
USER = {"role": "user", "content": "  2 + 2? \n"}
ANSWER = {"role": "assistant", "content": "4 é"}
MORE = {"role": "user", "content": "Sure?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<é>"}}}],
}
RESULT = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
_ROLES_ALTERNATE = """
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception("roles must alternate") }}
{%- endif -%}"""
TEMPLATES = {
    # The system message joins the first user's; contents may be lists of parts.
    "gemma": """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set before = messages[0].content + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set before = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}"""
    + _ROLES_ALTERNATE
    + """
{{ '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + (before if loop.first else '') }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- elif message.content is iterable -%}
        {%- for part in message.content -%}{{ part.text | trim }}{%- endfor -%}
    {%- endif -%}
{{ '</turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}""",
    # Tools within the system message, as JSON.
    "phi": """{% for message in messages %}
{% if message['role'] == 'system' and tools %}{{ '<|system|>' + message['content'] + '<|tool|>' + tools | tojson }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
    # A namespace that a loop writes to, and a call's arguments.
    "olmo": """{% set state = namespace(has_system=false, calls=0) %}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- set state.has_system = true -%}{%- endif -%}
{%- endfor -%}
{%- if not state.has_system -%}{{ '<|system|>You are helpful.\n' }}{%- endif -%}
{%- for message in messages -%}
    {{ '<|' ~ message.role ~ '|>' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] -%}
        {%- set state.calls = state.calls + 1 -%}
        {{ state.calls ~ ':' ~ call.function.name ~ '(' }}
        {%- for key, value in call.function.arguments.items() -%}
            {{ key ~ '=' ~ value | tojson ~ ('' if loop.last else ', ') }}
        {%- endfor -%}{{ ')' }}
    {%- endfor -%}
    {{ eos_token if message.role == 'assistant' and not loop.last else '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    # A date, and a default message of the system that names it.
    "granite": """{%- set system = 'Today is in ' + strftime_now('%Y') + '.' -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{%- endif -%}
{{ '<role>system</role>' + system }}
{%- if tools %}{{ '<role>tools</role>' + tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}
{{ '<role>' + message['role'] + '</role>' + message['content'] }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\n<role>assistant</role>' }}{% endif %}""",
    # A switch that a row may set, macros, and the marks of what was generated.
    "smollm": """{%- macro turn(role, text) -%}{{ '<|start|>' + role + '\n' + text + '<|end|>\n' }}{%- endmacro -%}
{%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' -%}{{ turn('system', messages[0].content ~ ' ' ~ mode) }}
{%- else -%}{{ turn('system', mode) }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{ turn('assistant', message.content) }}{%- endgeneration -%}
    {%- else -%}{{ turn(message.role, message.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' }}{%- endif -%}""",
    # A loop that ends early and one that skips.
    "glm": """[gMASK]<sop>
{%- for message in messages %}
    {%- if message.role == 'system' and loop.index0 > 0 %}{% break %}{% endif %}
    {%- if message.content is none %}{% continue %}{% endif %}
{{ '<|' + {'tool': 'observation'}.get(message.role, message.role) + '|>\n' + message.content | string }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    # Blocks whose white space is cut, and a dictionary of names.
    "cohere": """{{ bos_token }}
{%- set names = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM', 'tool': 'SYSTEM'} -%}
{%- for message in messages -%}
    {{ '<|' ~ names[message.role] ~ '|>' ~ message.content.strip() ~ '<|END|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|CHATBOT|>' }}{%- endif -%}""",
    "stablelm": """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    # An instruction and a response, with nothing but the last system message before them.
    "starcoder": """{{ bos_token }}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}
{%- if system %}{{ system | last ~ '\n\n' }}{% endif -%}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
{{ '### ' ~ ('Instruction' if message.role == 'user' else 'Response') ~ '\n' }}
{{- message.content | replace('\r', '') ~ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### Response\n' }}{% endif %}""",
}
CHATS = ([USER], [SYSTEM, USER], [USER, ANSWER, MORE], [SYSTEM, USER, ANSWER, MORE])


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory):
    """rosebatch's and transformers' tokenizer of a family."""
    return both_tokenizers(tmp_path_factory.mktemp(request.param), byte_backend(), TEMPLATES[request.param])


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}])
def test_chats(both, options):
    """White space, merged system messages and the generation prompt decide what the model sees."""
    ours, theirs = both
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": True, **options})
        assert ours.chat_template(tools=False).render(chat, options) == expected


def test_tools_and_calls(both):
    """JSON within a template: HTML's characters and other letters stay as they are."""
    ours, theirs = both
    chat = [SYSTEM, USER, CALL, RESULT]
    for messages, options in ((chat[:2], {"tools": TOOLS}), (chat, {})):
        rendered = ours.chat_template(tools=False).render(messages, options)
        # A template without a place for calls is refused, see test_chat_template.
        if not isinstance(rendered, RowError):
            more = {"add_generation_prompt": True, **options}
            assert rendered == theirs.apply_chat_template(messages, tokenize=False, **more)
        else:
            assert "leaves out" in rendered.message or "alternate" in rendered.message or "no role" in rendered.message


def test_the_templates_own_refusal_is_the_rows_error():
    """Gemma's templates refuse roles that do not alternate."""
    error = ChatTemplate(TEMPLATES["gemma"], {"bos_token": "<s>"}).render([USER, MORE], {})
    assert isinstance(error, RowError)
    assert "roles must alternate" in error.message
