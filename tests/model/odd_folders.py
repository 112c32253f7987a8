"""Model folders in which one thing is odd: the smallest good folders, and all that may be wrong with their files."""

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.launch.launch import default_sampling, load
from rosebatch.launch.plan import plan_launch
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.ops.select import select
from tests.helpers.waiting import PATIENCE_SECONDS

CPU = torch.device("cpu")
# 256 bytes and an end token.
VOCAB = 257
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": {
        **{key: value for key, value in _LLAMA.items() if key != "rope_parameters"},
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 24,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "eos_token_id": 256,
        "dtype": "float32",
    },
    "hp1": {
        **{key: value for key, value in _LLAMA.items() if key not in ("rms_norm_eps", "rope_parameters")},
        "architectures": ["HP1ForCausalLM"],
        "model_type": "hp1",
        "hidden_act": "relu",
        "rope_theta": 10000.0,
        "fir_k": 3,
        "relu_pre": True,
        "clip_min": 0.0,
        "clip_max": 1.0,
    },
}
GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 8,
    "eos_token_id": [256],
}
TOKENIZER_CONFIG = {"chat_template": TEMPLATE, "bos_token": "<eos>", "eos_token": {"content": "<eos>", "lstrip": False}}

DEEP = 100_000
# In JSON's own spelling, for json.dumps cannot write all of them.
ODD_VALUES = {
    "null": "null",
    "true": "true",
    "text": '"x\\u0000\\u001b[31m\\n\\ud800"',
    "huge-text": json.dumps("x" * 100_000),
    "number-as-text": '"16"',
    "negative": "-1",
    "zero": "0",
    "fraction": "1.5",
    "nan": "NaN",
    "infinity": "Infinity",
    "minus-infinity": "-Infinity",
    "2^31": str(2**31),
    "2^40": str(2**40),
    "2^63": str(2**63),
    "10^4000": "1" + "0" * 4000,
    "10^5000": "1" + "0" * 5000,
    "1e308": "1e308",
    "list": "[]",
    "list-of-null": "[null]",
    "long-list": json.dumps(list(range(10_000))),
    "object": "{}",
}


class TooLongError(BaseException):
    """Not an Exception: nothing may handle it."""


class Case(NamedTuple):
    """A folder of ``kind`` in which ``change`` makes ``file`` odd."""

    name: str
    kind: str
    file: str
    change: Callable[[Path], None]


def outcome(model: Path, **options: Any) -> str | None:
    """Load a model and answer a prompt; the line of a refusal, or None."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    try:
        plan = plan_launch(RunConfig(model=str(model), device="cpu", kv_cache_memory="1MiB", max_num_seqs=2, **options))
        default_sampling(plan)
        launched = load(plan)
        if launched.tokenizer is not None:
            launched.tokenizer.encode(["hi"])
            launched.tokenizer.encode_chats([[{"role": "user", "content": "hi"}]])
    except UserError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def write_good(kind: str, folder: Path) -> None:
    """A folder of all files, as small as they get."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    recorded = _Recorder()
    build_model(
        parse_model_config(CONFIGS[kind], kind), select(Switches.resolve({}, "cpu"), "cpu", "rosebatch"), recorded
    )
    save_file(recorded.tensors, folder / "model.safetensors")


