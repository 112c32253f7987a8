"""The transformers fallback: which code runs a model, what is refused and how, and what is fused."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.launch.launch import launch
from rosebatch.model.fallback.attention import UnservedError
from rosebatch.model.fallback.check import require_tokenwise
from rosebatch.model.fallback.fusion import Fusion
from rosebatch.model.fallback.load import load_fallback
from rosebatch.model.fallback.network import Decoder, build_network
from rosebatch.model.source import find_model
from rosebatch.ops.select import select
from tests.helpers.tiny_families import save_tiny_model, tiny_config

CPU = torch.device("cpu")
OPS = select(Switches.resolve({}, "cpu"), "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes the folder of a tiny model once."""
    made = {}

    def make(model_type):
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            save_tiny_model(tiny_config(model_type), made[model_type])
        return made[model_type]

    return make


@pytest.fixture
def config_folder(tmp_path):
    """Writes the config of a tiny model, with changes; no weights."""

    def make(model_type, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**tiny_config(model_type).to_dict(), **changes}, default=str))
        return tmp_path

    return make


def find(folder, model_impl="auto", **options):
    return find_model(RunConfig(model=str(folder), dtype="float32", model_impl=model_impl, **options), CPU)


def decoder_of(model_type, **changes):
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return Decoder(build_network(config, torch.float32, CPU))


@pytest.mark.parametrize(
    ("model_type", "model_impl", "expected"),
    [
        ("llama", "auto", "rosebatch"),
        ("llama", "transformers", "transformers"),
        ("arcee", "auto", "transformers"),
        ("arcee", "transformers", "transformers"),
    ],
)
def test_whose_code_runs_a_model(folder, model_type, model_impl, expected):
    """rosebatch's own is faster, so it must win where there is one, unless the flag says otherwise."""
    assert find(folder(model_type), model_impl).model_impl == expected


def test_the_report_names_whose_code_ran(folder):
    """Two reports of one model could not be told apart."""
    config = RunConfig.of(str(folder("arcee")), model_impl="transformers", dtype="float32", kv_cache_memory="8MiB")
    assert launch(config).description["model_impl"] == "transformers"


def test_rosebatch_alone_refuses_other_architectures(folder):
    """The flag must not be a mere preference."""
    with pytest.raises(UserError, match="ArceeForCausalLM is not supported"):
        find(folder("arcee"), "rosebatch")


def test_a_shape_without_a_folder():
    """A .toml of shapes must run by either code, with random weights: benches compare the two."""
    shape = "configs/models/tiny-llama.toml"
    source = find(shape, "transformers", load_format="dummy")
    native = find(shape, load_format="dummy")
    assert (source.model_impl, source.config.kv_planes) == ("transformers", native.config.kv_planes)
    assert source.config.vocab_size == native.config.vocab_size
    model = source.build(OPS, CPU)
    assert [spec.heads for spec in model.mixers] == [spec.heads for spec in native.build(OPS, CPU).mixers]


def test_the_floor_counts_active_experts(folder):
    """The floor of a run would be too high by the experts that no token needs."""
    shape = find(folder("qwen3_moe"), "transformers").config.transformers
    layer = 3 * 64 * 40
    # Of 6 experts a token has 2; the last layers have no dense MLP.
    assert shape.layer_weights - shape.active_weights == pytest.approx(4 * 4 * layer, rel=0.3)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "its attention does not go through transformers' attention interface"),
        ("electra", "its masks are neither causal nor sliding windows"),
        ("jamba", "layer 0 is of type linear_attention"),
        ("doge", "model.layers.0.self_attn builds a mask of its own"),
        ("moshi", "its config has a window of 24, its masks have none"),
        ("llama4_text", "its masks depend on the input"),
    ],
)
def test_what_is_refused_says_which_layer_and_why(config_folder, model_type, reason):
    """A model that would give wrong tokens must not start; no weights are needed to know."""
    with pytest.raises(UserError) as caught:
        find(config_folder(model_type))
    assert str(caught.value).endswith(f"is not supported: {reason}")


