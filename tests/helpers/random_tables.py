"""Random tables of rows, with the same rows as JSON: nested, ragged, with nulls at every depth.

A column has one type, so a row's objects have their keys in the order of that type, and no key is there with null: a
null in a struct is a key that the row does not have. Keys of a map are in the row's own order, and its nulls stay.
"""

import random
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

_TEXTS = ["", "a", "null", "é🌹\u2028", '"q", {x}', "\t\r\n\x01", "[1]", "\ufeffb", "x" * 300, "0", "NaN", "\\u0000"]
_NAMES = ["s", "t", "key", "Ключ", "a b", 'q"', "type", "items", "null", "0", "x.y"]
_KINDS_OF_TEXT = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
_DECIMAL = pa.decimal128(12, 1)
_SMALL = [pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float64(), _DECIMAL]
_WHOLE = [pa.int16(), pa.int64(), pa.uint32()]


class Column(NamedTuple):
    """A column: its type, and what makes a value of it. None stands for null."""

    type: pa.DataType
    make: Callable[[random.Random], Any]


class RandomTable(NamedTuple):
    """A table and its rows as JSON.

    Attributes:
        table: of the rows.
        rows: the same as objects. Columns of prompts, and those that are carried, are always there.
        carried: names of the columns that results take over.
    """

    table: pa.Table
    rows: list[dict[str, Any]]
    carried: list[str]


def random_table(seed: int) -> RandomTable:
    """Some rows of requests, most of which can be served."""
    rng = random.Random(seed)
    columns = _columns(rng)
    carried = [f"c{number}" for number in range(rng.randrange(4))]
    columns |= {name: _carried(rng) for name in carried}
    if "id" in columns:
        carried.insert(rng.randrange(len(carried) + 1), "id")
    names = rng.sample(list(columns), len(columns))
    share = rng.choice([0.0, 0.2, 0.6])
    made = [{name: _or_null(rng, share, columns[name].make(rng)) for name in names} for _ in range(rng.randint(1, 8))]
    for row in made:
        _keep_one_prompt(rng, row)
    types = {name: columns[name].type for name in names}
    table = pa.table({name: pa.array([row[name] for row in made], types[name]) for name in names})
    rows = [
        {
            # A decimal that is asked for is a number, one that is carried a text.
            name: row[name] if types[name] == _DECIMAL else _as_json(row[name], types[name])
            for name in names
            if row[name] is not None or name in carried or name in _PROMPTS
        }
        for row in made
    ]
    return RandomTable(table, rows, carried)


def _or_null(rng: random.Random, share: float, value: Any) -> Any:
    return None if rng.random() < share else value


def _keep_one_prompt(rng: random.Random, row: dict[str, Any]) -> None:
    """Most rows have one prompt; a few have none or two, and fail."""
    given = [name for name in _PROMPTS if row.get(name) is not None]
    if given and rng.random() < 0.95:
        kept = rng.choice(given)
        row.update({name: None for name in given if name != kept})
        if kept != "messages":
            row.update(dict.fromkeys(row.keys() & _OF_CHATS))
        elif "echo" in row:
            row["echo"] = None


_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_OF_CHATS = {
    *("chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"),
    *("add_generation_prompt", "continue_final_message"),
}


def _columns(rng: random.Random) -> dict[str, Column]:
    found = {name: column for name, column in _requests(rng).items() if rng.random() < 0.4}
    prompts = {
        "prompt": Column(_kind_of_text(rng), lambda rng: _text(rng) + rng.choice(["", "p"])),
        "messages": _messages(rng),
        "prompt_token_ids": Column(pa.list_(rng.choice(_WHOLE)), lambda rng: _list(rng, lambda: rng.randrange(256))),
    }
    return {name: prompts[name] for name in rng.sample(list(prompts), rng.randint(1, 3))} | found


