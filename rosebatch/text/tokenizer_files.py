"""What a model's folder says of its tokenizer beside tokenizer.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rosebatch.host.model_files import read_json, read_text, refusal, refused, shown

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Other tokens: older and newer name of a list, and an object by names of the model.
_UNNAMED = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# Classes that add nothing to tokenizer.json.
_PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_FLAGS = {"content", "lstrip", "rstrip", "single_word", "normalized", "special"}


class Template(NamedTuple):
    """A chat template: its source, and where it is from, for messages."""

    source: str
    place: str = "the chat template"


class TokenizerFiles:
    """The files beside tokenizer.json.

    Attributes:
        special_tokens: named tokens for the chat template, such as ``eos_token``.

    Args:
        folder: of the model.

    Raises:
        UserError: one of them is broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._config_file = folder, folder / "tokenizer_config.json"
        self._config = self._read("tokenizer_config.json")
        # With these, transformers does not look at the older files.
        self._is_old = "added_tokens_decoder" not in self._config
        self._has_class = self._config.get("tokenizer_class") not in _PLAIN_CLASSES
        self._values = {**self._config, **(self._read("special_tokens_map.json") if self._is_old else {})}
        tokens = {name: _content(self._values.get(name)) for name in _NAMED}
        self.special_tokens: dict[str, str] = {name: token for name, token in tokens.items() if token}
        for name, token in self.special_tokens.items():
            if not isinstance(token, str):
                raise refusal(self._config_file, f"{name} is no text: {shown(token)}")

    def chat_templates(self) -> dict[str, Template]:
        """By name: ``default``, and perhaps ``tool_use``. Files win over the config. A single one is for all chats.

        Models with images may have it in ``chat_template.json`` alone.
        """
        found: dict[str, Template] = {}
        if (file := self._folder / "chat_template.jinja").exists():
            found["default"] = Template(read_text(file), str(file))
        for file in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
            found[file.stem] = Template(read_text(file), str(file))
        if "default" not in found:
            found = {**_templates(self._config_file, self._config), **found}
        if not found:
            found = _templates(self._folder / "chat_template.json", self._read("chat_template.json"))
        return {"default": next(iter(found.values())), **found} if len(found) == 1 else found

    def add_padding(self, padding: Mapping[str, Any] | None) -> None:
        """Take the token of tokenizer.json's padding for ``pad_token``, as transformers does where none is named."""
        if padding is not None and "pad_token" not in self._values:
            self._values["pad_token"] = self.special_tokens["pad_token"] = padding["pad_token"]

    def change(self, backend: tokenizers.Tokenizer) -> bool:
        """Whether they change the tokenizer of tokenizer.json: its added tokens, its spaces or its letters."""
        with refused(self._config_file, "unreadable tokenizer"):
            return self._change_pieces(backend) or any(self._changed_tokens(backend))

    def _change_pieces(self, backend: tokenizers.Tokenizer) -> bool:
        # transformers' classes put a space before a text, but not behind a special token.
        if "Prepend(" in repr(backend.normalizer) and self._has_class:
            return True
        steps = f"{backend.normalizer!r} {backend.pre_tokenizer!r}"
        spaced = any(each in steps for each in ("add_prefix_space=True", "Prepend(", '"always"', '"first"'))
        changed = any(self._config.get(name) for name in ("split_special_tokens", "fix_mistral_regex"))
        for name, stored in (("add_prefix_space", spaced), ("do_lower_case", "lowercase=True" in steps)):
            given = self._config.get(name)
            changed |= given is not None and bool(given) != stored
        return changed

    def _changed_tokens(self, backend: tokenizers.Tokenizer) -> Iterator[bool]:
        """For each token that they name, whether it is another one in tokenizer.json."""
        by_id: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        special = {token.content for token in by_id.values() if token.special}
        for token_id, token in self._config.get("added_tokens_decoder", {}).items():
            if unknown := token.keys() - _FLAGS:
                raise refusal(self._config_file, f"added_tokens_decoder: {shown(min(unknown))} is not supported")
            yield repr(by_id.get(int(token_id))) != repr(tokenizers.AddedToken(**token))
        if self._is_old:
            for content, token_id in self._read("added_tokens.json").items():
                yield token_id not in by_id or by_id[token_id].content != content
        for name in self._values:
            if name in _NAMED or (name.endswith("_token") and isinstance(self._values[name], str)):
                token = _content(self._values[name])
                yield token is not None and token not in special
        plain = {token.content for token in by_id.values() if repr(token) == repr(_unnamed(token.content))}
        for name in _UNNAMED:
            given = self._values.get(name) or ()
            for token in given.values() if isinstance(given, Mapping) else given:
                yield _content(token) not in (plain if isinstance(token, str) else special)
        # Other classes name some themselves.
        if self._has_class:
            yield not {"bos_token", "eos_token"} <= self._values.keys()

    def _read(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        return read_json(file) if file.exists() else {}


def _templates(file: Path, values: Mapping[str, Any]) -> dict[str, Template]:
    given = values.get("chat_template")
    if isinstance(given, list):
        with refused(file, "chat_template is no list of named templates"):
            given = {entry["name"]: entry["template"] for entry in given}
    found = given if isinstance(given, dict) else {} if given is None else {"default": given}
    for template in found.values():
        if not isinstance(template, str):
            raise refusal(file, f"chat_template is no text: {shown(template)}")
    return {name: Template(template, f"{file}: chat_template") for name, template in found.items()}


def _content(token: Any) -> Any:
    """A token's text. Older files have an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _unnamed(content: str) -> tokenizers.AddedToken:
    """What transformers makes of a text in a list of special tokens."""
    return tokenizers.AddedToken(content, special=True, normalized=False)
