"""Fields of ``quantization_config``: what is not served is one line that names the field."""

import json

import pytest

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.chosen import choose_quantization, read_quantization
from rosebatch.model.quantization.folder_config import quantization_of
from rosebatch.model.quantization.forms import FORMS, form_of

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": None}
# All fields that are read, with values that are served.
CONFIGS = {
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"}},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
    },
    "fp8": {
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "weight_scale_method": "block",
        "weight_scale_semantics": "inverse",
        "modules_to_not_convert": [],
        "ignored_layers": None,
    },
    "gptq": {
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "is_marlin_format": False,
        "dynamic": {"+:.*q_proj": {"bits": 8, "group_size": 64, "sym": True, "desc_act": False}},
    },
    "modelopt": {"quant_algo": "FP8", "exclude_modules": ["lm_head"], "quantized_layers": {}},
    "mxfp4": {},
}
VALUES = [True, False, 0, 1, -1, -2, 3, 10**12, 1.5, "", "x", "4", [], ["x"], [1], [None], {}, {"a": 1}]
VALUES += [[[1]], [128], [0, 128], [128, 128], ["re:("], {"a": {}}, {"a": None}, {"(": {}}, "128x", "0x128"]
# Values of the last field by which it is not served; a field that is null counts as absent.
WRONG = {
    "awq": [
        *({"bits": 8}, {"bits": None, "w_bit": "4"}, {"group_size": 0}, {"group_size": None, "q_group_size": "128"}),
        *(
            {"version": "gemv"},
            {"zero_point": False},
            {"checkpoint_format": "gemv"},
            {"version": None, "format": "gemv"},
        ),
    ],
    "compressed-tensors": [
        *({"config_groups": None}, {"format": "marlin-24"}, {"ignore": "lm_head"}, {"ignore": ["re:("]}),
        *({"sparsity_config": {"format": "sparse-24-bitmask"}}, {"transform_config": {"config_groups": {"R1": {}}}}),
    ],
    "fp8": [
        *({"fmt": "e5m2"}, {"expert_dtype": "fp4"}, {"weight_block_size": [128]}, {"weight_block_size": [0, 128]}),
        *({"modules_to_not_convert": "lm_head"}, {"modules_to_not_convert": None, "ignored_layers": [4]}),
        *({"weight_scale_method": "column"}, {"weight_scale_semantics": "factor"}),
    ],
    "gptq": [
        *({"pack_dtype": "int16"}, {"is_marlin_format": True}),
        *({"bits": None}, {"bits": 9}, {"group_size": 0}, {"sym": "false"}, {"desc_act": 1}, {"dynamic": ["-:.*"]}),
        *({"dynamic": {"(": {}}}, {"dynamic": {".*": {"bits": 1}}}, {"checkpoint_format": None, "format": "marlin"}),
        {"checkpoint_format": "gptq_v2", "format": "gptq"},
    ],
    "modelopt": [
        *({"quant_algo": "W4A8_AWQ"}, {"exclude_modules": "lm_head"}, {"exclude_modules": None, "ignore": [None]}),
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
    ],
}


def places(fields, before=()):
    """Paths of all fields."""
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, (*before, name))


def changed(fields, place, value):
    first, *rest = place
    return {**fields, first: changed(fields[first], rest, value) if rest else value}


@pytest.mark.parametrize("method", sorted(FORMS))
def test_any_value_of_any_field(method):
    """A list that is a text was read letter by letter; others ended in a traceback, or named no field."""
    config = {"quant_method": method, **CONFIGS[method]}
    assert form_of(config) is not None
    for place in places(config):
        for value in [None, *VALUES]:
            try:
                form_of(changed(config, place, value))
            except ValueError as error:
                message = str(error)
                assert message.startswith("quantization_config: "), (place, value, message)
                assert place[-1] in message, (place, value, message)
                assert "\n" not in message