def _requests(rng: random.Random) -> dict[str, Column]:
    """Columns of all fields that a request may have."""
    form = rng.choice([_response_format, _structured_outputs])(rng)
    stops = rng.random() < 0.5
    return {
        "id": _ids(rng),
        "max_tokens": Column(rng.choice(_SMALL), lambda rng: rng.choice([1, 2, 5, 9])),
        "temperature": Column(rng.choice([pa.float64(), pa.float32(), pa.int8()]), lambda rng: rng.choice([0, 1])),
        "top_k": Column(rng.choice(_SMALL[:3]), lambda rng: rng.choice([-1, 0, 3])),
        "top_p": Column(rng.choice([pa.float64(), pa.float32()]), lambda rng: rng.choice([0.5, 1, 0.25, 1.5])),
        "min_p": Column(pa.float32(), lambda rng: 0.125),
        "seed": Column(pa.uint64(), lambda rng: rng.choice([0, 7, 2**53 + 1, 2**64 - 1])),
        "stop": Column(pa.list_(pa.string()), lambda rng: _list(rng, lambda: rng.choice(["a", "bc", "é"])))
        if stops
        else Column(_kind_of_text(rng), lambda rng: rng.choice("abc")),
        "stop_token_ids": Column(pa.list_(rng.choice(_WHOLE)), lambda rng: _list(rng, lambda: rng.randrange(97, 110))),
        "ignore_eos": _flag(),
        "n": Column(rng.choice(_SMALL), lambda rng: rng.randint(1, 3)),
        "min_tokens": Column(rng.choice(_SMALL), lambda rng: rng.randint(0, 2)),
        "bad_words": Column(pa.list_(pa.string()), lambda rng: _list(rng, lambda: rng.choice(["ab", "é"]))),
        "allowed_token_ids": Column(pa.large_list(pa.int64()), lambda rng: rng.sample(range(97, 123), 5)),
        "skip_special_tokens": _flag(),
        "include_stop_str_in_output": _flag(),
        "presence_penalty": Column(pa.float32(), lambda rng: rng.choice([-1.5, 0.5])),
        "frequency_penalty": Column(pa.float64(), lambda rng: rng.choice([0.1, -2])),
        "repetition_penalty": Column(pa.float64(), lambda rng: rng.choice([1.1, 1])),
        "logit_bias": _bias(rng),
        "logprobs": rng.choice([_flag(), Column(rng.choice(_SMALL), lambda rng: rng.randrange(3))]),
        "prompt_logprobs": Column(rng.choice(_SMALL), lambda rng: rng.randrange(3)),
        form[0]: form[1],
        "truncate_prompt_tokens": Column(rng.choice(_SMALL), lambda rng: rng.randint(1, 40)),
        "echo": _flag(),
        "add_generation_prompt": _flag(),
        "continue_final_message": Column(pa.bool_(), lambda rng: rng.random() < 0.2),
        "chat_template_kwargs": _object(rng, 3),
        "tools": _tools(rng),
        "tool_choice": Column(pa.string(), lambda rng: rng.choice(["auto", "none", "auto", "required"])),
        "parallel_tool_calls": _flag(),
        "sampling_params": _struct({"top_k": Column(pa.int64(), lambda rng: 5), "max_tokens": _integer(rng)}),
    }


def _flag() -> Column:
    return Column(pa.bool_(), lambda rng: rng.random() < 0.5)


def _integer(rng: random.Random) -> Column:
    return Column(rng.choice(_WHOLE), lambda rng: rng.randint(1, 9))


def _kind_of_text(rng: random.Random) -> pa.DataType:
    return pa.string_view() if rng.random() < 0.02 else rng.choice(_KINDS_OF_TEXT)


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(_TEXTS, k=rng.choice([1, 1, 2, 3])))


def _list(rng: random.Random, make: Callable[[], Any], least: int = 0) -> list[Any]:
    return [make() for _ in range(rng.randint(least, 3))]


def _texts(rng: random.Random) -> Column:
    # No dictionary: PyArrow makes files that it finds invalid where all objects with one are null.
    return Column(rng.choice([pa.string(), pa.large_string()]), _text)


def _struct(fields: dict[str, Column], always: frozenset[str] = frozenset(), share: float = 0.3) -> Column:
    """An object that lacks some of its keys."""

    def make(rng: random.Random) -> dict[str, Any]:
        return {n: each.make(rng) if n in always or rng.random() > share else None for n, each in fields.items()}

    return Column(pa.struct([(name, each.type) for name, each in fields.items()]), make)


def _list_of(rng: random.Random, item: Column, least: int = 0, share: float = 0.0) -> Column:
    kind = rng.choice([pa.list_, pa.large_list])
    return Column(kind(item.type), lambda rng: _list(rng, lambda: _or_null(rng, share, item.make(rng)), least))


def _map_of(item: Column, share: float = 0.3) -> Column:
    """An object whose keys differ from row to row, and whose nulls stay."""

    def make(rng: random.Random) -> list[tuple[str, Any]]:
        return [(name, _or_null(rng, share, item.make(rng))) for name in rng.sample(_NAMES, rng.randrange(4))]

    return Column(pa.map_(pa.string(), item.type), make)


