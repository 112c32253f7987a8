"""Long texts are encoded in pieces: memory is bounded, and token ids are those of the whole text."""

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rosebatch.core.errors import RowError
from rosebatch.text import long_texts
from rosebatch.text.long_texts import UNBOUND, Bound, LongTexts
from rosebatch.text.spans import EncodedText, find_spans
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend

WORDS = [
    *("The", "quick", "foxes", "don't", "jump,", "it's", "12345", "3.14:", '{"name":', "[1,", "2]}", "//", "//", ";"),
    *("naïve", "a\u0301", "слово", "中文。字符", "日本語", "👍🏽", "==", "<end>", "▁", "Ġ", "x", "X", "A\u030a"),
]
GAPS = [" "] * 20 + ["\n"] * 5 + ["\n\n", "  ", "\t", " \n", "\n ", "\r\n", "", ".\n", ";\n", "     ", "\u00a0"]
# As of Llama 3 and of gpt-oss, which has tokens of a line break and slashes.
SPLIT = r"(?i:'s|'t|'m|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES_OF_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
REFUSAL = RowError("prompt_too_long", "too long")


def text_of(length, seed=0):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(length))


def trained(model, trainer, *, normalizer=None, pre_tokenizer=None, decoder=None, special="<end>"):
    """A tokenizer that adds a token on each side of a text."""
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    backend.train_from_iterator([text_of(1000)], trainer)
    backend.add_special_tokens([special])
    end = backend.token_to_id(special)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{special} $A {special}", special_tokens=[(special, end)]
    )
    return backend


def byte_level(**options):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, decoder=decoders.ByteLevel(), **options)


