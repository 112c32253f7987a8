"""From prompts and chats to token ids."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from rosebatch.core.errors import RowError, UserError, unexpected
from rosebatch.core.pooling_params import NO_PROMPTS, NamedPrompts
from rosebatch.host.model_files import TOKENIZER_FILES, refusal, refused, require_file
from rosebatch.host.pretrained import load_pretrained_tokenizer
from rosebatch.text import panics
from rosebatch.text.batch_or_each import batch_or_each
from rosebatch.text.chat_parsers import ChatParsers
from rosebatch.text.chat_template import ChatTemplate
from rosebatch.text.long_texts import LONG, UNBOUND, Bound, LongTexts
from rosebatch.text.shared_beginnings import SharedBeginnings
from rosebatch.text.spans import EncodedText, Spans, find_spans
from rosebatch.text.text_pairs import Pair, TextPairs, groups_of
from rosebatch.text.tokenizer_files import Template, TokenizerFiles
from rosebatch.text.vocabulary import Vocabulary

# The tokens before the prefix, before the suffix, and before the middle: of Qwen Coder, StarCoder, DeepSeek Coder and
# Code Llama.
_MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
# Tokenizers in forms that neither we nor transformers read: of Mistral, of tiktoken, of SentencePiece by other names.
_UNREAD = ("tekken.json", "tokenizer.model.*", "*.tiktoken", "tiktoken.model", "spiece.model", "sentencepiece*.model")
_TOKENIZER_WAY = "add the tokenizer.json of the model's transformers files, or give --tokenizer with a folder or hub id"
# A tokenizer's search through longer prompts can end in a panic, or take minutes.
_MAX_PROMPT_BYTES = 8 * 2**20


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer.

    Raises:
        UserError: it has some, in a form that is not read.
    """
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        return True
    if unread := sorted(path.name for pattern in _UNREAD for path in folder.glob(pattern)):
        raise refusal(folder, f"its tokenizer is {unread[0]} alone, a form that is not read: {_TOKENIZER_WAY}")
    return False


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
        template_names: of the chat templates that the model has.
    """

    template_names: Collection[str] = ()

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
        self.set_templates(None if chat_template is None else Template(chat_template))
        self.max_prompt_bytes = max_prompt_bytes
        self._long_texts = LongTexts(backend)
        self._shared_beginnings = SharedBeginnings(self._long_texts)
        self._pairs = TextPairs(backend, self._long_texts)
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
        template = None if chat_template is None else read_template(chat_template)
        found = cls._load(folder)
        if found is not None:
            found.max_prompt_bytes, found.prompts = max_prompt_bytes, prompts
            if template is not None:
                found.set_templates(Template(template, str(chat_template)))
            found.parsers = found.choose_parsers(reasoning_parser, tool_call_parser)
        return found

    @classmethod
    def _load(cls, folder: Path) -> "Tokenizer | None":
        if not has_tokenizer(folder):
            return None
        file = folder / "tokenizer.json"
        files = TokenizerFiles(folder)
        templates = files.chat_templates()

        def made(backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> Tokenizer:
            found = cls(backend, special_tokens=special_tokens)
            found.set_templates(templates.get("default"), templates.get("tool_use"))
            found.parsers = found.choose_parsers()
            found.template_names = templates.keys()
            return found

        if file.exists():
            require_file(file)
            with refused(file, "unreadable tokenizer"), panics.unreported():
                backend = tokenizers.Tokenizer.from_file(str(file))
                files.add_padding(backend.padding)
                # A file may ask for terabytes of padding.
                backend.no_padding()
                # Some mistakes show only here; later, each row would fail.
                backend.encode("a")
            if not files.change(backend):
                return made(backend, files.special_tokens)
        # Older formats, and files that change tokenizer.json. This takes longer.
        with refused(folder, "unreadable tokenizer"), panics.unreported():
            alone = not file.exists() and (folder / "tokenizer.model").exists()
            # transformers would ask for tiktoken, which reads another form of it.
            if alone and find_spec("sentencepiece") is None and find_spec("tiktoken") is None:
                raise ImportError("tokenizer.model needs the package sentencepiece: pip install sentencepiece")
            converted = load_pretrained_tokenizer(folder)
            return made(converted.backend_tokenizer, dict(converted.special_tokens_map))

    def choose_parsers(self, reasoning: str = "auto", calls: str = "auto") -> ChatParsers:
        """The parsers of these names; see ``ChatParsers.choose``."""
        source = "\n".join(each.source for each in (self._chat_template, self._tool_template) if each is not None)
        return ChatParsers.choose(self, source, reasoning, calls)

    def set_templates(self, chat_template: Template | None, tool_template: Template | None = None) -> None:
        """Take other templates: of all chats, and of those with tools if they have one of their own."""
        self._chat_template, self._tool_template = (
            None if each is None else ChatTemplate(each.source, self.special_tokens, each.place)
            for each in (chat_template, tool_template)
        )

    def chat_template(self, *, tools: bool) -> ChatTemplate | None:
        """The template of chats with or without tools; None if there is none."""
        return self._tool_template if tools and self._tool_template is not None else self._chat_template

    @property
    def beginning(self) -> tuple[int, str] | None:
        """Id and text of the token that ``encode`` puts in front of each text; None if it puts none there."""
        encoded = self.backend.encode("a")
        if not encoded.ids or not encoded.special_tokens_mask[0]:
            return None
        return encoded.ids[0], encoded.tokens[0]

    def encode(self, texts: Sequence[str], bounds: Sequence[Bound] = ()) -> list[list[int] | RowError]:
        """Token ids of each text, with the tokens that the model adds to a prompt (such as a BOS).

        Args:
            texts: the result of one that is not valid Unicode is a RowError.
            bounds: for each text, how many token ids are wanted; a short one may have more.
        """
        return self._encode(texts, bounds or [UNBOUND] * len(texts), add_special_tokens=True)

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

        def rendered(messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str | RowError:
            template = self.chat_template(tools=bool(given.get("tools")))
            if template is None:
                what = "the model has no chat template: give --chat-template FILE, or prompt instead of messages"
                if names := ", ".join(sorted(self.template_names)):
                    what = f"the model has no chat template named default, but {names}: give --chat-template FILE"
                return RowError("no_chat_template", what)
            return template.render(messages, given)

        return [rendered(messages, given) for messages, given in zip(chats, options, strict=True)]

    def encode_rendered(
        self, rendered: Sequence[str | RowError], bounds: Sequence[Bound] = ()
    ) -> list[list[int] | RowError]:
        """Token ids of rendered conversations, as of ``encode``, but no token is added: the template writes them."""
        pairs = zip(rendered, bounds or [UNBOUND] * len(rendered), strict=True)
        texts = [(text, bound) for text, bound in pairs if isinstance(text, str)]
        encoded = iter(
            self._encode([text for text, _ in texts], [bound for _, bound in texts], add_special_tokens=False)
        )
        return [next(encoded) if isinstance(text, str) else text for text in rendered]

    def encode_pairs(
        self, pairs: Sequence[Pair], longest: int | None, bound: Bound = UNBOUND
    ) -> Iterator[list[int] | RowError]:
        """Token ids of each pair of texts as one prompt, with the tokens that the model adds; some pairs at a time.

        Of two texts that are longer than ``longest`` and cut for that, none counts as the longer one.

        Args:
            pairs: the ids of a second text are moved by ``NamedPrompts.second_text``.
            longest: most tokens of a pair; the longer text loses its last ones first, as in transformers. None for any
                number.
            bound: without ``longest``, of each text.
        """

        def encode(group: Sequence[Pair]) -> list[list[int] | RowError]:
            return [*self._pairs.encode(group, longest, bound, self.prompts.second_text)]

        for group in groups_of(pairs):
            refused = [next(filter(None, map(self._too_long, pair)), None) for pair in group]
            short = [pair for pair, error in zip(group, refused, strict=True) if error is None]
            encoded = iter(batch_or_each(encode, short, _encoding_error))
            yield from (error or next(encoded) for error in refused)

    def spans(self, prompts: Sequence[EncodedText]) -> list[Spans | RowError]:
        """Where the tokens of prompts are in their texts."""

        def find(group: Sequence[EncodedText]) -> list[Spans | RowError]:
            return [find_spans(self.backend, self._long_texts, each) for each in group]

        return batch_or_each(find, prompts, partial(unexpected, "finding the places of tokens"))

    def fill_in_middle(self, prompt: str, suffix: str) -> str | RowError:
        """The prompt that makes a fill-in-the-middle model write the text between ``prompt`` and ``suffix``."""
        for before, after, middle in _MIDDLE_TOKENS:
            if all(self.backend.token_to_id(token) is not None for token in (before, after, middle)):
                return f"{before}{prompt}{after}{suffix}{middle}"
        return RowError("unsupported_field", "suffix: the model's tokenizer has no tokens for filling in the middle")

    def _encode(
        self, texts: Sequence[str], bounds: Sequence[Bound], *, add_special_tokens: bool
    ) -> list[list[int] | RowError]:
        longest = max(map(len, texts), default=0)
        # Characters have at most four bytes: nearly all prompts need no closer look.
        if longest <= LONG and 4 * longest <= self.max_prompt_bytes:
            return self._encode_short(texts, add_special_tokens)
        refused = [self._too_long(text) for text in texts]
        short = [text for text, error in zip(texts, refused, strict=True) if error is None and len(text) <= LONG]
        encoded = iter(self._encode_short(short, add_special_tokens))

        def of(text: str, error: RowError | None, bound: Bound) -> list[int] | RowError:
            if error is not None:
                return error
            return next(encoded) if len(text) <= LONG else self._encode_long(text, bound, add_special_tokens)

        return list(map(of, texts, refused, bounds))

    def _encode_short(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | RowError]:
        def encode(group: Sequence[str]) -> list[list[int] | RowError]:
            if (shared := self._shared_beginnings.encode(group, add_special_tokens=add_special_tokens)) is not None:
                return [*shared]
            encodings = self.backend.encode_batch_fast(list(group), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

        return batch_or_each(encode, texts, _encoding_error)

    def _encode_long(self, text: str, bound: Bound, add_special_tokens: bool) -> list[int] | RowError:
        def encode(group: Sequence[str]) -> list[list[int] | RowError]:
            return [self._long_texts.encode(each, bound, add_special_tokens=add_special_tokens) for each in group]

        return batch_or_each(encode, [text], _encoding_error)[0]

    def _too_long(self, text: str) -> RowError | None:
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size <= self.max_prompt_bytes:
            return None
        return RowError(
            "prompt_too_long", f"the prompt has {size} bytes; --max-prompt-bytes allows {self.max_prompt_bytes}"
        )


def _encoding_error(error: BaseException) -> RowError:
    if isinstance(error, RowError):
        return error
    if isinstance(error, TypeError | UnicodeError):
        return RowError("invalid_prompt", f"the prompt is not valid Unicode text ({error})")
    return RowError("invalid_prompt", f"the tokenizer cannot encode the prompt ({error})")


def read_template(path: Path) -> str:
    """A chat template file of the user, checked now: otherwise its mistakes would be an error of every row.

    Raises:
        UserError: it is unreadable, or no valid template.
    """
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
