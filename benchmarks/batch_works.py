"""Bodies of OpenAI batch files that stand for what people run. The texts are words that are a token each."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from rosebatch.bench.scenario import load_scenarios

Body = dict[str, Any]

_LABELS = ("positive", "negative", "neutral", "mixed", "unclear")


class Texts:
    """Random texts.

    Args:
        vocabulary: tokens of a byte-level or SentencePiece tokenizer. Of these, lower-case words with a space in front
            are used.
        seed: of the choice.
    """

    def __init__(self, vocabulary: list[str], seed: int = 0) -> None:
        words = {token[1:] for token in vocabulary if token.startswith(("\u0120", "\u2581"))}
        self.words = sorted(word for word in words if word.isascii() and word.isalpha() and word.islower())
        self.numbers = random.Random(seed)

    def of(self, tokens: int) -> str:
        """A text with so many tokens, or a few more: its first word has no space in front."""
        return " ".join(self.numbers.choices(self.words, k=tokens))


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of batch file.

    Attributes:
        about: one line for people.
        rows: how many it has at scale 1.
        bodies: makes requests without end.
        is_valid: whether a body has this text of so many tokens for an answer.
    """

    about: str
    rows: int
    bodies: Callable[[Texts], Iterator[Body]]
    is_valid: Callable[[Body, str, int], bool]

    def make(self, texts: Texts, scale: float) -> list[Body]:
        """The bodies of a file, at least one."""
        return list(islice(self.bodies(texts), max(1, round(self.rows * scale))))


def _ask(user: str, *, system: str | None = None, **settings: Any) -> Body:
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": user}], "temperature": 0, **settings}


def _labels(texts: Texts, **settings: Any) -> Iterator[Body]:
    instruction = texts.of(1200)
    while True:
        yield _ask(texts.of(texts.numbers.randint(60, 160)), system=instruction, **settings)


def _chats(texts: Texts) -> Iterator[Body]:
    (chosen,) = load_scenarios(["chat"])
    lengths = [value for value in (chosen.scenario.input_len, chosen.scenario.output_len) if isinstance(value, tuple)]
    for tokens, answer in zip(*map(cycle, lengths), strict=True):
        yield _ask(texts.of(tokens), max_tokens=answer, ignore_eos=True, temperature=0.7)


def _documents(texts: Texts) -> Iterator[Body]:
    while True:
        length, answer = texts.numbers.randint(500, 7000), texts.numbers.randint(20, 40)
        yield _ask(texts.of(length), max_tokens=answer, ignore_eos=True)


def _forms(texts: Texts, *, own: bool) -> Iterator[Body]:
    """Answers with a form: the same for all, or each with names of its own."""
    names = texts.numbers.sample(texts.words, 5)
    while True:
        names = texts.numbers.sample(texts.words, 5) if own else names
        asked = {"name": "answer", "strict": True, "schema": _schema(names)}
        yield _ask(
            texts.of(texts.numbers.randint(60, 160)),
            max_tokens=256,
            response_format={"type": "json_schema", "json_schema": asked},
        )


def _schema(names: list[str]) -> dict[str, Any]:
    """Bounded: random weights never want to end."""
    label = {"type": "string", "enum": list(_LABELS)}
    kinds = (
        {"type": "string", "maxLength": 40},
        label,
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "boolean"},
        {"type": "array", "items": label, "minItems": 1, "maxItems": 3},
    )
    properties = dict(zip(names, kinds, strict=True))
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _has_length(body: Body, text: str, tokens: int) -> bool:
    return bool(tokens == body["max_tokens"])


def _is_choice(body: Body, text: str, tokens: int) -> bool:
    choices: list[str] = body["structured_outputs"]["choice"]
    return text in choices


def _has_form(body: Body, text: str, tokens: int) -> bool:
    names: list[str] = body["response_format"]["json_schema"]["schema"]["required"]
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    if not isinstance(answer, dict) or answer.keys() != set(names):
        return False
    words, label, count, flag, labels = (answer[name] for name in names)
    return (
        (isinstance(words, str) and len(words) <= 40)
        and label in _LABELS
        and (type(count) is int and 0 <= count <= 9999)
        and isinstance(flag, bool)
        and (isinstance(labels, list) and 1 <= len(labels) <= 3 and all(each in _LABELS for each in labels))
    )


def _short_labels(texts: Texts) -> Iterator[Body]:
    return _labels(texts, max_tokens=3, ignore_eos=True)


def _choices(texts: Texts) -> Iterator[Body]:
    return _labels(texts, max_tokens=16, structured_outputs={"choice": list(_LABELS)})


def _one_schema(texts: Texts) -> Iterator[Body]:
    return _forms(texts, own=False)


def _own_schemas(texts: Texts) -> Iterator[Body]:
    return _forms(texts, own=True)


WORKS = {
    "labels": Work("1,200 tokens of instruction, 60 to 160 of its own, 3 out", 4000, _short_labels, _has_length),
    "choices": Work("the same, one of five answers", 4000, _choices, _is_choice),
    "chats": Work("lengths of the scenario chat, sampled", 2000, _chats, _has_length),
    "documents": Work("500 to 7,000 tokens, 20 to 40 out", 300, _documents, _has_length),
    "schema": Work("60 to 160 tokens, one JSON schema for all", 1000, _one_schema, _has_form),
    "schemas": Work("the same, each row with a schema of its own", 1000, _own_schemas, _has_form),
}
