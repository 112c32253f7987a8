"""Text to token ids and back: batched encoding, chat templates, incremental detokenizing, stop strings."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from rosebatch.errors import RowError, UserError

# Before what precedes the middle, before what follows it, and in front of it: of Qwen Coder, StarCoder, DeepSeek Coder,
# Code Llama.
_MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# Byte-level vocabularies write each byte as a character: itself where it is printable, others from 256 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        backend: encodes and decodes.
        chat_template: a Jinja template, None where the model has none.
        special_tokens: the named tokens that the template may use.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a folder; None where there is none, and only token ids can be worked on.

        Raises:
            UserError: its files are broken.
        """
        file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not file.exists():
            has_other = any((folder / name).exists() for name in ("tokenizer.model", "vocab.json"))
            return cls._convert(folder) if has_other else None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
            return cls(backend, _chat_template(folder, config), _special_tokens(config))
        # tokenizers raises plain Exception for a file it cannot read.
        except Exception as error:
            raise UserError(f"{folder}: unreadable tokenizer ({error!r})") from None

    @classmethod
    def _convert(cls, folder: Path) -> "Tokenizer":
        """An older tokenizer format, by way of transformers: slower to start."""
        from transformers import AutoTokenizer

        try:
            converted = AutoTokenizer.from_pretrained(str(folder))
            template = converted.chat_template
            return cls(converted.backend_tokenizer, template, dict(converted.special_tokens_map))
        except Exception as error:
            raise UserError(f"{folder}: unreadable tokenizer ({error})") from None

    def encode(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        """Token ids of each text, with the tokens that the model puts around a prompt (such as a BOS).

        A text that is not valid Unicode yields a RowError.
        """
        return self._encode(texts, add_special_tokens=True)

    def encode_chats(
        self, chats: Sequence[list[dict[str, Any]]], options: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int] | RowError]:
        """Token ids of each conversation through the chat template, up to where the assistant's answer begins.

        Args:
            chats: messages of each.
            options: for each, what the template is given beside them.

        Returns:
            for each, token ids, or a RowError where the template refuses it.
        """
        return self.encode_rendered(self.render(chats, options or [{}] * len(chats)))

    def render(
        self, chats: Sequence[list[dict[str, Any]]], options: Sequence[Mapping[str, Any]]
    ) -> list[str | RowError]:
        """The text of each conversation, see ``encode_chats``: Python, where encoding is not."""
        return [self._render(messages, given) for messages, given in zip(chats, options, strict=True)]

    def encode_rendered(self, rendered: Sequence[str | RowError]) -> list[list[int] | RowError]:
        """Token ids of each; the template has put special tokens where they belong."""
        encoded = iter(self._encode([text for text in rendered if isinstance(text, str)], add_special_tokens=False))
        return [next(encoded) if isinstance(text, str) else text for text in rendered]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens, special tokens left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def decode_batch(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """``decode`` for each, on all cores."""
        texts: list[str] = self.backend.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=True)
        return texts

    def token_bytes(self, token_id: int) -> bytes:
        """What a single token stands for, which need not be whole characters; of a special token, its name."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id) or ""
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in piece if character in _BYTES)
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("\u2581", " ").encode()

    def fill_in_middle(self, prompt: str, suffix: str) -> str | RowError:
        """The prompt with which a model that was trained for it writes what stands between two texts."""
        for before, after, middle in _MIDDLE_TOKENS:
            if all(self.backend.token_to_id(token) is not None for token in (before, after, middle)):
                return f"{before}{prompt}{after}{suffix}{middle}"
        return RowError("unsupported_field", "suffix: the model's tokenizer has no tokens for filling in the middle")

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` leaves the token out."""
        added = self._added.get(token_id)
        return added is not None and added.special

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        found: dict[int, tokenizers.AddedToken] = self.backend.get_added_tokens_decoder()
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            if len(texts) > 1:
                return [ids for text in texts for ids in self._encode([text], add_special_tokens)]
            return [RowError("invalid_prompt", f"the prompt is not valid Unicode text ({error})")]
        return [encoding.ids for encoding in encodings]

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str | RowError:
        if self.chat_template is None:
            return RowError("no_chat_template", "the model has no chat template: give prompt instead of messages")
        # Not at the top of the file: it takes 0.4 s, and a file of plain prompts does not need it.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                # To find the end of a message that is to be continued, it writes a mark into it.
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                **{"add_generation_prompt": True, **self.special_tokens, **options},
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            return RowError("invalid_messages", f"the chat template refuses the messages: {error}")
        text: str = rendered[0]
        return text


class StopStrings:
    """Watches generated tokens for stop strings, across token borders (see ``rosebatch.request.StopMatcher``).

    Args:
        tokenizer: of the model.
        stop: the strings.
        min_tokens: what ends within the text of so many first tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._keep = max(map(len, stop)) - 1
        # The end of the text so far, and where in the whole text it begins.
        self._tail, self._begin = "", 0
        self._missing = min_tokens
        self._first: list[int] = []
        self._protected = 0

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True once a stop string has appeared."""
        text = self._tail + (self._stream.step(self._tokenizer.backend, token_id) or "")
        begin = self._begin
        self._tail = text[-self._keep :] if self._keep else ""
        self._begin += len(text) - len(self._tail)
        if self._missing:
            self._missing -= 1
            self._first.append(token_id)
            # Whole, as whoever cuts the text will see it: half a character at its end is one.
            self._protected = 0 if self._missing else len(self._tokenizer.decode(self._first))
            return False
        return cut_at_stop(text, self._stop, max(0, self._protected - begin)) != text


def cut_at_stop(text: str, stop: Sequence[str], protected: int = 0) -> str:
    """The text up to the first stop string in it that ends behind the first ``protected`` characters."""
    found = [at for s in stop if (at := text.find(s, max(0, protected - len(s) + 1) if protected else 0)) >= 0]
    return text[: min(found)] if found else text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named tokens; a value is a string or, in older files, an object with its ``content``."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    return {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items() if t}