def _any(rng: random.Random, depth: int) -> Column:
    """A value of JSON, with a type."""
    simple = [
        _texts(rng),
        _flag(),
        Column(rng.choice([pa.int64(), pa.int8()]), lambda rng: rng.randint(-100, 100)),
        Column(pa.int64(), lambda rng: rng.choice([2**63 - 1, -(2**63), 2**53 + 1])),
        Column(pa.uint64(), lambda rng: 2**64 - 1),
        Column(pa.float64(), lambda rng: rng.choice([0.1, 1e22, -0.0, 5e-324, 4.0])),
        Column(pa.float32(), lambda rng: rng.randint(-8, 8) / 8),
        Column(pa.null(), lambda rng: None),
    ]
    if not depth or rng.random() < 0.4:
        return rng.choice(simple)
    if rng.random() < 0.4:
        return _list_of(rng, _any(rng, depth - 1), share=0.2)
    return _object(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Column:
    if rng.random() < 0.25:
        return _map_of(_any(rng, depth))
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return _struct({name: _any(rng, depth) for name in names})


def _carried(rng: random.Random) -> Column:
    """Any type, also those that JSON lacks: results have texts for them."""
    typed = [
        Column(pa.date32(), lambda rng: date(rng.randint(1, 9999), 2, 28)),
        Column(pa.timestamp("us"), lambda rng: datetime(2024, 2, 29, 1, 2, 3, rng.choice([0, 5]))),
        Column(pa.timestamp("ms", "UTC"), lambda rng: datetime(1969, 1, 1, tzinfo=UTC)),
        Column(pa.time64("us"), lambda rng: time(1, 2, 3)),
        Column(pa.duration("ms"), lambda rng: timedelta(days=1, milliseconds=rng.randrange(2000))),
        Column(pa.decimal128(20, 3), lambda rng: Decimal(rng.randrange(10**9)) / 1000),
        Column(pa.binary(), lambda rng: rng.randbytes(rng.randrange(4))),
    ]
    column = rng.choice(typed) if rng.random() < 0.3 else _any(rng, 4)
    return _list_of(rng, column, share=0.3) if rng.random() < 0.2 else column


def _ids(rng: random.Random) -> Column:
    kinds = [
        Column(_kind_of_text(rng), lambda rng: _text(rng) + str(rng.randrange(20))),
        Column(rng.choice([pa.int64(), pa.int32(), pa.uint64()]), lambda rng: rng.randrange(30)),
        Column(pa.uint64(), lambda rng: 2**64 - 1 - rng.randrange(9)),
        Column(pa.decimal128(9, 2), lambda rng: Decimal(rng.randrange(900)) / 100),
        Column(pa.date32(), lambda rng: date(2024, 1, rng.randint(1, 31))),
        Column(pa.timestamp("us"), lambda rng: datetime(2024, 1, rng.randint(1, 31), 1)),
        Column(pa.time64("us"), lambda rng: time(rng.randrange(24))),
        Column(pa.uuid(), lambda rng: uuid.UUID(int=rng.getrandbits(128)).bytes),
        Column(pa.binary(), lambda rng: rng.randbytes(3)),
    ]
    return rng.choice(kinds)


def _bias(rng: random.Random) -> Column:
    def number(rng: random.Random) -> float:
        return rng.choice([-1.5, 0, 100])

    if rng.random() < 0.5:
        key = rng.choice([pa.int32(), pa.string()])

        def pairs(rng: random.Random) -> list[tuple[Any, float]]:
            ids = rng.sample(range(97, 123), rng.randrange(3))
            return [(each if key == pa.int32() else str(each), number(rng)) for each in ids]

        return Column(pa.map_(key, pa.float32()), pairs)
    return _struct({str(each): Column(pa.float64(), number) for each in rng.sample(range(97, 123), 3)})


def _messages(rng: random.Random) -> Column:
    content = rng.choice(
        [
            _texts(rng),
            _list_of(rng, _struct({"type": Column(pa.string(), lambda rng: "text"), "text": _texts(rng)}, _PART), 1),
        ]
    )
    arguments = rng.choice([_object(rng, 3), Column(pa.string(), lambda rng: rng.choice(['{"a": [1, null]}', "{}"]))])
    function = _struct({"name": Column(pa.string(), lambda rng: rng.choice("fg")), "arguments": arguments}, _CALLED)
    call = _struct(
        {"id": _texts(rng), "type": Column(pa.string(), lambda rng: "function"), "function": function}, _CALL
    )
    fields = {
        "role": Column(_kind_of_text(rng), lambda rng: rng.choice(["user", "user", "assistant", "system"])),
        "content": content,
        "name": _texts(rng),
        "extra": _any(rng, 3),
        "tool_calls": _list_of(rng, call),
        "tool_call_id": _texts(rng),
    }
    names = ["role", "content", *rng.sample(list(fields)[2:], rng.randrange(5))]
    rng.shuffle(names)
    plain = _struct({name: fields[name] for name in names}, frozenset({"role"}))

    def message(rng: random.Random) -> dict[str, Any]:
        made: dict[str, Any] = plain.make(rng)
        if made["role"] != "assistant":
            made |= {"tool_calls": None} if "tool_calls" in made else {}
            made["content"] = content.make(rng)
        return made

    return _list_of(rng, Column(plain.type, message), 1)


_PART, _CALLED, _CALL = frozenset({"type", "text"}), frozenset({"name", "arguments"}), frozenset({"type", "function"})


def _schema(rng: random.Random) -> Column:
    """A schema of an object, whose properties differ from row to row."""
    kinds = ["string", "integer", "boolean", "number"]
    one = _struct(
        {
            "type": Column(pa.string(), lambda rng: rng.choice(kinds)),
            "description": _texts(rng),
            "maxLength": _integer(rng),
            "enum": Column(pa.list_(pa.string()), lambda rng: ["a", 'b"']),
        },
        frozenset({"type"}),
        0.7,
    )
    names = rng.sample(_NAMES, 3)
    properties = rng.choice([_map_of(one, 0.0), _struct(dict.fromkeys(names, one))])
    fields = {
        "type": Column(pa.string(), lambda rng: "object"),
        "properties": properties,
        "required": Column(pa.list_(pa.string()), lambda rng: []),
        "additionalProperties": Column(pa.bool_(), lambda rng: False),
        "title": _texts(rng),
    }
    return _struct(fields, frozenset({"type", "properties"}))


def _tools(rng: random.Random) -> Column:
    function = _struct(
        {
            "name": Column(_kind_of_text(rng), lambda rng: rng.choice(["f", "g", "h_1"])),
            "description": _texts(rng),
            "parameters": _schema(rng),
            "strict": _flag(),
        },
        frozenset({"name"}),
    )
    kind = Column(pa.string(), lambda rng: "function")
    return _list_of(rng, _struct({"type": kind, "function": function}, frozenset({"type", "function"})))


def _response_format(rng: random.Random) -> tuple[str, Column]:
    wrapped = _struct({"name": _texts(rng), "schema": _schema(rng), "strict": _flag()}, frozenset({"schema"}))
    plain = _struct({"type": Column(pa.string(), lambda rng: ""), "json_schema": wrapped}, frozenset({"type"}))

    def make(rng: random.Random) -> dict[str, Any]:
        made: dict[str, Any] = plain.make(rng)
        return made | {"type": "text" if made["json_schema"] is None else "json_schema"}

    return "response_format", Column(plain.type, make)


def _structured_outputs(rng: random.Random) -> tuple[str, Column]:
    kinds = {
        "json": rng.choice([_schema(rng), Column(pa.string(), lambda rng: '{"type": "integer"}')]),
        "regex": Column(pa.string(), lambda rng: rng.choice(["[ab]{1,3}", "é+", "("])),
        "choice": Column(pa.list_(pa.string()), lambda rng: ["yes", "né"]),
        "json_object": Column(pa.bool_(), lambda rng: True),
    }

    def make(rng: random.Random) -> dict[str, Any]:
        chosen = rng.choice(list(kinds))
        return {name: each.make(rng) if name == chosen else None for name, each in kinds.items()}

    return "structured_outputs", Column(pa.struct([(name, each.type) for name, each in kinds.items()]), make)


def _as_json(value: Any, kind: pa.DataType) -> Any:
    """The value that JSON has in place of one of a column."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {f.name: _as_json(value[f.name], f.type) for f in kind if value[f.name] is not None}
    if pa.types.is_map(kind):
        return {str(key): _as_json(each, kind.item_type) for key, each in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_as_json(each, kind.value_type) for each in value]
    if pa.types.is_floating(kind):
        return float(value)
    if kind == pa.uuid():
        return str(uuid.UUID(bytes=value))
    if pa.types.is_decimal(kind):
        value = pa.scalar(value, kind).as_py()
    return msgspec.to_builtins(value, enc_hook=str)
