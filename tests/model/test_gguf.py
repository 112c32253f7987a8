"""GGUF files, written here from random transformers models, against those models."""

import json
import os

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rosebatch.config import EngineConfig
from rosebatch.errors import UserError
from rosebatch.launch import LaunchOptions, launch
from rosebatch.model.gguf import convert, converted_folder
from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams
from rosebatch.tokenizer import Tokenizer

VOCAB, LAYERS, END, BOS = 320, 2, 300, 301
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": END,
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_theta=5000.0)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "llama-wide-heads": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32)),
    "llama-3.1": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LINEAR_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=LAYERS,
            n_head=4,
            n_positions=128,
            initializer_range=0.2,
            bos_token_id=BOS,
            eos_token_id=END,
        )
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost such small models more than they bring, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of our own: nothing of the user's is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rosebatch" / "gguf"


def random_model(name):
    """A model whose every parameter is random, norms and biases too: those left at 1 and 0 would hide mistakes."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def permute(values, heads):
    """What llama.cpp's converter does to q and k of Llama."""
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, 2, rows, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def llama3_divisors(rope, head_dim):
    """The tensor in which llama.cpp's converter keeps Llama 3's stretch: one divisor for each pair of channels."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def add_tokenizer(writer, *, pre="gpt-2", merges=("a b",), words=(), **more):
    """Bytes, what the merges make, whole words, two special tokens, one of the user, the rest unused."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += dict.fromkeys([*("".join(merge.split(" ")) for merge in merges), *words])
    types = [gguf.TokenType.NORMAL] * len(tokens)
    while len(tokens) < END:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    tokens += ["<|end|>", "<|begin|>", "<tool>"]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    while len(tokens) < VOCAB:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model(more.get("kind", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(BOS)
    if "add_bos" in more:
        writer.add_add_bos_token(more["add_bos"])
    if "template" in more:
        writer.add_chat_template(more["template"])
    if "eot" in more:
        writer.add_eot_token_id(more["eot"])


def add_model(writer, name, model, quantized):
    """Metadata and tensors, named by the gguf package's own table."""
    architecture, config = name.partition("-")[0], model.config
    if architecture == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_head_count(config.n_head)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim))
        if getattr(config, "head_dim", None) is not None:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], LAYERS)
    tied = config.tie_word_embeddings
    for hf_name, parameter in model.state_dict().items():
        if tied and hf_name == "lm_head.weight":
            continue
        values = parameter.detach().numpy()
        if architecture == "llama" and ".q_proj." in hf_name:
            values = permute(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in hf_name:
            values = permute(values, config.num_key_value_heads)
        if architecture == "gpt2" and values.ndim == 2 and ".h." in hf_name:
            values = values.T
        values = np.ascontiguousarray(values)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        kind = next((kind for part, kind in quantized.items() if part in hf_name and values.ndim == 2), None)
        if kind is None:
            writer.add_tensor(gguf_name, values)
        elif kind == gguf.GGMLQuantizationType.I8:
            writer.add_tensor(gguf_name, values.astype(np.int8))
        else:
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)


@pytest.fixture
def write_gguf(tmp_path):
    """A file from a model, or of a tokenizer alone."""

    def write(name="llama", model=None, *, quantized=None, file="model.gguf", architecture=None, **tokenizer):
        path = tmp_path / file
        writer = gguf.GGUFWriter(path, architecture or name.partition("-")[0])
        if model is not None:
            add_model(writer, name, model, quantized or {})
        add_tokenizer(writer, **tokenizer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def toy():
    """The smallest file that can be converted: for all that is not about the weights."""
    return random_model("llama")


def logits(model, token_ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids])).logits[0]


