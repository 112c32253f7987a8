"""Tiny random encoders of transformers, and prompts for them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.families import ENCODERS

_LENGTHS = (1, 2, 9, 16, 47, 100, 16, 9, 120)


def save_encoder(name: str, folder: Path) -> Any:
    """The model of ``ENCODERS``, always the same, in fp32; its folder is written."""
    import transformers

    kind, values = ENCODERS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values, initializer_range=0.2)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if key.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    if values.get("use_bidirectional_attention"):
        # transformers halves the window whenever it makes a config.
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, "sliding_window": values["sliding_window"]}))
    return model


def prompts_of(vocab: int) -> list[list[int]]:
    """Of several lengths, some of them equal; one ends like another. None has the padding token."""
    numbers = random.Random(0)
    prompts = [[numbers.randrange(6, vocab) for _ in range(length)] for length in _LENGTHS * 2]
    return [*prompts[:-1], prompts[8][:70] + prompts[-1][70:]]
