"""How a run is set up, and how its settings look on the command line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from rosebatch.config.byte_sizes import in_bytes, parse_size
from rosebatch.config.quantization import quantization_named
from rosebatch.config.switches import SWITCH_NAMES
from rosebatch.core.words import quoted

Speculative = Literal["auto", "off"]
Sampler = Literal["rosebatch", "flashinfer"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
KVCacheDType = Literal["auto", "fp8", "none"]
# Other tools' names of dtypes.
DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
KV_CACHE_DTYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8"}
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "rosebatch", "transformers"]
InputFormat = Literal["auto", "jsonl", "json", "openai", "parquet", "arrow", "csv"]
GenerationConfig = Literal["none", "auto"]
ToolCallParser = Literal["auto", "gpt_oss", "hermes", "llama3", "mistral", "qwen3_coder"]
ReasoningParser = Literal["auto", "none", "gpt_oss", "mistral", "think"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field of a config looks on the command line; ``rosebatch.cli.options`` makes flags of these.

    Attributes:
        help: one line for people.
        panel: of the help text.
        names: where the flag is not called like the field.
        minimum: of a number.
        metavar: of the value.
        rare: whether only ``--help-all`` shows it.
    """

    help: str
    panel: str = ""
    names: tuple[str, ...] = ()
    minimum: int | None = None
    metavar: str | None = None
    rare: bool = False


# Said where nobody chose a model.
DEMO_ANSWERS = "the demo model answers, which is for trying out"
# A day. Longer ones would overflow a timer.
MAX_GRAMMAR_SECONDS = 86_400
# Workers show a sign of life once a second.
MIN_WORKER_TIMEOUT = 3