def greedy(path, prompts, count):
    """What rosebatch generates in fp32."""
    limits = EngineConfig(block_size=4, max_num_seqs=8)
    engine = launch(LaunchOptions(model=str(path), device="cpu", dtype="float32", limits=limits)).engine
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    requests = [Request(index=i, prompt_token_ids=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
    return {c.request.index: list(c.token_ids) for c in engine.run(requests)}


PROMPTS = [[5], [7, 200, 9, 31, 18], list(range(30, 49))]


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_original(write_gguf, name):
    """Names, transposes, the order of q and k for RoPE, biases and every number of the config: to the last bit."""
    original = random_model(name)
    folder = converted_folder(write_gguf(name, original), torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(converted) is type(original)
    assert converted.dtype == torch.float32
    token_ids = [5, 200, 9, 31, 18, END, 0, 77]
    assert torch.equal(logits(converted, token_ids), logits(original, token_ids))
    generated = greedy(folder, PROMPTS, 10)
    for index, prompt in enumerate(PROMPTS):
        forced = logits(original, prompt + generated[index]).argmax(-1)
        assert generated[index] == forced[len(prompt) - 1 : -1].tolist()


QUANTIZED = {
    "q_proj": gguf.GGMLQuantizationType.Q8_0,
    "down_proj": gguf.GGMLQuantizationType.Q4_1,
    "embed_tokens": gguf.GGMLQuantizationType.Q5_0,
    "up_proj": gguf.GGMLQuantizationType.F16,
    "v_proj": gguf.GGMLQuantizationType.BF16,
}


def test_quantized_tensors(write_gguf):
    """Dequantized as the gguf package does it, before and not after the rows of q are put in order."""
    original = random_model("llama")
    path = write_gguf("llama", original, quantized=QUANTIZED)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            for part, kind in QUANTIZED.items():
                if part in name:
                    values = dequantize(quantize(parameter.numpy(), kind), kind)
                    assert not np.array_equal(values, parameter.numpy())
                    parameter.copy_(torch.from_numpy(values))
    converted = AutoModelForCausalLM.from_pretrained(converted_folder(path, torch.float32)).eval()
    assert torch.equal(logits(converted, PROMPTS[1]), logits(original, PROMPTS[1]))


def test_weights_are_rounded_once(write_gguf, toy):
    """bf16 comes straight from the dequantized fp32 values."""
    folder = converted_folder(write_gguf("llama", toy), torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    converted = AutoModelForCausalLM.from_pretrained(folder)
    expected = toy.to(torch.bfloat16).state_dict()
    assert converted.dtype == torch.bfloat16
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_large_models_are_written_in_shards(write_gguf, toy, monkeypatch, tmp_path):
    """No shard is lost, and both readers find them all."""
    path = write_gguf("llama", toy)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    whole.mkdir()
    shards.mkdir()
    convert(path, torch.float32, whole)
    monkeypatch.setattr("rosebatch.model.gguf._SHARD_BYTES", 50_000)
    convert(path, torch.float32, shards)
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert greedy(shards, PROMPTS, 8) == greedy(whole, PROMPTS, 8)


def test_both_end_tokens_end(write_gguf, toy):
    """Chat models have an end of turn beside the end of text; generation stops at either."""
    folder = converted_folder(write_gguf("llama", toy, eot=302), torch.float32)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [END, 302]}
    engine = launch(LaunchOptions(model=str(folder), device="cpu")).engine
    assert engine.eos_token_ids == {END, 302}


# The cache


def test_the_second_call_converts_nothing(write_gguf, toy, cache):
    """Conversion takes seconds at every start otherwise."""
    path = write_gguf("llama", toy)
    folder = converted_folder(path, torch.float32)
    assert folder.parent == cache
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(before)
    assert converted_folder(path, torch.float32) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert list(cache.iterdir()) == [folder]


def test_what_gets_a_folder_of_its_own(write_gguf, toy, cache):
    """Another dtype, another file of the same name, the same file changed: stale weights would be taken silently."""
    path = write_gguf("llama", toy)
    folders = {converted_folder(path, torch.float32), converted_folder(path, torch.bfloat16)}
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    folders.add(converted_folder(path, torch.float32))
    (path.parent / "elsewhere").mkdir()
    folders.add(converted_folder(path.rename(path.parent / "elsewhere" / path.name), torch.float32))
    assert len(folders) == 4
    assert set(cache.iterdir()) == folders


def test_a_failed_conversion_leaves_nothing(write_gguf, toy, cache):
    """Half a folder would be taken for a whole one at the next start."""
    path = write_gguf("llama", toy, pre="unknown-to-us")
    for _ in range(2):
        with pytest.raises(UserError):
            converted_folder(path, torch.float32)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(write_gguf, toy, tmp_path):
    """A file where the folder should be: one line for the user."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UserError, match="cannot convert the model"):
        converted_folder(write_gguf("llama", toy), torch.float32)


# Files that cannot be used


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"\x00" * 1000, b"not a gguf file" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 100],
    ids=["empty", "magic-only", "zeros", "text", "endless-counts"],
)
def test_a_file_that_is_no_gguf(tmp_path, content):
    """Garbage of every kind is one line for the user, whatever the gguf package raises."""
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf: not a readable GGUF file"):
        converted_folder(tmp_path / "model.gguf", torch.float32)


def test_a_truncated_file(write_gguf, toy, tmp_path):
    """A download that stopped: in the header, the metadata, the list of tensors, the tensors."""
    whole = write_gguf("llama", toy).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 600, 23), *range(600, len(whole), len(whole) // 40), len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.gguf: not a readable GGUF file"):
            converted_folder(cut, torch.float32)


def test_an_unknown_architecture(write_gguf):
    """The message says which one it is, and what is supported."""
    with pytest.raises(UserError, match=r"'mamba' is not supported; supported are llama, qwen2, qwen3, gpt2"):
        converted_folder(write_gguf(architecture="mamba"), torch.float32)


def test_missing_metadata(write_gguf, toy, monkeypatch):
    """Named, as it is called in the file."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, count: None)
    with pytest.raises(UserError, match=r"'llama\.block_count' is missing"):
        converted_folder(write_gguf("llama", toy), torch.float32)


def test_a_kind_of_tensor_that_cannot_be_dequantized(write_gguf, toy):
    """New kinds appear every few months: the gguf package says NotImplementedError."""
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted_folder(write_gguf("llama", toy, quantized={"up_proj": gguf.GGMLQuantizationType.I8}), torch.float32)


def test_a_file_without_tensors(write_gguf):
    """llama.cpp keeps files of a vocabulary alone."""
    with pytest.raises(UserError):
        converted_folder(write_gguf("llama"), torch.float32)


# The tokenizer

DIGITS = ("1 2", "12 3", "123 4", "Ġ 1", "Ġ1 2", "a b", "Ġ ab", "' M", "' m")
SPLITS = {
    "gpt-2": ["abc", "Ġ1234", "Ġ", "ĠI", "'", "M", "Ġit", "'s", "!!", "Ċ", "Ċ", "x"],
    "smollm": ["abc", "Ġ", "1", "2", "3", "4", "Ġ", "ĠI", "'", "M", "Ġit", "'s", "!!", "Ċ", "Ċ", "x"],
    "llama-bpe": ["abc", "Ġ", "123", "4", "Ġ", "ĠI", "'M", "Ġit", "'s", "!!ĊĊ", "x"],
    "qwen2": ["abc", "Ġ", "1", "2", "3", "4", "Ġ", "ĠI", "'M", "Ġit", "'s", "!!ĊĊ", "x"],
}
TEXTS = [
    "abc 1234  I'M it's!!\n\nx",
    "",
    " ",
    "   three spaces, tab\tand\r\nline ends \n\n ",
    "naïve café, Ünïcödé, 東京 2024年, \U0001f600\U0001f1e9\U0001f1ea e\u0301",
    "x = f(a[0], **{'k': 1e-5}) # ½ ² Ⅷ",
    "\x00\x7f\ufffd\u2028",
]


def load_tokenizer(path):
    folder = converted_folder(path, torch.float32)
    return Tokenizer.load(folder), folder


@pytest.mark.parametrize("pre", SPLITS)
def test_splits(write_gguf, toy, pre):
    """Where text is cut before the merges: smollm and qwen2 digit by digit, llama-bpe by threes, gpt-2 not at all."""
    _, folder = load_tokenizer(write_gguf("llama", toy, pre=pre, merges=DIGITS))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(TEXTS[0])] == SPLITS[pre]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["Ġ", "1234"]),
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("default", ["Ġ", "1234"]),
    ],
)
def test_merges_stay_inside_the_splits(write_gguf, toy, pre, tokens):
    """And happen in the order of their ranks: the blank finds nothing left to merge with."""
    tokenizer, _ = load_tokenizer(
        write_gguf("llama", toy, pre=pre, merges=("1 2", "12 3", "Ġ 12", "123 4"), add_bos=False)
    )
    (ids,) = tokenizer.encode([" 1234"])
    assert [tokenizer.backend.id_to_token(i) for i in ids] == tokens


