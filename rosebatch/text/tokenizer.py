"""From prompts and chats to token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rosebatch.core.errors import RowError, UserError
from rosebatch.core.pooling_params import NO_PROMPTS, NamedPrompts
from rosebatch.host.model_files import read_json, read_text, refusal, refused, require_file, shown
from rosebatch.host.pretrained import load_pretrained_tokenizer
from rosebatch.text import panics
from rosebatch.text.batch_or_each import batch_or_each
from rosebatch.text.chat_parsers import ChatParsers
from rosebatch.text.chat_template import ChatTemplate
from rosebatch.text.vocabulary import Vocabulary

# The tokens before the prefix, before the suffix, and before the middle: of Qwen Coder, StarCoder, DeepSeek Coder and
# Code Llama.
_MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
# A tokenizer's search through longer prompts can end in a panic, or take minutes.
_MAX_PROMPT_BYTES = 8 * 2**20
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Vocabulary):
    """The tokenizer of a model folder.

    Args:
        backend: encodes and decodes.
        chat_template: a Jinja template; None if the model has no template.
        special_tokens: named tokens for the template, such as ``eos_token``.
        max_prompt_bytes: longer prompts are refused.

    Attributes:
        parsers: of reasoning and tool calls.
        prompts: what precedes texts that are embedded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        max_prompt_bytes: int = _MAX_PROMPT_BYTES,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        super().__init__(backend)
        self.special_tokens = special_tokens or {}
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        self.max_prompt_bytes = max_prompt_bytes
        self.parsers = self.choose_parsers()
        self.prompts = NO_PROMPTS

    @classmethod
    def load(
        cls,
        folder: Path,
        chat_template: Path | None = None,
        max_prompt_bytes: int = _MAX_PROMPT_BYTES,
        *,
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
        prompts: NamedPrompts = NO_PROMPTS,
    ) -> "Tokenizer | None":
        """Load the tokenizer of a model folder.

        Args:
            folder: of the model.
            chat_template: a Jinja file that replaces the template of the model.
            max_prompt_bytes: longer prompts are refused.
            reasoning_parser, tool_call_parser: names of parsers, see ``rosebatch.config.run.RunConfig``.
            prompts: what precedes texts that are embedded.

        Returns:
            None if the folder has no tokenizer: such a model takes only token ids.

        Raises:
            UserError: a file of the tokenizer or the given template is unreadable or broken.
        """
        template = None if chat_template is None else _read_template(chat_template)
        found = cls._load(folder)
        if found is not None:
            found.max_prompt_bytes, found.prompts = max_prompt_bytes, prompts
            if template is not None:
                found.chat_template = ChatTemplate(template, found.special_tokens)
            found.parsers = found.choose_parsers(reasoning_parser, tool_call_parser)
        return found

    @classmethod
    def _load(cls, folder: Path) -> "Tokenizer | None":
        file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not file.exists():
            has_other = any((folder / name).exists() for name in ("tokenizer.model", "vocab.json"))
            return cls._convert(folder) if has_other else None
        require_file(file)
        config = read_json(config_file) if config_file.exists() else {}
        template = _chat_template(folder, config_file, config)
        special_tokens = _special_tokens(config_file, config)
        with refused(file, "unreadable tokenizer"), panics.unreported():
            found = cls(tokenizers.Tokenizer.from_file(str(file)), template, special_tokens)
            # Some mistakes show only here; later, each row would fail.
            found.backend.encode("a")
        return found

    @classmethod
    def _convert(cls, folder: Path) -> "Tokenizer":
        """Load an older tokenizer format through transformers, which takes longer."""
        with refused(folder, "unreadable tokenizer"):
            converted = load_pretrained_tokenizer(folder)
            template = converted.chat_template
            return cls(converted.backend_tokenizer, template, dict(converted.special_tokens_map))

    def choose_parsers(self, reasoning: str = "auto", calls: str = "auto") -> ChatParsers:
        """The parsers of these names; see ``ChatParsers.choose``."""
        source = "" if self.chat_template is None else self.chat_template.source
        return ChatParsers.choose(self, source, reasoning, calls)

    def encode(self, texts: Sequence[str]) -> list[list[int] | RowError]:
        """Token ids of each text, with the tokens that the model adds to a prompt (such as a BOS).

        The result of a text that is not valid Unicode is a RowError.
        """
        return self._encode(texts, add_special_tokens=True)

    def encode_chats(
        self, chats: Sequence[list[dict[str, Any]]], options: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int] | RowError]:
        """Token ids of each conversation, rendered by the chat template up to the start of the assistant's answer.

        Args:
            chats: the messages of each conversation.
            options: for each conversation, further variables of the template.

        Returns:
            for each conversation, token ids, or a RowError if the template refuses it.
        """
        return self.encode_rendered(self.render(chats, options or [{}] * len(chats)))

    def render(
        self, chats: Sequence[list[dict[str, Any]]], options: Sequence[Mapping[str, Any]]
    ) -> list[str | RowError]:
        """The text of each conversation; arguments as for ``encode_chats``. This holds the GIL, encoding does not."""
        if self.chat_template is None:
            error = RowError("no_chat_template", "the model has no chat template: give prompt instead of messages")
            return [error] * len(chats)
        return [self.chat_template.render(messages, given) for messages, given in zip(chats, options, strict=True)]

    def encode_rendered(self, rendered: Sequence[str | RowError]) -> list[list[int] | RowError]:
        """Token ids of rendered conversations. No special tokens are added: the template writes them."""
        encoded = iter(self._encode([text for text in rendered if isinstance(text, str)], add_special_tokens=False))
        return [next(encoded) if isinstance(text, str) else text for text in rendered]

    def fill_in_middle(self, prompt: str, suffix: str) -> str | RowError:
        """The prompt that makes a fill-in-the-middle model write the text between ``prompt`` and ``suffix``."""
        for before, after, middle in _MIDDLE_TOKENS:
            if all(self.backend.token_to_id(token) is not None for token in (before, after, middle)):
                return f"{before}{prompt}{after}{suffix}{middle}"
        return RowError("unsupported_field", "suffix: the model's tokenizer has no tokens for filling in the middle")

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        # Characters have at most four bytes: nearly all prompts need no closer look.
        if 4 * max(map(len, texts), default=0) > self.max_prompt_bytes:
            refused = [self._too_long(text) for text in texts]
            rest = [text for text, error in zip(texts, refused, strict=True) if error is None]
            encoded = iter(self._encode_short(rest, add_special_tokens))
            return [error or next(encoded) for error in refused]
        return self._encode_short(texts, add_special_tokens)

    def _encode_short(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        def encode(group: Sequence[str]) -> list[list[int] | RowError]:
            encodings = self.backend.encode_batch_fast(list(group), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

        return batch_or_each(encode, texts, _encoding_error)

    def _too_long(self, text: str) -> RowError | None:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size <= self.max_prompt_bytes:
            return None
        return RowError(
            "prompt_too_long", f"the prompt has {size} bytes; --max-prompt-bytes allows {self.max_prompt_bytes}"
        )


def _encoding_error(error: BaseException) -> RowError:
    if isinstance(error, TypeError | UnicodeError):
        return RowError("invalid_prompt", f"the prompt is not valid Unicode text ({error})")
    return RowError("invalid_prompt", f"the tokenizer cannot encode the prompt ({error})")


def _read_template(path: Path) -> str:
    """A chat template file of the user, checked now: otherwise its mistakes would be an error of every row."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    with refused(path, "unreadable chat template"):
        template = path.read_text(encoding="utf-8")
    try:
        # Without a conversation, this compiles the template and renders nothing.
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        raise UserError(f"{path}{where}: not a valid Jinja chat template ({error})") from None
    return template


def _chat_template(folder: Path, config_file: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        with refused(config_file, "chat_template is no list of named templates"):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str | None):
        raise refusal(config_file, f"chat_template is no text: {shown(template)}")
    return template


def _special_tokens(config_file: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named tokens. A value is a string or, in older files, an object with ``content``."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    found: dict[str, Any] = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items() if t}
    for name, token in found.items():
        if not isinstance(token, str):
            raise refusal(config_file, f"{name} is no text: {shown(token)}")
    return found
