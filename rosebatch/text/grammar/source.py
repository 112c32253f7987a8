"""From what a user wrote to a compiled grammar of llguidance. It imports little: another process uses it."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rosebatch.core.errors import is_failure
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.grammar.json_schema import kept_schema

# Imported in the functions: it takes 50 ms, and most runs have no grammar.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Lexer states that llguidance may discover in one grammar; some hundred bytes each.
MAX_STATES = 250_000
# Characters of a grammar's text. llguidance takes up to 400 bytes for each, and most for a regex.
_MAX_REGEX, _MAX_TEXT = 1 << 19, 1 << 22
# llguidance refuses many more, but takes a gigabyte to find that.
_MAX_CHOICES = 100_000
_MAX_CHARACTERS = 300

_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regex",
    "choice": "list of choices",
    "lark": "grammar",
}

# One line, with at most one space after a comma or colon, as json.dumps and most models write it. The library's default
# allows any white space, so a weak model may write white space until max_tokens. Pretty-printed JSON would need that.
_JSON_FORMAT = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
# Escapes that strings may have: with \u, a further key could be one of the named ones in another spelling.
_ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\(u00|x)[017][0-9a-f]|\x7f", re.IGNORECASE)

_LONGEST_REMEMBERED = 16_384

# What stands for a space in tokens of sentencepiece, as a character or escaped. Encoding takes one for the other.
_WRITTEN_SPACE = re.compile(r"\u2581|[ux]\{?2581")

# Texts whose tokens are allowed together where all of them may follow; else each is looked at. Those of llguidance have
# at most 10, 30 or any number of characters. With more sizes, masks of strings that are nearly full take less time.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (8, 10, 12, 16, 20, 30)), f"{_PLAIN}+"]

# Where a schema begins in a Lark grammar.
_SCHEMA = re.compile(r"%json\s*(?=\{)")

# Options that a schema may set in "x-guidance": they relax keywords that llguidance would refuse.
_JSON_LENIENCIES = ("coerce_one_of", "lenient")


def serialize(spec: GrammarSpec) -> str:
    """A grammar in llguidance's format.

    Raises:
        ValueError: the grammar is broken. Not every broken grammar is found here.
        RecursionError: the JSON has too many levels.
    """
    serialized = _serialized(spec)
    return without_forcing(serialized) if _WRITTEN_SPACE.search(serialized) else serialized


def _serialized(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    if len(spec.source) > (limit := _MAX_REGEX if spec.kind == "regex" else _MAX_TEXT):
        raise ValueError(f"it has {len(spec.source)} characters, more than {limit}")
    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(formatted_schema(json.loads(spec.source)))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(formatted_schema({"type": "object"}))
        case "regex":
            # llguidance would ignore the last backslash.
            if (len(spec.source) - len(spec.source.rstrip("\\"))) % 2:
                raise ValueError("nothing follows its last backslash")
            return LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            choices = json.loads(spec.source)
            if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
                raise ValueError("expected a list of strings, at least one and none empty")
            if len(choices) > _MAX_CHOICES:
                raise ValueError(f"it has {len(choices)} texts, more than {_MAX_CHOICES}")
            # A terminal: of rules, llguidance compiles 65,000 and follows 2,000.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}")
        case "lark":
            return LLMatcher.grammar_from_lark(_with_kept_schemas(spec.source))


def _with_kept_schemas(lark: str) -> str:
    """A Lark grammar whose JSON schemas llguidance can keep. Their white space is the grammar's own."""
    parts, done = [], 0
    for mark in _SCHEMA.finditer(lark):
        with suppress(json.JSONDecodeError):
            given, end = json.JSONDecoder().raw_decode(lark, mark.end())
            # As texts: 2.0 == 2.
            if mark.start() >= done and (kept := json.dumps(_kept(given))) != json.dumps(given):
                parts += [lark[done : mark.end()], kept]
                done = end
    return "".join((*parts, lark[done:]))


def validate(spec: GrammarSpec) -> None:
    """Check a grammar without a tokenizer.

    Raises:
        ValueError: the grammar is broken, or llguidance does not support one of its features.
        RecursionError: the JSON has too many levels.
    """
    from llguidance import LLMatcher

    if found := LLMatcher.validate_grammar(serialize(spec)):
        raise ValueError(without_excerpts(found))