@pytest.mark.parametrize("pre", SPLITS)
def test_round_trip(write_gguf, toy, pre):
    """Any text comes back as it was, byte by byte if need be; transformers reads the same ids from the folder."""
    tokenizer, folder = load_tokenizer(write_gguf("llama", toy, pre=pre, merges=DIGITS, add_bos=False))
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    reference = AutoTokenizer.from_pretrained(folder)
    assert [reference(text)["input_ids"] for text in TEXTS] == encoded
    assert [reference.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded] == TEXTS


@pytest.mark.parametrize("pre", SPLITS)
def test_special_tokens_are_not_split(write_gguf, toy, pre):
    """Each is one id wherever it stands; a control token is no text, one that the user defined is."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre=pre, add_bos=False))
    (ids,) = tokenizer.encode(["<|begin|>ab<tool> <|end|><|end|>"])
    token = tokenizer.backend.token_to_id
    assert ids == [BOS, token("ab"), 302, token("Ġ"), END, END]
    assert tokenizer.decode(ids) == "ab<tool> "


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos(write_gguf, toy, add_bos):
    """As the file says: a prompt gets it, a chat only from its template."""
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, add_bos=add_bos, template=template))
    ab = tokenizer.backend.token_to_id("ab")
    assert tokenizer.encode(["ab"]) == [[BOS, ab] if add_bos else [ab]]
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab"}]]) == [[BOS, ab, END]]


def test_bos_of_llama_3(write_gguf, toy):
    """llama.cpp adds it for this pre-tokenizer unless the file says no; most files say nothing."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre="llama-bpe"))
    assert tokenizer.encode(["a"]) == [[BOS, tokenizer.backend.token_to_id("a")]]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False), ("qwen2", False)])
