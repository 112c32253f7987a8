"""Tool calls as models write them."""

from rosebatch.text.tool_calls.call import ToolCall

TOOLS = {"add": {"properties": {}}, "get_weather": {}}
ADD, WEATHER = ToolCall("add", '{"a": 1, "b": [2, {"c": "}"}]}'), ToolCall("get_weather", '{"city": "Zürich"}')


def written(call, key="arguments"):
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{written(call)}\n</tool_call>" for call in calls)


def coder(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def message(call, header="<|channel|>commentary to=functions.{} <|constrain|>json", end="<|call|>"):
    return f"{header.format(call.name)}<|message|>{call.arguments}{end}"
