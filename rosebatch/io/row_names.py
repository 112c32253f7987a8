"""Other names of a row's fields, and carried fields that look as if they should change something."""

from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.fields import OPTION_FIELDS, SAMPLING_FIELDS, TOOL_FIELDS
from rosebatch.io.parsed_size import bounded_json

# Names that other tools have for sampling fields.
SAME_AS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "stop_strings": "stop",
    "thinking_token_budget": "max_reasoning_tokens",
}
# Names that they have for what ``structured_outputs`` holds.
GRAMMARS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}
# Variables of chat templates that they have as fields. A template that does not name them ignores them.
TEMPLATE_FIELDS = ("reasoning_effort", "verbosity", "enable_thinking")
# An object of sampling fields.
NESTED = "sampling_params"
OTHER_NAMES = frozenset({*SAME_AS, *GRAMMARS, *TEMPLATE_FIELDS, NESTED})
_KNOWN = frozenset({*OPTION_FIELDS, *SAMPLING_FIELDS, *TOOL_FIELDS, *OTHER_NAMES})
# Texts that other tools put into the prompt. Here, only a template or ``--system-prompt`` does.
TEXTS = ("system", "system_prompt", "system_message", "instruction", "instructions", "context", "input")
# Settings of other tools that mean nothing here.
_ELSEWHERE = frozenset(
    {
        *("do_sample", "max_length", "min_length", "num_beams", "stop_sequence", "stop_sequences", "stream"),
        *("add_special_tokens", "bad_words_ids", "chat_template", "custom_logit_processor"),
        *("custom_params", "early_stopping", "ebnf", "encoding_format", "eos_token_id", "extra_body"),
        *("function_call", "functions", "generation_config", "generation_kwargs", "grammar", "guided_decoding"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "include_reasoning", "length_penalty"),
        *("logit_processors", "logits_processors", "lora_request", "max_gen_toks", "max_tokens_to_sample"),
        *("mirostat", "mirostat_eta", "mirostat_tau", "modalities", "no_repeat_ngram_size", "num_predict"),
        *("parameters", "random_seed", "reasoning", "repeat_last_n", "return_token_ids", "sampling", "stop_regex"),
        *("structural_tag", "structured_output", "tfs_z", "thinking", "thinking_budget", "truncation_side"),
        *("typical_p", "until", "use_beam_search"),
        *TEXTS,
    }
)
# A carried field may well be called "prompts" or "temperature_c".
_SIMILAR = 0.94
# A longer name is like none of those that are known. To compare one takes 50 times its bytes.
_LONGEST = 100
# Names of a row that are compared with all that are known: each takes some 0.1 ms.
_MAX_COMPARED = 256


def with_own_names(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row under their own names. They win over those of ``sampling_params``; a null is as if left out.

    Raises:
        RowError: a field and another name of it differ, or ``sampling_params`` is no object of sampling fields, or
            takes far more memory than its text.
    """
    if OTHER_NAMES.isdisjoint(values):
        return values
    nested = values.get(NESTED)
    own = _for_template(_with_own_names({name: value for name, value in values.items() if name != NESTED}))
    if isinstance(nested, str):
        # So a table may have it.
        with suppress(msgspec.DecodeError):
            nested = bounded_json(nested)
    if nested is None or nested != nested:
        return own
    if not isinstance(nested, Mapping):
        raise RowError("invalid_field", f"sampling_params: expected an object, got {type(nested).__name__}")
    nested = _with_own_names(nested)
    if unknown := nested.keys() - SAMPLING_FIELDS:
        raise RowError("invalid_field", f"sampling_params: {min(unknown)} is no sampling field")
    return {**nested, **own}


def _with_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if value is not None}
    for name, meaning in SAME_AS.items():
        if name in found and (value := found.pop(name)) != found.setdefault(meaning, value):
            raise RowError("invalid_field", f"{name} is another name of {meaning}: keep one of them")
    grammars = [name for name in (*GRAMMARS, "structured_outputs", "response_format") if name in found]
    if len(grammars) > 1 and not GRAMMARS.keys().isdisjoint(grammars):
        raise RowError("invalid_field", f"an answer can have one grammar: keep one of {', '.join(grammars)}")
    if grammars and (name := grammars[0]) in GRAMMARS:
        found["structured_outputs"] = {GRAMMARS[name]: found.pop(name)}
    return found


def _for_template(values: dict[str, Any]) -> dict[str, Any]:
    """With the variables of the chat template where they belong. Those that are there already win."""
    given = {name: values.pop(name) for name in TEMPLATE_FIELDS if name in values}
    if values.get("messages") is None and any(given.values()):
        raise needs_messages(next(iter(given)))
    kwargs = values.get("chat_template_kwargs")
    if given and isinstance(kwargs, Mapping | None):
        values["chat_template_kwargs"] = {**given, **(kwargs or {})}
    return values


def needs_messages(name: str) -> RowError:
    """The error of a prompt that is no chat, and has a variable of chat templates."""
    return RowError("invalid_field", f"{name} needs messages: the chat template reads it")


def unclear_names(carried: Mapping[str, Any], known: frozenset[str] = _KNOWN) -> tuple[str, ...]:
    """Those of some carried fields that look like settings. Of very many, only the first may be misspelt ones.

    Args:
        carried: the fields. A null is as if left out: a table has it in rows that set nothing.
        known: the settings of the task, which tables carry; those of another one look like settings.
    """
    if len(carried) <= _MAX_COMPARED:
        found = [name for name in carried if _looks_like_a_setting(name, known)]
    else:
        left = iter(carried)
        found = [name for name in islice(left, _MAX_COMPARED) if _looks_like_a_setting(name, known)]
        found += [name for name in left if _is_a_setting(name, known)]
    return tuple([name for name in found if carried[name] is not None]) if found else ()


def _looks_like_a_setting(name: str, known: frozenset[str]) -> bool:
    return len(name) <= _LONGEST and _is_like_a_setting(name, known)


@lru_cache(4096)
def _is_like_a_setting(name: str, known: frozenset[str]) -> bool:
    if name in known:
        return False
    return _is_a_setting(name, known) or bool(get_close_matches(name, _KNOWN | known, 1, _SIMILAR))


def _is_a_setting(name: str, known: frozenset[str]) -> bool:
    return len(name) <= _LONGEST and name not in known and (name in _ELSEWHERE or _plain(name) in _PLAIN)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_PLAIN = frozenset(map(_plain, _KNOWN))
