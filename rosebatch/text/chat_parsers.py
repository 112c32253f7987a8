"""Parsers of a model's reasoning and tool calls: found by marks in its chat template, or chosen by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.reasoning.harmony import Harmony, Tokens
from rosebatch.text.reasoning.parser import ReasoningFormat, Thinking
from rosebatch.text.reasoning.tags import Tags
from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, ToolCallFormat
from rosebatch.text.tool_calls.gpt_oss import MARKS, GptOss
from rosebatch.text.tool_calls.hermes import Hermes
from rosebatch.text.tool_calls.llama3 import Llama3
from rosebatch.text.tool_calls.mistral import Mistral
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder
from rosebatch.text.vocabulary import Vocabulary

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
# The first parser counts whose marks are all in the template.
_CALLS_BY_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
)
# llguidance numbers the parts of a grammar by 16 bits, and a call has at least eight.
_MAX_TOOLS = 1 << 13


class ChatText(NamedTuple):
    """The text of an answer, with its reasoning split off.

    Attributes:
        reasoning: None if the model did not think.
        reasoning_tokens: how many tokens that took, the marks around them left out.
        rest: of the text, with the marks of tool calls.
        tokens_before: how many tokens come before those of the rest, if the model thought.
        whole: the text with the reasoning; None if nobody needs it.
    """

    reasoning: str | None
    reasoning_tokens: int
    rest: str
    tokens_before: int = 0
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """The parsers of a model; None where the text stays as it is.

    Attributes:
        vocabulary: of the model.
        reasoning: splits off the reasoning.
        calls: parses tool calls.
    """

    vocabulary: Vocabulary
    reasoning: ReasoningFormat | None = None
    calls: ToolCallFormat | None = None

    @classmethod
    def choose(cls, vocabulary: Vocabulary, template: str, reasoning: str, calls: str) -> "ChatParsers":
        """The parsers of these names; ``auto`` finds them by the source of the chat template.

        Raises:
            FlagError: the vocabulary lacks a token that a parser needs.
        """
        if calls == "auto":
            calls = next((name for name, marks in _CALLS_BY_MARKS if all(mark in template for mark in marks)), "none")
        return cls(vocabulary, _reasoning(vocabulary, reasoning, template), _calls(vocabulary, calls))

    @property
    def calls_have_a_token(self) -> bool:
        """Whether a token of its own begins each call, so that grammars can hold calls next to any text."""
        opening = None if self.calls is None else self.calls.opening
        return opening is not None and self.vocabulary.backend.token_to_id(opening) is not None

    def grammar(self, tools: Sequence[Offered], *, parallel: bool, must_call: bool = True) -> GrammarSpec:
        """What an answer has to match that calls a tool, or that calls one if it wants to.

        Args:
            tools: that may be called.
            parallel: whether several calls may follow each other.
            must_call: if not, text may be around the calls and in their place; see ``calls_have_a_token``.

        Raises:
            RowError: the form of calls is unknown, the tools are too many, or a schema is broken.
        """
        if self.calls is None:
            raise unknown_calls()
        if len(tools) > _MAX_TOOLS:
            raise RowError("invalid_grammar", f"a grammar may have {_MAX_TOOLS} tools, and the row has {len(tools)}")
        around = None if must_call or self.calls.opening is None else lark.text_without(self.calls.opening)
        try:
            objects = [*map(_of_object, tools)]
            source = self.calls.grammar(objects, self._terminal, parallel=parallel, around=around)
            return GrammarSpec("lark", source)
        except (ValueError, RecursionError) as error:
            raise RowError("invalid_grammar", f"the schemas of the tools cannot be used: {error}") from None

    def _terminal(self, mark: str) -> str:
        token_id = self.vocabulary.backend.token_to_id(mark)
        return lark.text(mark) if token_id is None else f"<[{token_id}]>"


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads the answers to one chat.

    Attributes:
        parsers: of the model.
        prompt: its tokens.
        tools: whose calls are parsed: the schema of the arguments by name. Empty for none.
        parallel: whether more than the first call counts.
    """

    parsers: ChatParsers
    prompt: Sequence[int]
    tools: Mapping[str, Schema] = field(default_factory=dict)
    parallel: bool = True

    def read(self, token_ids: Sequence[int]) -> ChatText:
        """Decode an answer."""
        parsers, reasoning, count, before = self.parsers, None, 0, 0
        rest: Sequence[int] = token_ids
        marks: tuple[str, ...] = parsers.calls.marks if parsers.calls is not None and self.tools else ()
        if parsers.reasoning is not None:
            marks += parsers.reasoning.marks
            thoughts, rest = parsers.reasoning.split(self.prompt, token_ids)
            if thoughts is not None:
                reasoning, count = parsers.vocabulary.decode(thoughts).strip() or None, len(thoughts)
                before = len(token_ids) - len(rest)
        text = parsers.vocabulary.decode_with_marks(rest, marks)
        # Between thoughts and answer is white space, which is of neither.
        return ChatText(reasoning, count, text.lstrip() if before else text, before)

    def follow(self) -> Thinking | None:
        """Follow an answer's thoughts; None if there can be none."""
        form = self.parsers.reasoning
        return None if form is None or form.has_ended(self.prompt) else form.follow(self.prompt)

    def parse(self, rest: str, *, thought: bool) -> Parsed:
        """Content and calls of an answer.

        Args:
            rest: see ``ChatText``.
            thought: whether the model thought before.
        """
        parsed = Parsed(rest, ())
        if self.parsers.calls is not None and self.tools:
            parsed = self.parsers.calls.parse(rest, self.tools)
        if self.parsers.reasoning is not None:
            parsed = Parsed(self.parsers.reasoning.answer(parsed.content, thought=thought), parsed.calls)
        return parsed if self.parallel else Parsed(parsed.content, parsed.calls[:1])