def test_words_that_merges_do_not_reach(write_gguf, toy, pre, whole):
    """Llama 3 takes a whole word of its vocabulary before any merge (``ignore_merges``), the others do not."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre=pre, words=("xyz",), add_bos=False))
    (ids,) = tokenizer.encode(["xyz"])
    assert [tokenizer.backend.id_to_token(i) for i in ids] == (["xyz"] if whole else ["x", "y", "z"])


@pytest.mark.parametrize(("more", "named"), [({"pre": "deepseek-llm"}, "'deepseek-llm'"), ({"kind": "bert"}, "'bert'")])
def test_an_unknown_tokenizer(write_gguf, toy, more, named):
    """Wrong splits give worse answers without an error to see, so an unknown kind is refused."""
    with pytest.raises(UserError, match=named):
        converted_folder(write_gguf("llama", toy, **more), torch.float32)


def test_a_file_without_a_tokenizer(write_gguf, toy, monkeypatch):
    """Some have none; that too is one line."""
    monkeypatch.setitem(globals(), "add_tokenizer", lambda writer, **more: None)
    with pytest.raises(UserError):
        converted_folder(write_gguf("llama", toy), torch.float32)


@pytest.mark.parametrize("missing", ["add_token_list", "add_token_merges"])
def test_half_a_tokenizer(write_gguf, toy, monkeypatch, missing):
    """One line, not a TypeError about None."""
    monkeypatch.setattr(gguf.GGUFWriter, missing, lambda self, values: None)
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted_folder(write_gguf("llama", toy), torch.float32)


@pytest.mark.parametrize("broken", ["text", "id"])
def test_broken_metadata(write_gguf, toy, monkeypatch, broken):
    """A file with a few wrong bytes: a token that is not UTF-8, an end token behind the vocabulary."""
    if broken == "id":
        add_eos = gguf.GGUFWriter.add_eos_token_id
        monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda self, token_id: add_eos(self, 10**6))
    path = write_gguf("llama", toy)
    if broken == "text":
        content = path.read_bytes()
        assert content.count(b"[PAD299]") == 1
        path.write_bytes(content.replace(b"[PAD299]", b"[PAD\xff99]"))
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted_folder(path, torch.float32)


def test_a_sentencepiece_tokenizer(write_gguf, toy, monkeypatch):
    """Llama 2's kind, converted by transformers: words begin with a blank, unknown characters become bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 5

    def add_sentencepiece(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(5)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")

    monkeypatch.setitem(globals(), "add_tokenizer", add_sentencepiece)
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy))
    ids = tokenizer.encode(["ab", "ab é", "a  b"])
    assert ids[0] == [1, tokens.index("▁ab")]
    assert ids[1] == [1, tokens.index("▁ab"), tokens.index("▁"), 3 + 0xC3, 3 + 0xA9]
    assert [tokenizer.decode(i) for i in ids] == ["ab", "ab é", "a  b"]
    (chat,) = tokenizer.encode_chats([[{"role": "user", "content": "ab"}]])
    assert (chat[0], chat[-1]) == (1, 2)
