"""Fields of adapter_config.json: each that changes what is computed is honoured, or refused by its name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.adapters.adapter import read_adapter
from tests.model.adapters.written import numbers, pair, write_adapter

# As PEFT 0.21 writes them.
DEFAULTS = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config")),
    **dict.fromkeys(("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform")),
    **dict.fromkeys(("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision")),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), False),
    "alpha_pattern": {},
    "rank_pattern": {},
    "loftq_config": {},
    "use_rslora": False,
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "task_type": "CAUSAL_LM",
    "target_modules": ["proj"],
}


def read(tmp_path, tensors=None, **fields):
    """An adapter of these tensors and fields."""
    return read_adapter("a", write_adapter(tmp_path, tensors or pair("a.proj", 6, 4)[0], **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        DEFAULTS,
        *({**DEFAULTS, "init_lora_weights": each} for each in (False, "gaussian", "eva", "orthogonal", "lora_ga")),
        {**DEFAULTS, "layers_to_transform": [1], "target_modules": "all-linear", "exclude_modules": "x"},
    ],
)
def test_what_changes_nothing(tmp_path, fields):
    """Tensors say it, or it was of the training."""
    found = read(tmp_path, **fields)
    assert (list(found.changes), found.stored, found.experts) == (["a.proj.weight"], {}, {})
    assert sorted(found.tensor_names) == [f"base_model.model.a.proj.lora_{end}.weight" for end in "AB"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "ADALORA"}, "peft_type 'ADALORA' is not supported; LORA is"),
        ({"peft_type": None}, "peft_type None is not supported"),
        *(
            ({"init_lora_weights": each}, f"init_lora_weights '{each}' is not supported: it changes the model's own")
            for each in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "mica")
        ),
        *(
            ({name: value}, f"{name} is not supported$")
            for name, value in {
                "use_qalora": True,
                "use_bdlora": {"nblocks": 2},
                "layer_replication": [[0, 2], [1, 2]],
                "alora_invocation_tokens": [5],
                "arrow_config": {"top_k": 3},
                "kasa_config": {"beta": 1e-4},
                "monteclora_config": {"num_samples": 2},
                "velora_config": {"scale": 1.0},
                "a_later_field": 1,
            }.items()
        ),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern '\(': "),
        ({"alpha_pattern": {"a": "b"}}, r"alpha_pattern"),
        ({"alpha_pattern": [1]}, r"alpha_pattern"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha: the alpha nan is not finite"),
        ({"use_rslora": 2}, "use_rslora"),
        ({"trainable_token_indices": "x"}, "trainable_token_indices"),
    ],
)
def test_what_is_refused(tmp_path, fields, message):
    """PEFT computes something else with these."""
    with pytest.raises(UserError, match=f"adapter_config.json: .*{message}"):
        read(tmp_path, **fields)


PAIR = pair("a.proj", 6, 4)[0]
A, B = PAIR


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({A: PAIR[A]}, "a.proj: there is no lora_B to lora_A"),
        ({B: PAIR[B]}, "a.proj: there is no lora_A to lora_B"),
        ({**PAIR, A: numbers("a", 3, 4)}, "a.proj: lora_A has rank 3, lora_B 2"),
        # As of shards that were not gathered.
        ({**PAIR, A: torch.zeros(0)}, r"a.proj: lora_A is \(0,\) of torch.float32, not 2 dimensions of floats"),
        ({**PAIR, A: PAIR[A].int()}, "of torch.int32, not 2 dimensions of floats"),
        ({**PAIR, "a.proj.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector has 4 numbers for 6 outputs"),
        ({"a.proj.lora_A.default.weight": PAIR[A]}, "'base_model.model.a.proj.lora_A.default.weight' is of no form"),
        ({**PAIR, "a.proj.lora_E": torch.ones(2, 1)}, "lora_E' is of no form that is served"),
        ({"a.token_adapter.trainable_tokens_delta": torch.ones(1, 4)}, r"a: 1 rows, and trainable_token_indices names"),
        (
            {**pair("a.experts", 6, 4)[0], "a.experts.lora_magnitude_vector": torch.ones(6)},
            "'lora_magnitude_vector' is not served for experts",
        ),
    ],
)
def test_tensors_that_cannot_be(tmp_path, tensors, message):
    """The base answered, or PyTorch's error did not name the tensor."""
    with pytest.raises(UserError, match=f"adapter_model.safetensors: .*{message}"):
        read(tmp_path, tensors)


def test_files_that_are_missing_or_broken(tmp_path):
    """Each has one line, with what to do."""
    with pytest.raises(UserError, match=r"adapter_config\.json: no such file"):
        read_adapter("a", tmp_path)
    write_adapter(tmp_path, PAIR)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="an unreadable adapter: copy or download the file again"):
        read_adapter("a", tmp_path)
    save_file({}, file)
    with pytest.raises(UserError, match="it has no tensors"):
        read_adapter("a", tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: no such file"):
        read_adapter("a", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"adapter_model\.bin is not read, for it may run code"):
        read_adapter("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match=r"adapter_config\.json: not a JSON object"):
        read_adapter("a", tmp_path)