def _of_object(tool: Offered) -> Offered:
    """The tool with a schema that takes objects only: no form of calls has room for anything else.

    Raises:
        ValueError: it takes no objects.
    """
    if tool.schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.name} must be of type object")
    return Offered(tool.name, {**tool.schema, "type": "object"})


def unknown_calls() -> RowError:
    """The error of a row with tools, if the model's calls cannot be parsed."""
    return RowError(
        "unsupported_field", "tools: how this model writes tool calls is unknown; give --tool-call-parser NAME"
    )


def _reasoning(vocabulary: Vocabulary, name: str, template: str) -> ReasoningFormat | None:
    if name == "auto":
        name = next((each for each in ("gpt_oss", *_TAGS) if _is_known(vocabulary, each, template)), "none")
    return None if name == "none" else _reasoning_named(vocabulary, name)


def _is_known(vocabulary: Vocabulary, name: str, template: str) -> bool:
    """Whether the template has the last mark of the form, and the tokenizer all."""
    mark = "<|channel|>" if name == "gpt_oss" else _TAGS[name][1]
    return mark in template and all(vocabulary.backend.token_to_id(each) is not None for each in _marks(name))


def _marks(name: str) -> tuple[str, ...]:
    return _HARMONY if name == "gpt_oss" else _TAGS[name]


def _reasoning_named(vocabulary: Vocabulary, name: str) -> ReasoningFormat:
    ids: list[int] = []
    for mark in _marks(name):
        token_id = vocabulary.backend.token_to_id(mark)
        if token_id is None:
            raise FlagError(f"--reasoning-parser {name}: the model's tokenizer has no token {mark}")
        ids.append(token_id)
    if name == "gpt_oss":

        def encode(text: str) -> list[int]:
            token_ids: list[int] = vocabulary.backend.encode(text, add_special_tokens=False).ids
            return token_ids

        return Harmony(MARKS, Tokens(*ids), encode, vocabulary.decode)
    start, stop = ids
    return Tags(start, stop, lambda token_id: not vocabulary.token_bytes(token_id).strip())


def _calls(vocabulary: Vocabulary, name: str) -> ToolCallFormat | None:
    made: dict[str, Callable[[], ToolCallFormat]] = {
        "gpt_oss": GptOss,
        "hermes": Hermes,
        "llama3": Llama3,
        "mistral": lambda: Mistral(named=vocabulary.backend.token_to_id("[ARGS]") is not None),
        "qwen3_coder": Qwen3Coder,
    }
    return made[name]() if name in made else None