def test_quantized_checkpoints_are_refused(config_folder):
    """Their weights are no 16-bit numbers. The line says what to do: a flag may have sent a model of ours there."""
    reason = "quantization_config: transformers' own code runs this model, which takes 16-bit weights alone"
    with pytest.raises(UserError, match=f"{reason}: take the model's 16-bit weights"):
        find(config_folder("arcee", quantization_config={"quant_method": "gptq"}))
    with pytest.raises(UserError, match=f"{reason}: leave out --model-impl transformers"):
        find(config_folder("llama", quantization_config={"quant_method": "gptq"}), model_impl="transformers")


def test_a_layer_that_needs_weights_is_named(config_folder):
    """It was "Tensor.item() cannot be called on meta tensors", of no layer."""
    with pytest.raises(UserError, match=r"fails in or after model\.[\w.]+: it needs values of tensors$"):
        find(config_folder("jetmoe"))


def test_a_package_that_is_missing_is_named(config_folder):
    """transformers' line begins with a line break, so all that was left of it was "ImportError:"."""
    with pytest.raises(UserError, match=r"ImportError: TimmWrapperModel requires the \w+ library"):
        find(config_folder("gemma3n", text_config={}))


@pytest.mark.parametrize(
    ("task", "model_impl"),
    [
        ("QuestionAnswering", "auto"),
        # By our own code these are classifiers.
        *product(["SequenceClassification", "TokenClassification", "RewardModel"], ["transformers"]),
    ],
)
def test_classes_with_another_head_are_refused_by_it(config_folder, task, model_impl):
    """It was "missing keys: lm_head.weight", as if the folder were damaged."""
    place = config_folder("qwen2", architectures=[f"Qwen2For{task}"])
    with pytest.raises(UserError, match=f"it has a head for {task} in place of an output projection"):
        find(place, model_impl)


def test_integers_are_no_weights(folder, tmp_path):
    """transformers loads them as numbers, and the answers were another model's."""
    (tmp_path / "config.json").write_bytes((folder("arcee") / "config.json").read_bytes())
    tensors = load_file(folder("arcee") / "model.safetensors")
    tensors = {name: tensor.to(torch.int8) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"holds 'I8', and config\.json has no quantization_config: use the 16-bit"):
        find(tmp_path).build(OPS, CPU)


def test_code_of_a_folder_never_runs(tmp_path):
    """An unknown model type with code of its own: one line, and the code stays asleep."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.Config"}})
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('code ran')")
    with pytest.raises(UserError, match="has models of type 'mine'"):
        find(tmp_path)


def test_rotary_positions_that_change_are_served_within_their_original_length(config_folder):
    """transformers changes all frequencies with the longest sequence of a batch: rows would depend on each other."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    place = config_folder("arcee", rope_parameters={**rope, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8})
    with pytest.raises(UserError, match="rotary positions of type longrope change: give --max-model-len 128 or less"):
        find(place)
    assert find(place, max_model_len=128).config.max_model_len == 128