class _Recorder(RandomWeights):
    """Keeps every tensor that a model asks for."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        self.tensors[name] = super().get(name, shape, **options).contiguous()
        return self.tensors[name]


def cases() -> Iterator[Case]:
    """All of them, each once."""
    for kind, config in CONFIGS.items():
        # What the kinds share is tried on one of them.
        keys = config if kind == "llama" else config.keys() - _LLAMA.keys()
        yield from _odd_values(kind, "config.json", sorted(keys))
    yield from _odd_values("llama", "config.json", sorted(_LLAMA["rope_parameters"]), ("rope_parameters",))
    yield from _odd_values("llama", "generation_config.json", sorted(GENERATION))
    yield from _odd_values("llama", "tokenizer_config.json", [*TOKENIZER_CONFIG, "auto_map", "tokenizer_class"])
    yield from _odd_values("llama", "tokenizer.json", ["version", "added_tokens", "normalizer", "decoder", "model"])
    yield from _odd_values("llama", "tokenizer.json", ["truncation", "padding", "pre_tokenizer", "post_processor"])
    yield from _odd_values("llama", "tokenizer.json", ["type", "vocab", "merges", "unk_token", "dropout"], ("model",))
    yield from _odd_tokenizers()
    json_files = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX)
    for file in (*json_files, "chat_template.jinja", "model.safetensors"):
        yield from _odd_files(file)
    yield from _odd_indexes()
    yield from _odd_weights()


INDEX = "model.safetensors.index.json"


def _odd_values(kind: str, file: str, keys: list[str], within: tuple[str, ...] = ()) -> Iterator[Case]:
    def setting(key: str, text: str | None) -> Callable[[Path], None]:
        def change(path: Path) -> None:
            values = json.loads(path.read_text())
            place = values
            for name in within:
                place = place[name]
            place.pop(key, None)
            if text is not None:
                place[key] = "@here@"
            path.write_text(json.dumps(values).replace('"@here@"', text or ""))

        return change

    for key in keys:
        for name, text in (("missing", None), *ODD_VALUES.items()):
            yield Case(f"{'.'.join((*within, key))}-{name}", kind, file, setting(key, text))


def _odd_tokenizers() -> Iterator[Case]:
    def part(**changes: Any) -> Callable[[Path], None]:
        return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    token = {"id": 256, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": True}
    for name, changes in {
        "token-id-2^31": {"added_tokens": [{**token, "id": 2**31}]},
        "token-id-2^32": {"added_tokens": [{**token, "id": 2**32}]},
        "token-without-text": {"added_tokens": [{**token, "content": ""}]},
        "tokens-twice": {"added_tokens": [token, token]},
        "padding-to-2^40": {
            "padding": {
                "strategy": {"Fixed": 2**40},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        "truncation-stride": {
            "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 100}
        },
        "bad-regex": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
        },
        "bad-charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "vocab-2^31": {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}},
        "vocab-2^32-1": {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
        "vocab-twice": {"model": {"type": "BPE", "vocab": {"a": 1, "b": 1}, "merges": []}},
        "merge-of-three": {"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["a a a"]}},
        "merge-of-one": {"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["a"]}},
        "merge-unknown": {"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["a b"]}},
        "merge-without-result": {"model": {"type": "BPE", "vocab": {"a": 1, "b": 2}, "merges": ["a b"]}},
        "unigram-without-scores": {"model": {"type": "Unigram", "vocab": [["a"]], "unk_id": 0}},
        "unigram-unknown": {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 2**40}},
        "unigram-empty": {"model": {"type": "Unigram", "vocab": [], "unk_id": 0}},
        "unigram-nan": {"model": {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 0}},
        "wordlevel": {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}},
        "deep-normalizer": {"normalizer": _nest({"type": "Lowercase"}, 60)},
        "strip-2^63": {"decoder": {"type": "Strip", "content": " ", "start": 2**63, "stop": 2**63}},
        "template-processor": {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    }.items():
        yield Case(name, "llama", "tokenizer.json", part(**changes))


def _nest(inner: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "Sequence", "normalizers": [inner]}
    return inner


def _odd_files(file: str) -> Iterator[Case]:
    def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
        def change(path: Path) -> None:
            path.unlink(missing_ok=True)
            make(path)

        return change

    contents = {
        "empty": b"",
        "zeros": bytes(1000),
        "junk": bytes(range(256)) * 10,
        "bad-utf-8": b'{"a": "\xff\xfe"}',
        "utf-16": '{"a": 1}'.encode("utf-16"),
        "null": b"null",
        "number": b"1" * 5000,
        "list": b"[1, 2]",
        "object": b"{}",
        "cut": b'{"a": [1, ',
        "deep-lists": b"[" * DEEP,
        "deep-objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "twice": b'{"a": 1, "a": 2}',
        "escapes": b"\x1b[31m\r\n\x07" * 100,
    }
    for name, content in contents.items():
        yield Case(name, "llama", file, replaced(lambda path, content=content: path.write_bytes(content)))
    yield Case("cut-in-half", "llama", file, _cut_in_half)
    yield Case("fifo", "llama", file, replaced(os.mkfifo))
    yield Case("folder", "llama", file, replaced(Path.mkdir))
    yield Case("loop", "llama", file, replaced(lambda path: path.symlink_to(path.name)))
    yield Case("dangling", "llama", file, replaced(lambda path: path.symlink_to("nowhere")))
    yield Case("device", "llama", file, replaced(lambda path: path.symlink_to("/dev/zero")))
    if os.geteuid():
        yield Case("no-permission", "llama", file, lambda path: path.exists() and path.chmod(0))


def _cut_in_half(path: Path) -> None:
    if path.exists():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _odd_indexes() -> Iterator[Case]:
    def index(values: Any) -> Callable[[Path], None]:
        return lambda path: path.write_text(json.dumps(values))

    for name in ODD_VALUES:
        text = ODD_VALUES[name]
        yield Case(f"map-{name}", "llama", INDEX, lambda path, t=text: path.write_text(f'{{"weight_map": {t}}}'))
        yield Case(
            f"shard-{name}", "llama", INDEX, lambda path, t=text: path.write_text(f'{{"weight_map": {{"a": {t}}}}}')
        )
    for name in (
        *("../model.safetensors", "../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "..", ".", ""),
        *("./model.safetensors", "sub/model.safetensors", "pytorch_model.bin", "a" * 5000 + ".safetensors"),
        *("a\0.safetensors", "\ud800.safetensors", "\x1b[2J.safetensors", "none.safetensors"),
    ):
        yield Case(f"shard-{name[:30]!r}", "llama", INDEX, index({"weight_map": {"model.norm.weight": name}}))

    def fifo(path: Path) -> None:
        os.mkfifo(path.with_name("pipe.safetensors"))
        index({"weight_map": {"a": "pipe.safetensors"}})(path)

    yield Case("shard-is-a-fifo", "llama", INDEX, fifo)


def _odd_weights() -> Iterator[Case]:
    def header(text: bytes, size: int | None = None, rest: int = 64) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(
            struct.pack("<Q", len(text) if size is None else size) + text + bytes(rest)
        )

    def tensor(**entry: Any) -> Callable[[Path], object]:
        good = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
        return header(json.dumps({"model.norm.weight": {**good, **entry}}).encode())

    def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], object]:
        def rewrite(path: Path) -> None:
            from safetensors.torch import load_file

            found = load_file(path)
            change(found)
            save_file(found, path)

        return rewrite

    name = "model.embed_tokens.weight"
    for what, change in {
        "header-2^63": header(b"{}", 2**63),
        "header-2^64-1": header(b"{}", 2**64 - 1),
        "header-2^40": header(b"{}", 2**40),
        "header-100-mb": header(b"{}", 100 << 20),
        "header-empty": header(b""),
        "header-no-object": header(b"[]"),
        "header-deep": header(b'{"a":' * DEEP),
        "header-bad-utf-8": header(b'{"\xff": 1}'),
        "shape-2^63": tensor(shape=[2**63]),
        "shape-product": tensor(shape=[2**32, 2**32]),
        "shape-negative": tensor(shape=[-1]),
        "shape-null": tensor(shape=None),
        "shape-deep": tensor(shape=[1] * 10_000),
        "offsets-swapped": tensor(data_offsets=[64, 0]),
        "offsets-behind": tensor(data_offsets=[0, 2**40]),
        "offsets-missing": tensor(data_offsets=[]),
        "dtype-unknown": tensor(dtype="F3"),
        "dtype-null": tensor(dtype=None),
        "another-shape": tensors(lambda t: t.update({name: t[name][:-1].clone()})),
        "scalar": tensors(lambda t: t.update({name: torch.tensor(1.0)})),
        "no-tensor": tensors(lambda t: t.pop(name)),
        "no-tensors": tensors(lambda t: t.clear()),
        "integers": tensors(lambda t: t.update({name: t[name].to(torch.int64)})),
        "booleans": tensors(lambda t: t.update({name: t[name] > 0})),
        "float8": tensors(lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)})),
        "complex": tensors(lambda t: t.update({name: t[name].to(torch.complex64)})),
    }.items():
        yield Case(what, "llama", "model.safetensors", change)
