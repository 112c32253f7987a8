"""Models whose experts stay quantized, by the interpreter: logits are those of experts that were decoded at load."""

from dataclasses import replace

import msgspec
import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.model.quantization.forms import form_of
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.select import select
from rosebatch_kernels.experts import kernel
from rosebatch_kernels.experts.packed import Packed
from tests.engine.family_models import FAMILIES
from tests.helpers.launches import one_at_a_time
from tests.model.quantization.numbers import E2M1, codes_of, encoder, model_of, seeded
from tests.model.quantization.same_logits import CPU, OPS, all_logits, write_both
from tests.model.quantization.test_fp8 import matrices

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def mxfp4(name, values):
    """Experts of gpt-oss as the Hub has them; values are ``[E, in, out]`` as transformers writes them."""
    if values.ndim != 3:
        return {}, values
    experts, columns, rows = values.shape
    groups = -(-columns // 32)
    codes = torch.nn.functional.pad(codes_of(name, (experts, rows, columns), 4), (0, -columns % 32))
    exponents = torch.randint(119, 124, (experts, rows, groups), generator=seeded(name))
    pairs = codes.view(experts, rows, groups, 16, 2)
    tensors = {
        f"{name}_blocks": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        f"{name}_scales": exponents.to(torch.uint8),
    }
    dense = E2M1[codes].view(experts, rows, groups, 32) * torch.exp2(exponents - 127.0)[..., None]
    return tensors, dense.flatten(2)[..., :columns].mT


def gpt_oss():
    """24 channels of two ranks: the second one's begin inside of a group, so its second product is dense."""
    config = msgspec.structs.replace(FAMILIES["gpt_oss"], hidden_size=40)
    experts = msgspec.structs.replace(config.experts, expert_size=48)
    return msgspec.structs.replace(config, experts=experts), mxfp4, {"quant_method": "mxfp4"}


def qwen3_moe():
    return model_of("qwen3_moe"), encoder("qwen3_moe", matrices([128, 128])), BLOCK


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [gpt_oss, qwen3_moe])
def test_the_same_logits(tmp_path, monkeypatch, make, size):
    """gate and up in turn, biases, and an expert in another's place would show; so would a rank's second part."""
    config, encode, quantization = make()
    packed, dense = write_both(tmp_path, config, encode)
    kept = []

    def recorded(*args, of=kernel.parts, **options):
        kept.append([isinstance(each, Packed) for each in args[3:5]])
        return of(*args, **options)

    one_at_a_time(monkeypatch)
    monkeypatch.setattr(kernel, "parts", recorded)
    found = []
    for on in (True, False):
        switches = replace(Switches.resolve({}, "cuda"), quantized_linear=on)
        ops = replace(OPS, experts=select(switches, "cuda").experts)
        source = SafetensorsWeights(packed, torch.float32, CPU, form_of(quantization))
        found.append(all_logits(config, source, size, ops))
        expected = [True, True] if on else [False, False]
        assert kept and all(each[0] is on for each in kept)
        assert expected in kept
        assert not on or size == 1 or make is qwen3_moe or [True, False] in kept, "a rank's columns cut a group"
        kept.clear()
    exact = all_logits(config, SafetensorsWeights(dense, torch.float32, CPU), 1)[0]
    for each in (logits for ranks in found for logits in ranks):
        torch.testing.assert_close(each, exact, rtol=1e-4, atol=1e-5)
    assert exact.std() > 0.01
