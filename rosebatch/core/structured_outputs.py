"""What an answer has to match: the grammar, and how rows and vLLM's users write it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from rosebatch.core.not_served import not_served
from rosebatch.core.words import quoted

_Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a completion has to match, as the user wrote it.

    Attributes:
        kind: of grammar.
        source: a JSON schema as JSON, a regular expression, the choices as a JSON list, or a grammar in llguidance's
            dialect of Lark; empty for ``json_object``.
    """

    kind: _Kind
    source: str = ""


_GRAMMARS = "json, regex, choice, grammar, json_object"
_NOT_SERVED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What a completion has to match. Names and meanings as in vLLM; exactly one of the first five is given.

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression.
        choice: texts, one of which is the answer.
        grammar: in llguidance's dialect of Lark.
        json_object: True for any JSON object.
        backend: has no effect.

    Raises:
        ValueError: none or several are given, or one that is not served.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From its fields.

        Raises:
            ValueError: it has another one, or see above.
        """
        if unknown := [name for name in given if name not in cls.__dataclass_fields__]:
            raise ValueError(f"structured_outputs has no {unknown[0]}: give one of {_GRAMMARS}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name in _NOT_SERVED:
            if value := getattr(self, name):
                raise not_served(name, value)
        for name in ("regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"{name} must be a text, got {quoted(value)}")
        if not isinstance(self.choice, list | tuple | None) or not all(
            isinstance(each, str) for each in self.choice or ()
        ):
            raise ValueError(f"choice must be a list of texts, got {quoted(self.choice)}")
        if (count := len(list(grammars_of(self)))) != 1:
            raise ValueError(f"give one of {_GRAMMARS}; got {count or 'none'}")


# Its name before vLLM 0.12.
GuidedDecodingParams = StructuredOutputsParams


def grammars_of(given: Any) -> Iterator[GrammarSpec]:
    """Each grammar that an object gives by these names."""
    if given.json is not None:
        yield GrammarSpec("json_schema", given.json if isinstance(given.json, str) else as_json(given.json))
    if given.regex is not None:
        yield GrammarSpec("regex", given.regex)
    if given.choice is not None:
        yield GrammarSpec("choice", as_json(given.choice))
    if given.grammar is not None:
        yield GrammarSpec("lark", given.grammar)
    if given.json_object:
        yield GrammarSpec("json_object")


def as_json(value: Any) -> str:
    """JSON text, without spaces.

    Raises:
        ValueError: the value holds itself, or is nested as deeply.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise ValueError("a schema or list of choices is nested too deeply") from None
