"""Folders of adapters that are given as models."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.model.source import find_model


def write(folder, *files):
    """An adapter's config, and other files of a folder."""
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for file in files:
        if file.endswith(".json"):
            (folder / file).write_text("{}")
        else:
            save_file({"a": torch.zeros(1)}, folder / file)


@pytest.mark.parametrize(
    "files",
    [
        ("adapter_model.safetensors",),
        ("adapter_model.safetensors", "config.json"),
        ("adapter_model-00001-of-00002.safetensors", "config.json"),
        (),
    ],
)
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_an_adapter_is_no_model(tmp_path, files, model_impl):
    """Beside config.json its tensors were read as the model's: "weights have no tensor 'model.embed_tokens.weight'"."""
    write(tmp_path, *files)
    with pytest.raises(UserError, match=r"adapter_config\.json: the folder holds an adapter alone: .*'org/base'"):
        find_model(RunConfig(model=str(tmp_path), model_impl=model_impl), torch.device("cpu"))


@pytest.mark.parametrize("other", ["model.safetensors", "other.safetensors"])
def test_a_model_may_have_an_adapter_beside_it(tmp_path, other):
    """Its own weights are there."""
    write(tmp_path, "adapter_model.safetensors", "config.json", other)
    with pytest.raises(UserError, match=r"/config\.json: "):
        find_model(RunConfig(model=str(tmp_path)), torch.device("cpu"))