MODEL, SAMPLING, LIMITS, SWITCHES = "Model", "Sampling", "Limits", "Switches (on by default)"
DEVICES = "Several GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Which model runs, on what, and within which limits. Filled by the command line or by Python, handed down whole.

    Attributes:
        switches: by name, True or False; others have their defaults. See ``config.switches.Switches``.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    model: Annotated[str | None, Flag("Hub id, folder, .gguf or .toml.", MODEL)] = None
    revision: Annotated[str | None, Flag("Branch, tag or commit of a hub id.", MODEL)] = None
    lora: Annotated[tuple[str, ...], Flag("A LoRA adapter; several: rows choose.", MODEL, metavar="NAME=FOLDER")] = ()
    dtype: Annotated[DType, Flag("float32, float16 or bfloat16.", MODEL, metavar="DTYPE")] = "auto"
    quantization: Annotated[str, Flag("auto, fp8 (at load) or none.", MODEL, metavar="FORM")] = "auto"
    device: Annotated[Device, Flag("Default: the GPU if there is one.", MODEL)] = "auto"
    load_format: Annotated[LoadFormat, Flag("'dummy' runs random weights.", MODEL, rare=True)] = "auto"
    model_impl: Annotated[
        ModelImpl, Flag("'transformers' runs any decoder by transformers' own code.", MODEL, rare=True)
    ] = "auto"
    tokenizer: Annotated[str | None, Flag("Folder or hub id of another tokenizer.", MODEL, rare=True)] = None
    chat_template: Annotated[
        str | None, Flag("Jinja file in place of the model's template.", MODEL, metavar="FILE", rare=True)
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser, Flag("How the model writes tool calls. Default: by its template.", MODEL, rare=True)
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, Flag("How chats write reasoning. Default: by the model's template.", MODEL, rare=True)
    ] = "auto"
    served_model_name: Annotated[str | None, Flag("The model's name in reports and responses.", MODEL, rare=True)] = (
        None
    )
    generation_config: Annotated[GenerationConfig, Flag("'auto': the model's defaults.", SAMPLING)] = "none"
    sampler: Annotated[
        Sampler, Flag("'flashinfer' needs that package. Sampled answers then depend on the batch.", SAMPLING, rare=True)
    ] = "rosebatch"
    speculative: Annotated[
        Speculative,
        Flag("'off' computes each token by a step of its own.", LIMITS, rare=True),
    ] = "auto"
    speculative_model: Annotated[
        str | None,
        Flag("Folder or hub id of an EAGLE-3 head, which drafts tokens. On a CPU.", LIMITS, metavar="MODEL", rare=True),
    ] = None
    data_parallel_size: Annotated[
        int | Literal["auto"],
        Flag(
            "Workers, one GPU each; auto: all GPUs. Default: 1.",
            DEVICES,
            ("--data-parallel-size", "-dp"),
            metavar="N|auto",
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int, Flag("GPUs per model. Default: 1.", DEVICES, ("--tensor-parallel-size", "-tp"), metavar="N")
    ] = 1
    ray: Annotated[
        str | None,
        Flag(
            "Run the workers on a Ray cluster: its address, auto, or local.",
            DEVICES,
            metavar="ADDRESS|auto|local",
            rare=True,
        ),
    ] = None
    worker_timeout: Annotated[
        float, Flag("Restart a worker after this many seconds without a heartbeat.", DEVICES, rare=True)
    ] = 600.0
    max_model_len: Annotated[int | None, Flag("Max tokens of prompt and answer.", LIMITS)] = None
    max_prompt_bytes: Annotated[
        str | int, Flag("Max size of a prompt. Default: 8MiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "8MiB"
    max_num_seqs: Annotated[
        int | Literal["auto"],
        Flag("Max concurrent sequences. Default: by memory; in bench 256.", LIMITS, metavar="N|auto"),
    ] = "auto"
    max_loras: Annotated[
        int | None, Flag("Max adapters of a step, which a GPU holds. Default: all that fit.", LIMITS, rare=True)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Flag("Max tokens in a step. Default: 16384 on a GPU, 1024 on a CPU.", LIMITS, rare=True)
    ] = None
    block_size: Annotated[
        int | None, Flag("Tokens per KV cache block. Default: 64 on a GPU, 16 on a CPU.", LIMITS, rare=True)
    ] = None
    limit_images: Annotated[
        int | None, Flag("Max images of a row; 0 keeps no memory for them. Default: 32.", LIMITS, rare=True)
    ] = None
    max_pixels: Annotated[
        int | None, Flag("Max pixels of an image, such as 1000000. Default: the model's own.", LIMITS, rare=True)
    ] = None
    kv_cache_memory: Annotated[
        str | int | None, Flag("Size of the KV cache, such as 4GiB.", LIMITS, metavar="SIZE")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType, Flag("'fp8' halves the KV cache; 'none' never does. Default: by the model.", LIMITS, rare=True)
    ] = "auto"
    gpu_memory_utilization: Annotated[float, Flag("Share of GPU memory. Default: 0.9.", LIMITS)] = 0.9
    max_inflight_bytes: Annotated[
        str | int, Flag("Host memory for rows in flight. Default: 1GiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "1GiB"
    grammar_timeout: Annotated[
        float, Flag("Max seconds to compile a row's schema or regex. Default: 10.", LIMITS, rare=True)
    ] = 10.0
    grammar_memory: Annotated[
        str | int, Flag("Max memory to compile one. Default: 2GiB.", LIMITS, metavar="SIZE", rare=True)
    ] = "2GiB"
    switches: Mapping[str, bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _KINDS:
            # As of a shell's variable that is not set.
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {quoted(getattr(self, name))}")
        for name, kind in _KINDS.items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from None
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not self.worker_timeout >= MIN_WORKER_TIMEOUT:
            raise ValueError(f"worker_timeout must be >= {MIN_WORKER_TIMEOUT}, got {self.worker_timeout}")
        if not 0 < self.grammar_timeout <= MAX_GRAMMAR_SECONDS:
            raise ValueError(f"grammar_timeout must be in (0, {MAX_GRAMMAR_SECONDS}], got {self.grammar_timeout}")
        for name, minimum in _MIN_SIZES.items():
            if in_bytes(value := getattr(self, name), name) < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {value}")
        quantization_named(self.quantization)
        for adapter in self.lora:
            if not all(adapter.partition("=")):
                raise ValueError(f"lora must be NAME=FOLDER or NAME=ORG/NAME, got {quoted(adapter)}")
        names = [adapter.partition("=")[0] for adapter in self.lora]
        if again := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"lora must give each adapter a name of its own, {quoted(again[0])} is there twice")
        if isinstance(self.kv_cache_memory, str):
            parse_size(self.kv_cache_memory, "kv_cache_memory")

    @classmethod
    def of(cls, model: str | None, also: Iterable[str] = (), **settings: Any) -> "RunConfig":
        """From keywords: fields, and switches by name. None stands for the default.

        Args:
            model: see the field.
            also: parameters of the caller, one of which may have been meant.
            settings: the keywords.

        Raises:
            ValueError: there is no such setting, or its value is impossible.
        """
        own = {f.name for f in fields(cls)} - {"model", "switches"}
        switches = {name: value for name, value in settings.items() if name in SWITCH_NAMES}
        unknown = settings.keys() - own - switches.keys()
        if unknown:
            name = min(unknown)
            near = get_close_matches(name, ["model", *own, *SWITCH_NAMES, *also], n=1)
            raise ValueError(f"unknown setting {name}" + (f"; did you mean {near[0]}?" if near else ""))
        for name, value in switches.items():
            if not isinstance(value, bool | None):
                raise ValueError(f"{name} must be True or False, got {quoted(value)}")
        if isinstance(adapters := settings.get("lora"), Mapping):
            if odd := [name for name in adapters if "=" in str(name)]:
                raise ValueError(f"lora: the name {quoted(odd[0])} must have no =, which would end it in NAME=FOLDER")
            settings["lora"] = tuple(f"{name}={folder}" for name, folder in adapters.items())
        elif isinstance(adapters, str):
            settings["lora"] = (adapters,)
        values: dict[str, Any] = {
            n: str(v) if isinstance(v, Path) else v for n, v in settings.items() if n in own and v is not None
        }
        return cls(model=model, switches=switches, **values)

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        return None if self.kv_cache_memory is None else in_bytes(self.kv_cache_memory)


_KINDS = {f.name: f.type for f in fields(RunConfig)}
_MINIMA = {
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_loras": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "limit_images": 0,
    "max_pixels": 1,
    "kv_cache_memory": 0,
}
# In bytes; a smaller one would be a mistake.
_MIN_SIZES = {"max_prompt_bytes": 1, "max_inflight_bytes": 2**20, "grammar_memory": 2**20}
_CHOICES = {
    name: get_args(kind)
    for name, kind in {
        "dtype": DType,
        "kv_cache_dtype": KVCacheDType,
        "speculative": Speculative,
        "device": Device,
        "load_format": LoadFormat,
        "model_impl": ModelImpl,
        "generation_config": GenerationConfig,
        "sampler": Sampler,
    }.items()
}