@pytest.mark.parametrize(("method", "wrong"), [(method, each) for method in WRONG for each in WRONG[method]])
def test_what_is_not_served(method, wrong):
    """It is refused, and not read as something else."""
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"^quantization_config: .*{name}"):
        form_of({"quant_method": method, **CONFIGS[method], **wrong})


@pytest.mark.parametrize("place", [("num_bits", 9), ("num_bits", None), ("type", "complex"), ("strategy", "token")])
def test_weights_of_a_group(place):
    """The line says which group it is."""
    groups = {"group_7": {"targets": ["Linear"], "weights": {**WEIGHTS, place[0]: place[1]}}}
    with pytest.raises(ValueError, match=f"config_groups: group_7: weights: {place[0]}"):
        form_of({"quant_method": "compressed-tensors", "config_groups": groups})


def test_methods():
    """Others are named with those that are served; without a method, fields may mean anything."""
    for method in ("quark", None, [], 4):
        with pytest.raises(ValueError, match=r"quant_method .* is not supported; supported are awq, bitsandbytes"):
            form_of({"quant_method": method, "bits": 4})
    for config in ([], "fp8", 4, False):
        with pytest.raises(ValueError, match="quantization_config is no object"):
            form_of(config)
    assert form_of(None) is form_of({}) is None


@pytest.mark.parametrize(
    ("file", "fields", "method"),
    [
        ("quantize_config.json", {"bits": 4}, "gptq"),
        ("quant_config.json", {"w_bit": 4}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_files_beside_the_config(tmp_path, file, fields, method):
    """They count if config.json says nothing, and an error names the file."""
    (tmp_path / file).write_text(json.dumps(fields))
    assert quantization_of(tmp_path, {})["quant_method"] == method
    for where in ({"quantization_config": {"quant_method": "fp8"}}, {"compression_config": {"quant_method": "fp8"}}):
        assert quantization_of(tmp_path, where)["quant_method"] == "fp8"
        assert quantization_of(tmp_path, {"text_config": where})["quant_method"] == "fp8"
    (tmp_path / "config.json").write_text("{}")
    for wrong in ({"bits": 9, "w_bit": 9}, {"quantization": 4}, {"quantization": {"quant_algo": None}}):
        (tmp_path / file).write_text(json.dumps(wrong))
        if method == "modelopt" or "bits" in wrong:
            with pytest.raises(UserError, match=rf"{file}: quantization_config: (bits|quant_algo)"):
                read_quantization(tmp_path)


def test_fields_that_nobody_reads():
    """``check`` lists them: a later quantizer's field could change values. What says how a file was made is not one."""
    for method, fields in CONFIGS.items():
        config = {"quant_method": method, **fields, "static_groups": True, "later": 1, "other": None}
        assert choose_quantization("auto", config).unread == ("later",)
    assert choose_quantization("auto", None).unread == ()


@pytest.mark.parametrize(("method", "version"), [("gptq", "gptq_v2"), ("awq", "gemm")])
def test_both_names_of_a_version(method, version):
    """GPTQModel writes both, and ``method``: ``check`` listed the second one, and a contradiction was not seen."""
    written = {"quant_method": method, "method": method, "format": version, "checkpoint_format": version}
    assert choose_quantization("auto", {"bits": 4, "group_size": 128, **written}).unread == ()


def test_fields_inside_of_others_that_nobody_reads():
    """Only those of the config itself were listed: a group's or a pattern's were dropped without a word."""
    made = {"dynamic": False, "observer": "minmax", "observer_kwargs": {"a": 1}, "scale_dtype": "torch.bfloat16"}
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **made, "later": 1}, "input_activations": {"a": 1}, "own": 2}
    idle = {"targets": ["Linear"], "weights": None, "format": "dense"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group, "idle": idle}}
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    assert choose_quantization("auto", config).unread == ("config_groups.g.own", "config_groups.g.weights.later")
    own = {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "later": 1}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:a": {}, "b": own}}
    assert choose_quantization("auto", config).unread == ("dynamic.b.later",)