def load_tokens(tokenizer: str, ends: Sequence[int]) -> "LLTokenizer | str":
    """A tokenizer in llguidance's form, or the reason why llguidance does not support it.

    Args:
        tokenizer: as JSON.
        ends: end tokens that the tokenizer has.
    """
    from llguidance import LLTokenizer

    if not ends:
        return "a grammar needs a model with an end token, and this one has none"
    try:
        return LLTokenizer(tokenizer, eos_token=list(ends), slices=_SLICES)
    except BaseException as error:
        if not is_failure(error):
            raise
        return one_line(f"grammars cannot be used with this model's tokenizer: {error}")


def compile_matcher(tokens: "LLTokenizer", serialized: str) -> "LLMatcher":
    """Compile a grammar and make its first mask.

    Raises:
        ValueError: the grammar does not compile, or nothing matches it.
    """
    matcher = new_matcher(tokens, serialized)
    if matcher.is_error():
        raise ValueError(without_excerpts(matcher.get_error()))
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        reason = without_excerpts(first.get_error())
        raise ValueError("nothing matches it" if reason == "NoExtensionBias" else reason)
    return matcher


def new_matcher(tokens: "LLTokenizer", serialized: str) -> "LLMatcher":
    """Compile a grammar that is known to compile."""
    from llguidance import LLMatcher, LLParserLimits

    # Verbose errors contain the whole grammar.
    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    return LLMatcher(tokens, serialized, log_level=0, limits=limits)


def without_forcing(serialized: str) -> str:
    """The same grammar, where any tokens may spell the text that must come: an option that one of its parts may set."""
    is_lark = not serialized.lstrip().startswith("{")
    grammars = [{"lark_grammar": serialized}] if is_lark else json.loads(serialized)["grammars"]
    return json.dumps({"grammars": [*grammars, {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}]})


def unusable(spec: GrammarSpec, reason: object) -> str:
    """The message for a grammar that cannot be used."""
    is_ebnf = spec.kind == "lark" and "::=" in spec.source
    hint = "; it looks like EBNF (root ::= …), but Lark is read (start: …)" if is_ebnf else ""
    return one_line(f"the {_NAMES[spec.kind]} cannot be used: {reason}{hint}")


def without_excerpts(error: str) -> str:
    """An error of llguidance without positions and excerpts of a grammar that the user did not write."""
    return re.sub(r"^(at )?\d+\(\d+\): |\n\s*(\^+|\d+ \|.*|<non-verbose/>)(?=\n|$)", "", error).strip()


def one_line(message: str) -> str:
    """A message on one line, shortened in the middle: the cause is often at the end."""
    message = " ".join(message.split())
    if len(message) <= _MAX_CHARACTERS:
        return message
    half = (_MAX_CHARACTERS - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"


def formatted_schema(schema: object) -> str:
    """A JSON schema that llguidance can keep, with our white space rules instead of its own.

    Raises:
        ValueError: not a schema, or one that cannot be kept.
    """
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    if not isinstance(schema, dict):
        raise ValueError(f"expected a JSON object or a boolean, got {type(schema).__name__}")
    text = json.dumps(schema, allow_nan=False)
    return _formatted(text) if len(text) <= _LONGEST_REMEMBERED else _formatted.__wrapped__(text)


@lru_cache(256)
def _formatted(text: str) -> str:
    """Remembered, for many rows offer the same tools."""
    schema = json.loads(text)
    own: Any = schema.get("x-guidance")
    lenient = {name: True for name in _JSON_LENIENCIES if isinstance(own, dict) and own.get(name) is True}
    kept = _kept(schema)
    # Only a schema with a control character needs \u to write it.
    escapes = _ESCAPES + "u" * bool(_CONTROL.search(text))
    return json.dumps({**kept, "x-guidance": {**_JSON_FORMAT, "json_allowed_escapes": escapes, **lenient}})


def _kept(schema: Any) -> Any:
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    return kept_schema(schema, lenient=isinstance(own, dict) and own.get("lenient") is True)
