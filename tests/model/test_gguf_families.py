"""GGUF files of every architecture that is served, against the transformers models that they were made of."""

import functools
from types import SimpleNamespace

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch.launch import launch
from rosebatch.model.gguf import convert as module
from rosebatch.model.gguf.cache import converted_folder
from rosebatch.model.gguf.metadata import Reader
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.quantization.formats.mxfp4 import MXFP4
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.registry import ARCHITECTURES
from rosebatch.model.weights import SafetensorsWeights
from tests.helpers.families import FAMILIES, VARIANTS
from tests.model import gguf_files, gguf_layers
from tests.model.gguf_files import BOS, END, VOCAB, changed, random_model
from tests.model.test_gguf_metadata import LISTED

pytestmark = pytest.mark.usefixtures("cache")

_ALL = {**FAMILIES, **VARIANTS}
# 44 * (30 / 44) is below 30.
_ALL["gpt_neox-share"] = ("GPTNeoXConfig", {**FAMILIES["gpt_neox"][1], "hidden_size": 176, "rotary_pct": 0.6819})
# What these files cannot say: another scale of Gemma, and layers without experts. Blocks have 32 values.
_GEMMA, _SAYS = (
    {"query_pre_attn_scalar": 24},
    {"gpt_oss": {"intermediate_size": 96}, "qwen3_moe": {"mlp_only_layers": []}},
)
_SAYS |= dict.fromkeys(("gemma2", "gemma2-plain", "gemma3", "gemma3-pattern"), _GEMMA)
# llama.cpp takes its own numbers where the file has none, and has no biases there.
_SAYS["gemma2-plain"] = {
    **_GEMMA,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
}
_SAYS["cohere-biases"] = {"attention_bias": False}
_SAYS["granite-biases"] = {"head_dim": 16}
_SAYS["gpt_neox-serial"] = {"hidden_act": "gelu"}
_SAYS["starcoder2-unbiased"] = {"hidden_act": "gelu_pytorch_tanh"}
_SAYS["qwen3_next"] = {"mlp_only_layers": []}
# They have the layers of experts as a number of others before them, one factor of YaRN, and no way to choose groups.
_SAYS["glm4_moe_lite"] = {"n_routed_experts": 9, "mlp_layer_types": ["dense", "sparse", "sparse"]}
_SAYS["deepseek_v2"] = {"n_routed_experts": 9}
_SAYS["deepseek_v3"] = {
    "n_routed_experts": 9,
    "rope_parameters": {**_ALL["deepseek_v3"][1]["rope_parameters"], "mscale": 1.2, "mscale_all_dim": 1.2},
}
_SAYS["deepseek_v2-greedy"] = {"n_group": 1, "topk_group": 1}
# They have no multipliers, size of values, base of positions, or length that longrope was trained for.
_MINICPM3 = {"v_head_dim": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
_SAYS["minicpm3"] = {**_MINICPM3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_SAYS["minicpm3-longrope"] = {
    **_MINICPM3,
    "original_max_position_embeddings": 256,
    "rope_parameters": {**_ALL["minicpm3-longrope"][1]["rope_parameters"], "rope_theta": 10000.0},
}
# And their files have all MLPs of experts, or none.
_SAYS["nemotron_h"] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
    # Not what other fields may be.
    "n_routed_experts": 9,
}
_SAYS["olmo2-biases"] = {"attention_bias": False}
_NAMES = [
    *("gemma3", "gpt_oss", "gemma", "gemma2", "gemma2-plain", "gemma3-pattern", "phi3", "phi3-longrope", "phi3-window"),
    *("phi3-longrope-window", "glm4", "glm4-odd", "qwen2_moe", "qwen3_moe", "granite", "granite-biases", "olmo2"),
    *("olmo2-biases", "stablelm", "stablelm-serial", "starcoder2", "starcoder2-unbiased", "gpt_neox"),
    *("gpt_neox-serial", "gpt_neox-share", "cohere", "cohere-biases", "cohere2"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2-untied"),
    *("deepseek_v2", "deepseek_v2-greedy", "deepseek_v3", "glm4_moe_lite", "granite4_h", "granite4_h-dense"),
    *("nemotron_h", "nemotron_h-biases", "falcon_h1", "falcon_h1-normed"),
    *("minicpm3", "minicpm3-longrope", "bamba"),
]
# Of another class, which computes the same.
_CLASSES = {"glm4_moe_lite": "DeepseekV3ForCausalLM"}
# Fields of a shape that files hold otherwise.
_OTHERWISE = dict.fromkeys(("granite4_h", "granite4_h-dense", "nemotron_h-biases"), ("max_model_len",))
# They are in the weights.
_FACTORED = {"falcon_h1": ("proj.weight", "embed_tokens.weight", "lm_head.weight")}
_FACTORED["falcon_h1-normed"] = ("gate_proj.weight", "gate_proj.bias", "down_proj.weight", "down_proj.bias")
_FACTORS = ("multipliers", "embedding_multiplier", "logit_multiplier")
_OTHERWISE |= dict.fromkeys(("falcon_h1", "falcon_h1-normed"), _FACTORS)
# No layer has an MLP of that size.
_OTHERWISE["nemotron_h"] = ("max_model_len", "intermediate_size")
# Of layers of several kinds.
_MIXED = ("lfm2", "deepseek_v2", "deepseek_v3", "granite4_h", "nemotron_h", "falcon_h1", "minicpm3")
_FAST = ("gemma3", "gpt_oss", *_MIXED)
# Longer than the windows; on one side of the length that longrope was trained for.
_PROMPTS = [[7, 200, 9, 31, 18], [(7 * i * i + 5) % 290 for i in range(45)]]
# Factors that are rounded in the files.
_ROUNDED = ("longrope", "granite", "deepseek_v3", "falcon_h1")
# transformers' prompts keep above a least step in time, which files do not have.
_UNSAID = {name: {"time_step_min": 1e-9} for name in ("nemotron_h", "nemotron_h-biases")}


def make(name):
    kind, values = _ALL[name]
    values = {**values, **_SAYS.get(name, {}), "vocab_size": VOCAB, "initializer_range": 0.2}
    config = getattr(transformers, kind)(**values, bos_token_id=BOS, eos_token_id=END, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config)


def model_of(name):
    """A model of which files can hold all values: some have norms plus one, and rates of decay as such."""
    model = random_model(name, {name: lambda: make(name)})
    shifted = model.config.model_type.startswith(("gemma", *gguf_files.DELTA))
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                # Until they stay.
                for _ in range(9):
                    parameter.copy_(torch.from_numpy(np.log(np.exp(parameter.numpy()))))
            elif shifted and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
                parameter.copy_(parameter + 1 - 1)
    return model


def same(found, expected):
    """Whether all numbers are equal, but for the rounding of floats to fp32."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], each) for key, each in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else found == expected


def log_probabilities(model, token_ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.thorough) for name in _NAMES]
)
def test_a_family_is_the_original(write_gguf, name):
    """Each name, order of rows, shift of norms and number of the config: one that is wrong gives other answers."""
    original = model_of(name)
    folder = converted_folder(write_gguf(name, original), torch.float32)
    again = AutoModelForCausalLM.from_pretrained(folder, **_UNSAID.get(name, {})).eval()
    assert type(again).__name__ == _CLASSES.get(name, type(original).__name__)
    own = again.state_dict()
    different = {key for key, values in original.state_dict().items() if not torch.equal(own[key], values)}
    assert all(key.endswith(_FACTORED.get(name, ())) for key in different)
    for prompt in _PROMPTS:
        difference = log_probabilities(again, prompt) - log_probabilities(original, prompt)
        assert difference.abs().max() <= (1e-4 if any(each in name for each in _ROUNDED) else 0)
    engine = launch(RunConfig(model=str(folder), device="cpu", dtype="float32", block_size=4, max_num_seqs=8)).engine
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    found = list(engine.run([Request(i, tuple(prompt), sampling) for i, prompt in enumerate(_PROMPTS)]))
    assert len(found) == len(_PROMPTS)
    for each in found:
        prompt, answer = _PROMPTS[each.request.id], list(each.token_ids)
        expected = log_probabilities(original, prompt + answer)[len(prompt) - 1 : -1]
        assert answer == expected.argmax(-1).tolist()
        own = torch.tensor([step.logprob for step in each.logprobs])
        assert (own - expected.max(-1).values).abs().max() < 1e-4


@pytest.mark.parametrize("name", _NAMES)
def test_the_shape_is_the_original(write_gguf, described, name):
    """A field that a file's config lacks has a default, which may be right for one tiny model alone."""
    original = model_of(name)
    given = {**original.config.to_dict(), "architectures": [type(original).__name__]}
    found, expected = (
        msgspec.to_builtins(parse_model_config(values, name))
        for values in (described(write_gguf(name, original)), given)
    )
    # The type of weights is the run's.
    assert {key for key in expected if not same(found[key], expected[key])} <= {"dtype", *_OTHERWISE.get(name, ())}


@pytest.mark.parametrize("name", _MIXED)
def test_quantized_tensors(write_gguf, monkeypatch, tmp_path, name):
    """They are dequantized before they are cut, turned or joined, as in a file that has their values in fp32."""
    path = write_gguf(name, model_of(name), quantized={"weight": gguf.GGMLQuantizationType.Q8_0})
    tensors = Reader(path).tensors
    assert sum(tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0 for tensor in tensors) > 10
    plain = [
        SimpleNamespace(
            name=tensor.name,
            data=dequantize(tensor.data, tensor.tensor_type),
            tensor_type=gguf.GGMLQuantizationType.F32,
            shape=tensor.shape,
        )
        for tensor in tensors
    ]
    found = load_file(converted_folder(path, torch.float32) / "model.safetensors")
    reader = SimpleNamespace(fields=Reader(path).fields, tensors=plain)
    monkeypatch.setattr(module, "Reader", lambda path: reader)
    module.convert(path, torch.float32, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_older_files_of_latents(write_gguf, described, monkeypatch, name):
    """One matrix makes keys and values of a latent there, and heads have their own sizes."""
    newer = write_gguf(name, model_of(name), file="newer.gguf")
    monkeypatch.setattr(gguf_layers, "SPLIT", False)
    older = write_gguf(name, model_of(name))
    assert described(older) == described(newer)
    monkeypatch.undo()
    paths = [converted_folder(path, torch.float32) / "model.safetensors" for path in (older, newer)]
    found, expected = map(load_file, paths)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("count", "groups"), [(256, (8, 4)), (160, (8, 3)), (64, (1, 1))])
def test_groups_of_experts_that_older_files_lack(write_gguf, described, count, groups):
    """Those of DeepSeek V3 and V2 are known: without them, other experts would be chosen."""
    path = write_gguf("deepseek_v3", model_of("deepseek_v3"))
    without = dict.fromkeys(f"deepseek2.expert_group_{name}" for name in ("count", "used_count"))
    found = described(path, {"deepseek2.expert_count": count, **without})
    assert (found["n_group"], found["topk_group"]) == groups


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [("deepseek_v3", None, "DeepseekV3"), ("deepseek_v2", None, "DeepseekV2"), ("deepseek_v2", 2, "")],
)
def test_the_function_that_chooses_experts(write_gguf, described, name, given, expected):
    """Files that do not name it have a correction, or have none: taken for softmax, V3 chose other experts."""
    path, key = write_gguf(name, model_of(name)), "deepseek2.expert_gating_func"
    if expected:
        assert described(path, {key: given})["architectures"] == [f"{expected}ForCausalLM"]
    else:
        with pytest.raises(UserError, match=r"exp_probs_b\.bias is missing"):
            described(path, {key: given})


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([0, 2, 1], r"the layers have \[0, 2, 1\] heads of keys and values"),
        ([0, 0, 0], "the layers have"),
        ([0, 2], r"head_count_kv' is \[0, 2\]: Expected `array` of length >= 3"),
        (2, "head_count_kv' is 2: Expected `array`"),
    ],
)
def test_lists_that_mark_layers(write_gguf, monkeypatch, counts, told):
    """Such a list says which layers have attention: a wrong one made another model of the file."""
    path = write_gguf("lfm2", model_of("lfm2"))
    reader = changed(Reader(path), {"lfm2.attention.head_count_kv": counts})
    monkeypatch.setattr(module, "Reader", lambda path: reader)
    with pytest.raises(UserError, match=told):
        module.read_shape(path, torch.float32)