def test_a_missing_tensor_is_named(folder, tmp_path):
    """transformers would fill it with random numbers."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder("arcee") / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        find(tmp_path).build(OPS, CPU)


def test_layers_that_mix_tokens_are_refused():
    """A convolution over tokens would mix sequences of a batch, which the engine lays one behind the other."""
    decoder = decoder_of("llama")
    require_tokenwise(decoder, 211)
    decoder.network.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, 1))
    with pytest.raises(UnservedError, match=r"^layers\.2\.mlp mixes tokens outside of attention$"):
        require_tokenwise(decoder, 211)


def fused(decoder):
    fusion = Fusion(decoder, OPS, 256)
    with torch.no_grad():
        fusion.run()
    return fusion


def hidden(decoder):
    ids = torch.arange(9) * 5
    with torch.no_grad():
        return decoder.hidden_per_token(ids, torch.arange(9))


@pytest.mark.parametrize(("model_type", "norms", "mlps", "layers"), [("qwen3", 17, 4, 4), ("qwen3_moe", 17, 0, 4)])
def test_layers_are_fused(model_type, norms, mlps, layers):
    """Without it the fallback would launch three times as many kernels as rosebatch's own models."""
    decoder = decoder_of(model_type)
    before = hidden(decoder)
    fusion = fused(decoder)
    assert (len(fusion.norms), len(fusion.mlps), len(fusion.attention)) == (norms, mlps, 4)
    assert sum("forward" in vars(layer) for layer in decoder.network.model.layers) == layers
    assert all(spec.rotary is not None and spec.qk_norm is not None for spec in decoder.layers.specs)
    torch.testing.assert_close(hidden(decoder), before, rtol=1e-4, atol=1e-4)
    fusion.undo()
    torch.testing.assert_close(hidden(decoder), before, rtol=0, atol=0)


def test_a_vocabulary_of_few_letters_is_fused():
    """The trial runs had more ids: such models were refused with "index out of range"."""
    decoder = decoder_of("qwen3", vocab_size=4, pad_token_id=None)
    ids = torch.arange(9) % 4
    before = decoder.hidden_per_token(ids, torch.arange(9))
    assert len(fused(decoder).mlps) == 4
    torch.testing.assert_close(decoder.hidden_per_token(ids, torch.arange(9)), before, rtol=1e-4, atol=1e-4)


def test_a_layer_of_another_kind_between_fused_ones():
    """It must not take the norm that the layer before it made ready for a later one."""
    decoder = decoder_of("llama")
    for parameter in decoder.network.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    decoder.network.model.layers[1].extra = torch.nn.Identity()
    before = hidden(decoder)
    fused(decoder)
    assert ["forward" in vars(layer) for layer in decoder.network.model.layers] == [True, False, True, True]
    torch.testing.assert_close(hidden(decoder), before, rtol=1e-4, atol=1e-4)


def test_a_part_that_only_looks_alike_stays():
    """Names are hints: an MLP of this shape with another activation is not ours to replace."""
    decoder = decoder_of("llama")
    decoder.network.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    assert len(fused(decoder).mlps) == 3


@pytest.mark.parametrize(("act", "kind"), [("gelu", "gelu_erf_mul"), ("gelu_pytorch_tanh", "gelu_tanh_mul")])
def test_the_form_of_gelu_is_the_models_own(act, kind):
    """The other form passes for rounding in a trial, yet moves hidden states by 1e-4."""
    decoder = decoder_of("llama", hidden_act=act)
    for layer in decoder.network.model.layers:
        layer.mlp.gate_proj.weight.mul_(0.1)
    assert {mlp.kind for mlp in fused(decoder).mlps.values()} == {kind}


def test_attention_that_treats_late_positions_otherwise_stays():
    """Ministral scales queries past a length: agreement on the first positions proves nothing."""
    rope = {**tiny_config("ministral3").rope_parameters, "original_max_position_embeddings": 64}
    fusion = fused(decoder_of("ministral3", rope_parameters=rope))
    assert (len(fusion.attention), len(fusion.mlps)) == (0, 4)


def test_a_fusion_that_changes_the_whole_is_undone(folder, monkeypatch):
    """A slower model is better than a wrong one."""
    run = Fusion.run

    def spoil(self):
        run(self)
        self.decoder.network.model.layers[0].forward = lambda hidden, *args, **options: hidden * 2

    monkeypatch.setattr(Fusion, "run", spoil)
    source = find(folder("arcee"))
    model = load_fallback(source.hf_config, source.config, source.folder, OPS, torch.float32, CPU)
    assert not any("forward" in vars(layer) for layer in model.decoder.network.model.layers)
