"""Small random models, saved by transformers or ``PlainHP1``, and engines that run them on the GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.engine.engine import Engine
from rosebatch.engine.triton_runner.graphs import StepGraphs
from rosebatch.model.source import find_model
from tests.gpu.sync_mode import sync_mode
from tests.helpers.families import FAMILIES, MODELS, reference_options
from tests.helpers.plain_hp1 import Forms, PlainHP1
from tests.helpers.reference import generate
from tests.helpers.tiny_engines import engine_of, random_model

_HP1 = MODELS["hp1"][1]
_FAMILIES = {
    **{name: MODELS[name.lower()] for name in ("GPT2", "Llama", "Mistral", "Qwen2")},
    "Qwen3": ("Qwen3Config", {**MODELS["qwen3"][1], "tie_word_embeddings": False}),
    "HP1": ("HP1", _HP1),
    "HP1 options": ("HP1", {**_HP1, "fir_k": 5, "relu_pre": False, "clip_min": -0.2, "clip_max": 0.4}),
}
# What the weights of a family decide by their shapes.
_FORMS = {"HP1 options": Forms("mixed", "mixed", "taps")}


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(scope="session")
def saved_model(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> the folder of a random fp32 model, made on first use.

    With " calm" behind a family its weights are as small as ``transformers`` initialises them. Large ones make more of
    a rounding error, and have a model take other experts.
    """
    folders: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            if family.startswith("HP1"):
                PlainHP1.random(_FAMILIES[family][1], forms=_FORMS.get(family)).save_pretrained(folders[family])
                return folders[family]
            name, calm = family.removesuffix(" calm"), family.endswith(" calm")
            kind, values = {**FAMILIES, **_FAMILIES}[name]
            tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
            config = getattr(transformers, kind)(
                **{"initializer_range": 0.2, **tokens, **values, **({"initializer_range": 0.02} if calm else {})}
            )
            random_model(config, plain=True).save_pretrained(folders[family])
        return folders[family]

    return save


@pytest.fixture(scope="session")
def reference(
    transformers: Any, saved_model: Callable[[str], Path], device: torch.device
) -> Callable[..., tuple[list[list[int]], torch.Tensor]]:
    """The greedy tokens of transformers or ``PlainHP1``, and their logits ``[prompts, tokens, V]``, fp32 on the CPU."""

    def greedy_of(
        family: str, dtype: torch.dtype, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[list[list[int]], torch.Tensor]:
        model: Any
        if family.startswith("HP1"):
            model = PlainHP1.from_pretrained(saved_model(family), dtype, device)
        else:
            # PyTorch's own attention has no soft caps, and some versions of transformers leave them out there. Its
            # grouped products take no odd sizes.
            own = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
            model = transformers.AutoModelForCausalLM.from_pretrained(saved_model(family), **own).eval().to(device)
        tokens, scores = generate(model, prompts, new_tokens, lambda length: reference_options(family))
        return tokens, torch.stack(scores)

    return greedy_of


@pytest.fixture(scope="session")
def model_config(saved_model: Callable[[str], Path], device: torch.device) -> Callable[[str], ModelConfig]:
    """Family -> the shape of its model."""
    return lambda family: find_model(RunConfig(model=str(saved_model(family)), dtype="float32"), device).config


@pytest.fixture
def captures_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured once. Before that PyTorch waits for the device."""
    capture = StepGraphs._capture

    def unwatched(self: Any, kind: Any) -> Any:
        with sync_mode("default"):
            return capture(self, kind)

    monkeypatch.setattr(StepGraphs, "_capture", unwatched)


@pytest.fixture(scope="session")
def make_engine(saved_model: Callable[[str], Path], device: torch.device) -> Callable[..., Engine]:
    """Makes an engine on a family's model, with limits and with switches by name."""

    def make(
        family: str, dtype: torch.dtype, switches: dict[str, bool] | None = None, *, seqs: int, **limits: int
    ) -> Engine:
        name = str(dtype).removeprefix("torch.")
        limits = limits if limits.get("blocks") else {"kv_cache_memory": 1 << 28, **limits}
        return engine_of(saved_model(family), name, device.type, switches=switches, max_num_seqs=seqs, **limits)

    return make