def test_experts_in_mxfp4(write_gguf):
    """gpt-oss's files have experts in blocks of 17 bytes for 32 values: each value is exact, in bfloat16 too.

    The cache has gpt-oss's own form: dequantized, it was four times as large.
    """
    kind, original = gguf.GGMLQuantizationType.MXFP4, model_of("gpt_oss")
    path = write_gguf("gpt_oss", original, quantized={"experts": kind})
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if "experts" in name:
                # Biases too: of vectors, llama.cpp has none in it.
                turned = parameter if name.endswith("bias") else parameter.swapaxes(1, 2)
                own = [turned[:, ::2], turned[:, 1::2]] if "gate_up" in name else [turned]
                own = [torch.from_numpy(dequantize(quantize(e.contiguous().numpy(), kind), kind)) for e in own]
                values = torch.stack(own, 2).flatten(1, 2)
                parameter.copy_(values if name.endswith("bias") else values.swapaxes(1, 2))
    for dtype in (torch.float32, torch.bfloat16):
        weights = SafetensorsWeights(converted_folder(path, dtype), dtype, torch.device("cpu"), MXFP4.of({}))
        for name, parameter in original.state_dict().items():
            if name.endswith(("gate_up_proj", "down_proj")):
                values, expected = load_weight(weights, name, parameter.mT.shape, transposed=True).dense(), parameter.mT
                assert torch.equal(values.float(), expected), name
                # Not even a zero has another sign.
                assert torch.equal(values.signbit(), expected.signbit()), name
                assert weights.shape(f"{name}_blocks") == (*expected.shape[:-1], expected.shape[-1] // 32, 16)
    engine = launch(RunConfig(model=str(path), device="cpu", dtype="float32", block_size=4, max_num_seqs=8)).engine
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    (output,) = engine.run([Request(0, tuple(_PROMPTS[0]), sampling)])
    answer = list(output.token_ids)
    expected = log_probabilities(original, _PROMPTS[0] + answer)[len(_PROMPTS[0]) - 1 : -1]
    assert answer == expected.argmax(-1).tolist()


def test_experts_partly_in_mxfp4(write_gguf):
    """Gate and up are one tensor here: where only one of them is in MXFP4, both are dequantized."""
    kind, original = gguf.GGMLQuantizationType.MXFP4, model_of("gpt_oss")
    path = write_gguf("gpt_oss", original, quantized={"gate_proj": kind, "down_proj": kind})
    weights = SafetensorsWeights(
        converted_folder(path, torch.float32), torch.float32, torch.device("cpu"), MXFP4.of({})
    )
    experts = "model.layers.1.mlp.experts."
    parameter = original.state_dict()[f"{experts}gate_up_proj"].mT
    gate = torch.from_numpy(dequantize(quantize(parameter[:, ::2].contiguous().numpy(), kind), kind))
    found = load_weight(weights, f"{experts}gate_up_proj", parameter.shape, transposed=True).dense()
    assert torch.equal(found[:, ::2], gate) and torch.equal(found[:, 1::2], parameter[:, 1::2])
    assert weights.shape(f"{experts}down_proj_blocks") is not None


def test_rates_of_decay_with_a_wrong_sign(write_gguf, monkeypatch):
    """Their logarithm would be no number, and so would all answers."""
    monkeypatch.setattr(
        gguf_files,
        "_delta",
        lambda config, name, own, values: [(name.replace("dt_bias", "dt_proj.bias"), abs(values) + 1)],
    )
    with pytest.raises(UserError, match="not all values of ssm_a are negative"):
        converted_folder(write_gguf("qwen3_5", model_of("qwen3_5")), torch.float32)


# Tensors that llama.cpp has for an architecture and that are refused by name: of other models with its name.
_REFUSED = {
    "glm4": {"rope_freqs", "attn_qkv", *(f"nextn.{name}" for name in ("eh_proj", "embed_tokens", "enorm", "hnorm"))}
    | {"nextn.shared_head_head", "nextn.shared_head_norm"},
    "phi3": {"attn_q", "attn_k", "attn_v"},
    "lfm2": {"dense_2"},
    "deepseek2": {"attn_k", "attn_v"},
    "nemotron_h_moe": {"ffn_latent_down", "ffn_latent_up"},
    "qwen3next": {"ssm_in", "ffn_gate_up_exps"},
    "qwen35moe": {"ffn_gate_up_exps"},
}
# Read as numbers of positions, or computed by llama.cpp itself.
_NO_WEIGHTS = {"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"}
_FORMS = [form for a in ARCHITECTURES.values() for form in a.gguf]


def base(name):
    return name.removesuffix(".weight").removesuffix(".bias")


def table(architecture):
    """GGUF's names of the tensors of an architecture, by its own name."""
    (key,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return {gguf.TENSOR_NAMES[each].removeprefix("blk.{bid}.") for each in gguf.MODEL_TENSORS[key]}


def test_every_tensor_of_an_architecture_is_mapped_or_refused():
    """By the package's own list: a name that nobody knows of would be a model that fails, or half of one."""
    mapped = {}
    for form in _FORMS:
        mapped.setdefault(form.architecture, set()).update(map(base, (*form.names, *form.layer_names)))
    assert len(mapped) > 15
    for architecture, names in mapped.items():
        assert table(architecture) - names - _NO_WEIGHTS == _REFUSED.get(architecture, set()) - _NO_WEIGHTS, (
            architecture
        )
        # llama.cpp takes these heads to be tied.
        assert names - table(architecture) <= {"output"}, architecture


@pytest.fixture
def described(monkeypatch):
    """The config of a good file, read once and changed in memory."""
    read = functools.cache(Reader)

    def call(path, *changes, **more):
        reader = changed(read(path), *changes, **more)
        monkeypatch.setattr(module, "Reader", lambda path: reader)
        return module._describe(path, torch.float32, quiet=True).config

    return call


@pytest.mark.parametrize(("name", "tensors"), [("glm4", _REFUSED["glm4"] - _NO_WEIGHTS), ("phi3", _REFUSED["phi3"])])
def test_tensors_of_other_models_with_the_name(write_gguf, described, name, tensors):
    """Draft layers and projections in one: dropped, they would be another model."""
    path = write_gguf(name, model_of(name))
    for tensor in sorted(tensors):
        with pytest.raises(UserError, match=rf"the tensor 'blk\.0\.{tensor}\.weight' is not supported"):
            described(path, tensors=[f"blk.0.{tensor}.weight"])


@pytest.mark.parametrize(("name", "architecture"), [("qwen3_5", "qwen35"), ("glm4_moe_lite", "deepseek2")])
def test_layers_that_draft(write_gguf, described, name, architecture):
    """Most files of Qwen3.5 have one at the end, which no run without drafts computes."""
    path, layers = write_gguf(name, model_of(name)), _ALL[name][1]["num_hidden_layers"]
    usual, drafts = described(path), [f"blk.{layers}.{own}" for own in ("attn_norm.weight", "nextn.eh_proj.weight")]
    fields = {f"{architecture}.block_count": layers + 1}
    with pytest.raises(UserError, match="is missing"):
        described(path, fields, drafts)
    assert described(path, {**fields, f"{architecture}.nextn_predict_layers": 1}, drafts) == usual


@pytest.mark.parametrize("value", [-(2**40), -1, 2**40, 1.0, True, "1", [1]])
def test_an_impossible_number_of_drafts(write_gguf, described, value):
    """A negative one added as many layers."""
    path = write_gguf("qwen3_5", model_of("qwen3_5"))
    with pytest.raises(
        UserError, match=r"model\.gguf: GGUF metadata 'qwen35\.nextn_predict_layers' is .*: Expected `int`"
    ):
        described(path, {"qwen35.nextn_predict_layers": value})


def test_as_many_drafts_as_layers(write_gguf, described):
    """No layer was left, and no key was named."""
    path, layers = write_gguf("qwen3_5", model_of("qwen3_5")), _ALL["qwen3_5"][1]["num_hidden_layers"]
    with pytest.raises(UserError, match=rf"nextn_predict_layers' is {layers}: Expected `int` <= {layers - 1}"):
        described(path, {"qwen35.nextn_predict_layers": layers})
    with pytest.raises(UserError, match=r"num_hidden_layers must be in \[1, \d+\], got 0"):
        described(path, {"qwen35.block_count": 0})


# They change nothing in any model here, or where the file has no such scaling, or beside what else the file says.
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
_CONDITIONAL = {f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
_CONDITIONAL |= {"rope.scaling.original_context_length", "rope.scale_linear", "rope.scaling.factor"}
# llama.cpp goes by the tensors.
_UNASKED = {"stablelm": {"use_parallel_residual"}, "gpt_oss": {"feed_forward_length"}}
_UNASKED |= {name: {"rope.scaling.yarn_log_multiplier"} for name in ("deepseek_v2", "glm4_moe_lite", "minicpm3")}
# Nemotron-H has no positions. Elsewhere, those of a text are equal in all of its sections.
_UNASKED["nemotron_h"] = {"rope.freq_base", "rope.dimension_count"}
_UNASKED |= {name: {"rope.dimension_sections"} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in _NAMES if "-" not in name])
def test_every_key_of_an_architecture(write_gguf, described, name):
    """A key changes the config, is refused by its name, or is known to mean nothing."""
    path = write_gguf(name, model_of(name))
    usual = described(path)
    architecture = gguf.MODEL_ARCH_NAMES[gguf_files.ARCHITECTURES[usual["model_type"]]]
    wrong = []
    for key in {each.removeprefix("llama.") for each in LISTED if each.startswith("llama.")}:
        try:
            differs = described(path, {f"{architecture}.{key}": 6}) != usual
        except UserError:
            # By its name, or as an impossible size of the config.
            differs = True
        if not differs and key not in {*_HARMLESS, *_CONDITIONAL, *_UNASKED.get(name, ())}:
            wrong.append(key)
    assert not wrong