def bpe_of_sentences(normalizer):
    """As of Llama 2 and Gemma: the text is one word, and the space of the next word is written as another character."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], max_token_length=8, show_progress=False)
    words = pre_tokenizers.Split(tokenizers.Regex("▁?[^▁]+|▁"), "isolated")
    backend = trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, normalizer=normalizer, pre_tokenizer=words)
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"pre_tokenizer": None}))


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(), normalizer=normalizers.NFKC())


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


BACKENDS = {
    "GPT-2": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "RoBERTa": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "gpt-oss": lambda: byte_level(
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    "Llama 2": lambda: bpe_of_sentences(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Gemma": lambda: bpe_of_sentences(normalizers.Replace(" ", "▁")),
    "T5": unigram,
    "BERT": word_piece,
    "bytes": byte_backend,
}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(long_texts, "_PIECE", 256)
    monkeypatch.setattr(long_texts, "_SHORTEST", 128)
    monkeypatch.setattr(long_texts, "_SEARCHED", 1024)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_are_those_of_the_whole_text(small_pieces, kind):
    """All of them, the last ones, and as many as are allowed."""
    backend = BACKENDS[kind]()
    texts = LongTexts(backend)
    for seed in range(3):
        text = text_of(500, seed)
        assert [piece.is_apart for piece in texts.pieces(text)].count(True) >= 8
        for add in (False, True):
            whole = backend.encode(text, add_special_tokens=add).ids
            assert texts.encode(text, UNBOUND, add_special_tokens=add) == whole
            assert texts.encode(text, Bound(most=len(whole), refusal=REFUSAL), add_special_tokens=add) == whole
            assert texts.encode(text, Bound(most=len(whole) - 1, refusal=REFUSAL), add_special_tokens=add) == REFUSAL
            for last in (1, 300, 10**20):
                assert texts.encode(text, Bound(last), add_special_tokens=add) == whole[-last:]


@pytest.mark.parametrize("kind", BACKENDS)
def test_places_are_those_of_the_whole_text(small_pieces, kind):
    """Tokens of a later piece had places in that; added tokens stood for the first character."""
    backend = BACKENDS[kind]()
    text = text_of(500)
    whole = backend.encode(text)
    added = zip(whole.offsets, whole.special_tokens_mask, strict=True)
    expected = [(None, None) if special else span for span, special in added]
    for count in (len(whole.ids), 5):
        found = find_spans(backend, LongTexts(backend), EncodedText(text, whole.ids[-count:], is_whole=False))
        assert list(found) == expected[-count:]
    # Ids of another text.
    found = find_spans(backend, LongTexts(backend), EncodedText(text, [0, *whole.ids[1:]], is_whole=False))
    assert set(found) == {(None, None)} or whole.ids[0] == 0


def test_tokens_of_two_words(small_pieces):
    """A vocabulary may have them: a cut between the two would lose them."""
    backend = byte_backend(b"e ", b"e t")
    plain = json.loads(backend.to_str())
    plain["model"]["merges"] = [["e", "Ġ"], ["eĠ", "t"]]
    backend = tokenizers.Tokenizer.from_str(json.dumps(plain))
    texts = LongTexts(backend)
    assert not any(piece.is_apart for piece in list(texts.pieces("the " * 1000))[1:])
    for text in ("the " * 1000, "the tea " * 500):
        whole = backend.encode(text).ids
        assert texts.encode(text, UNBOUND, add_special_tokens=True) == whole
        assert texts.encode(text, Bound(300), add_special_tokens=True) == whole[-300:]


def test_sums_of_scores_that_depend_on_what_precedes(small_pieces):
    """Two ways to write a word may have the same score, of which rounding chooses one."""
    scores = [("<unk>", 0.0), ("▁", -3.0), ("a", -0.1), ("aa", -0.7), ("b", -2.3)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    backend.normalizer = normalizers.Replace(" ", "▁")
    pieces = list(LongTexts(backend).pieces("aaa b " * 500))
    assert len(pieces) > 5
    assert not any(piece.is_apart for piece in pieces[1:])


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("gap", [" ", "\n"])
@pytest.mark.parametrize("split", [True, False])
def test_words_that_go_on_behind_a_mark(small_pieces, split, gap, scheme):
    """Metaspace may split no text at all, and splits none at line breaks: a cut there changed some words."""
    scores = [("<unk>", -20.0), ("▁", -3.1), ("a", -1.17), ("aa", -2.03), ("\n", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    rng = random.Random(0)
    text = gap.join("a" * rng.randint(1, 9) for _ in range(2000))
    pieces = list(LongTexts(backend).pieces(text))
    assert any(piece.is_apart for piece in pieces[1:]) == (split and gap == " ")
    whole = backend.encode(text, add_special_tokens=False).ids
    assert LongTexts(backend).encode(text, UNBOUND, add_special_tokens=False) == whole


@pytest.mark.parametrize("count", [150, 151])
def test_a_run_of_written_spaces(small_pieces, count):
    """A text may have the character that stands for a space: which of them are one token depends on all of a run."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "▁", "a", "▁▁", "▁a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    text = "a" * 100 + ("▁" * count + " " + "a" * 100) * 5
    whole = backend.encode(text).ids
    assert LongTexts(backend).encode(text, UNBOUND, add_special_tokens=False) == whole


class Watched:
    """A tokenizer that notes how long the texts are that it encodes at once."""

    def __init__(self, backend):
        self._backend = backend
        self.longest = self.total = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts, **options):
        size = sum(map(len, texts))
        self.longest, self.total = max(self.longest, size), self.total + size
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize(
    "text", ["word " * 600_000, "w" * 3_000_000, " " * 3_000_000, "中" * 1_000_000, "w\n" * 900_000]
)
def test_a_text_of_too_many_tokens_is_not_encoded_as_a_whole(text):
    """A prompt of 3 MB took 600 MB before it was refused. The rest is not looked at."""
    backend = Watched(byte_backend())
    tokenizer = Tokenizer(backend, "{{ messages[0].content }}")
    bound = Bound(most=1000, refusal=REFUSAL)
    assert tokenizer.encode(["a", text, "b"], [bound] * 3) == [[97], REFUSAL, [98]]
    chats = tokenizer.render([[{"role": "user", "content": text}]], [{}])
    assert tokenizer.encode_rendered(chats, [bound]) == [REFUSAL]
    assert backend.longest <= 1 << 17
    assert backend.total < len(text)


