"""How a model writes reasoning and tool calls: found from marks in its chat template, or chosen by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.sampling_params import GrammarSpec
from rosebatch.text.reasoning.harmony import Harmony, Tokens
from rosebatch.text.reasoning.parser import ReasoningFormat
from rosebatch.text.reasoning.tags import Tags
from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, ToolCallFormat
from rosebatch.text.tool_calls.gpt_oss import MARKS, GptOss
from rosebatch.text.tool_calls.hermes import Hermes
from rosebatch.text.tool_calls.llama3 import Llama3
from rosebatch.text.tool_calls.mistral import Mistral
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder

if TYPE_CHECKING:
    from rosebatch.text.tokenizer import Tokenizer

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
# The first form counts whose marks are all in the template.
_CALLS_BY_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
)


class ChatText(NamedTuple):
    """The text of an answer, its reasoning told apart.

    Attributes:
        reasoning: None if the model did not think.
        reasoning_tokens: how many tokens that took, the marks around them left out.
        rest: of the text, with the marks of tool calls.
    """

    reasoning: str | None
    reasoning_tokens: int
    rest: str


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """What a model writes. None where that is not told apart.

    Attributes:
        tokenizer: of the model.
        reasoning: thoughts.
        calls: tool calls.
    """

    tokenizer: "Tokenizer"
    reasoning: ReasoningFormat | None = None
    calls: ToolCallFormat | None = None

    @classmethod
    def choose(cls, tokenizer: "Tokenizer", reasoning: str = "auto", calls: str = "auto") -> "ChatParsers":
        """The forms of these names; ``auto`` finds them in the chat template.

        Raises:
            FlagError: the tokenizer lacks a token of the form.
        """
        source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        if calls == "auto":
            calls = next((name for name, marks in _CALLS_BY_MARKS if all(mark in source for mark in marks)), "none")
        return cls(tokenizer, _reasoning(tokenizer, reasoning, source), _calls(tokenizer, calls))

    @property
    def knows_where_calls_begin(self) -> bool:
        """Whether a token of its own begins each call, so that grammars can hold calls beside any text."""
        opening = None if self.calls is None else self.calls.opening
        return opening is not None and self.tokenizer.backend.token_to_id(opening) is not None

    def grammar(self, tools: Sequence[Offered], *, parallel: bool, must_call: bool = True) -> GrammarSpec:
        """What an answer has to match that calls a tool, or that calls one if it wants to.

        Args:
            tools: that may be called.
            parallel: whether several calls may follow each other.
            must_call: if not, text may stand around the calls and in their place; see ``knows_where_calls_begin``.

        Raises:
            RowError: the form of calls is unknown, or a schema is broken.
        """
        if self.calls is None:
            raise unknown_calls()
        around = None if must_call or self.calls.opening is None else lark.text_without(self.calls.opening)
        try:
            objects = [*map(_of_object, tools)]
            source = self.calls.grammar(objects, self._terminal, parallel=parallel, around=around)
            return GrammarSpec("lark", source)
        except (ValueError, RecursionError) as error:
            raise RowError("invalid_grammar", f"the schemas of the tools cannot be used: {error}") from None

    def _terminal(self, mark: str) -> str:
        token_id = self.tokenizer.backend.token_to_id(mark)
        return lark.text(mark) if token_id is None else f"<[{token_id}]>"


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads the answers to one chat.

    Attributes:
        forms: of the model.
        prompt: its tokens.
        tools: whose calls are told apart: the schema of the arguments by name. Empty for none.
        parallel: whether more than the first call counts.
    """

    forms: ChatParsers
    prompt: Sequence[int]
    tools: Mapping[str, Schema] = field(default_factory=dict)
    parallel: bool = True

    def read(self, token_ids: Sequence[int]) -> ChatText:
        """Decode an answer."""
        forms, reasoning, count = self.forms, None, 0
        rest: Sequence[int] = token_ids
        marks: tuple[str, ...] = forms.calls.marks if forms.calls is not None and self.tools else ()
        if forms.reasoning is not None:
            marks += forms.reasoning.marks
            thoughts, rest = forms.reasoning.split(self.prompt, token_ids)
            if thoughts is not None:
                reasoning, count = forms.tokenizer.decode(thoughts).strip() or None, len(thoughts)
        return ChatText(reasoning, count, forms.tokenizer.decode_with_marks(rest, marks))

    def parse(self, rest: str, *, thought: bool) -> Parsed:
        """Content and calls of an answer.

        Args:
            rest: see ``ChatText``.
            thought: whether the model thought before.
        """
        parsed = Parsed(rest, ())
        if self.forms.calls is not None and self.tools:
            parsed = self.forms.calls.parse(rest, self.tools)
        if self.forms.reasoning is not None:
            parsed = Parsed(self.forms.reasoning.answer(parsed.content, thought=thought), parsed.calls)
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
    """The error of a row with tools, if the model's calls cannot be told from its text."""
    return RowError(
        "unsupported_field", "tools: how this model writes tool calls is unknown; give --tool-call-parser NAME"
    )


def _reasoning(tokenizer: "Tokenizer", name: str, source: str) -> ReasoningFormat | None:
    if name == "auto":
        name = next((each for each in ("gpt_oss", *_TAGS) if _is_known(tokenizer, each, source)), "none")
    return None if name == "none" else _reasoning_named(tokenizer, name)


def _is_known(tokenizer: "Tokenizer", name: str, source: str) -> bool:
    """Whether the template has the last mark of the form, and the tokenizer all."""
    mark = "<|channel|>" if name == "gpt_oss" else _TAGS[name][1]
    return mark in source and all(tokenizer.backend.token_to_id(each) is not None for each in _marks(name))


def _marks(name: str) -> tuple[str, ...]:
    return _HARMONY if name == "gpt_oss" else _TAGS[name]


def _reasoning_named(tokenizer: "Tokenizer", name: str) -> ReasoningFormat:
    ids: list[int] = []
    for mark in _marks(name):
        token_id = tokenizer.backend.token_to_id(mark)
        if token_id is None:
            raise FlagError(f"--reasoning-parser {name}: the model's tokenizer has no token {mark}")
        ids.append(token_id)
    if name == "gpt_oss":

        def encode(text: str) -> list[int]:
            token_ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
            return token_ids

        return Harmony(MARKS, Tokens(*ids), encode, tokenizer.decode)
    start, stop = ids
    return Tags(start, stop, lambda token_id: not tokenizer.token_bytes(token_id).strip())


def _calls(tokenizer: "Tokenizer", name: str) -> ToolCallFormat | None:
    made: dict[str, Callable[[], ToolCallFormat]] = {
        "gpt_oss": GptOss,
        "hermes": Hermes,
        "llama3": Llama3,
        "mistral": lambda: Mistral(named=tokenizer.backend.token_to_id("[ARGS]") is not None),
        "qwen3_coder": Qwen3Coder,
    }
    return made[name]() if name in made else None
