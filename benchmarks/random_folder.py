"""A model folder with random weights and a real tokenizer, which all engines read alike."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rosebatch.config.model import ModelConfig
from rosebatch.model.hf.folder import write_config

_SPREAD = 0.02
# A prime, so rows of a matrix differ.
_NUMBERS = 16_777_213


def write_random_folder(config: ModelConfig, tokenizer: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a shape.

    Args:
        config: the shape. The end token becomes the tokenizer's.
        tokenizer: a folder with ``tokenizer.json`` and ``tokenizer_config.json``. It may know fewer tokens than the
            shape has.
        folder: does not exist.

    Raises:
        UserError: transformers has no such architecture.
    """
    folder.mkdir(parents=True)
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    values = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    fill_vocabulary(vocabulary, config.vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    end = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    write_config(msgspec.structs.replace(config, eos_token_ids=(vocabulary[end],)), folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    save_file(random_weights(model, getattr(torch, config.dtype)), folder / "model.safetensors", {"format": "pt"})


def fill_vocabulary(vocabulary: dict[str, int], size: int) -> None:
    """Add pairs of its tokens until it has ``size``: no text is encoded to them, and they decode to text.

    Without them, most of what random weights generate would have no text.
    """
    words = [token for token in vocabulary if token[1:].isascii() and token[1:].isalpha()]
    assert size < len(vocabulary) + len(words) ** 2 // 2, "there are enough pairs to choose from"
    numbers = random.Random(0)
    while len(vocabulary) < size:
        vocabulary.setdefault("".join(numbers.choices(words, k=2)), len(vocabulary))


def random_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Those of a model, normal with the usual spread; norms are 1, biases 0.

    All are copies of the same numbers, begun elsewhere each time: a processor draws 100 million a second.
    """
    numbers = torch.empty(_NUMBERS, dtype=dtype).normal_(0, _SPREAD, generator=torch.Generator().manual_seed(0))
    weights, place = {}, 0
    for name, parameter in model.named_parameters():
        weight = weights[name] = torch.empty(parameter.shape, dtype=dtype)
        if weight.dim() == 1:
            weight.fill_(name.endswith("weight"))
            continue
        for part in weight.view(-1).split(_NUMBERS // 16):
            first = place % (_NUMBERS - len(part))
            part.copy_(numbers[first : first + len(part)])
            place += len(part)
    return weights