def test_a_text_that_many_rows_share_is_refused_once():
    """2,000 rows of a file of 1 KB had one text of 2 MB: 50 ms each."""
    backend = Watched(byte_backend())
    tokenizer, text, bound = Tokenizer(backend), "w" * 2_000_000, Bound(most=1000, refusal=REFUSAL)
    assert tokenizer.encode([text] * 50, [bound] * 50) == [REFUSAL] * 50
    assert backend.total < 1 << 17
    # With another limit, it is looked at again.
    assert tokenizer.encode(["w" * 200_000], [Bound(most=150_000, refusal=REFUSAL)]) == [[ord("w")] * 200_000]


@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_the_beginning_of_a_text(count):
    """It has the first tokens of the text, and no more of it is looked at than is needed."""
    backend = Watched(byte_backend())
    texts, text = LongTexts(backend), "some words " * 20_000
    found = texts.beginning(text, count, UNBOUND)
    assert text.startswith(found)
    assert min(count, len(text)) <= len(found) < count + (1 << 17)
    assert backend.longest < 1 << 17
    word = "w" * 200_000
    assert texts.beginning(word, count, UNBOUND) == word
    assert texts.beginning(word, count, Bound(most_at_once=199_999)).code == "prompt_too_long"


@pytest.mark.parametrize("last", [0, 100])
def test_a_long_text_that_is_served_is_never_encoded_as_a_whole(last):
    """Nor is one of which the end is kept: of that, the rest is not looked at."""
    backend = Watched(byte_backend())
    text = "word " * 200_000
    found = Tokenizer(backend).encode([text], [Bound(last, 2_000_000, REFUSAL)])
    assert found == [list(text.encode())[-last:]]
    assert backend.longest <= 1 << 17
    assert (backend.total < 1 << 18) == bool(last)


def test_a_word_without_end_is_a_whole_if_it_may_fit():
    """It cannot be cut where its tokens are known to end. So few of them may be those of one that fits."""
    backend = Watched(byte_backend())
    text = "w" * 200_000
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode([text], [Bound(most=150_000, refusal=REFUSAL)]) == [[ord("w")] * 200_000]
    assert tokenizer.encode([text], [Bound(last=5)]) == [[ord("w")] * 5]
    assert backend.longest == len(text)


def test_a_word_without_end_that_memory_has_no_room_for():
    """One of 2 MB took 320 MB more, whatever rows may take."""
    tokenizer = Tokenizer(byte_backend())
    for bound in (Bound(last=5, most_at_once=199_999), Bound(most=150_000, refusal=REFUSAL, most_at_once=199_999)):
        (error,) = tokenizer.encode(["w" * 200_000], [bound])
        assert (error.code, "at once no more than 199999" in error.message) == ("prompt_too_long", True)
    text = "word " * 40_000
    assert tokenizer.encode([text], [Bound(last=5, most_at_once=10)]) == [list(b"word ")]


def test_words_of_a_fixed_length(small_pieces):
    """They are counted from the beginning of the text: behind a cut, all of them would be others."""
    backend = byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.FixedLength(5), BYTES_OF_WORDS]))
    text = text_of(500)
    whole = backend.encode(text, add_special_tokens=False).ids
    for last in (0, 300):
        found = LongTexts(backend).encode(text, Bound(last), add_special_tokens=False)
        assert found == whole[-last:]


def test_unknown_words_of_any_length_are_one_token():
    """Each piece of the word is one, too, and that is no reason to refuse it."""
    tokenizer = Tokenizer(word_piece())
    (ids,) = tokenizer.encode(["w" * 300_000], [Bound(most=3, refusal=REFUSAL)])
    assert len(ids) == 3


def test_a_long_text_that_is_not_unicode():
    """It fails alone, as a short one does."""
    first, second = Tokenizer(byte_backend()).encode(["a", "word " * 100_000 + "\ud800"])
    assert (first, second.code) == ([97], "invalid_prompt")
