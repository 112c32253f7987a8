"""On a GPU, experts that stay quantized: in a graph, close to those that were decoded, in a third of the memory."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.config.switches import Switches
from rosebatch.model.quantization.formats.mxfp4 import MXFP4
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.ops import Experts
from rosebatch.ops.select import select
from tests.model.quantization.test_kept_experts import mxfp4

pytestmark = pytest.mark.gpu
COUNT, HIDDEN, INNER = 16, 768, 640


@pytest.fixture(scope="module")
def experts(tmp_path_factory, device):
    """Of gpt-oss, with the switch on and off, and the bytes that they took."""
    folder, shapes = (
        tmp_path_factory.mktemp("experts"),
        {"up": (COUNT, HIDDEN, 2 * INNER), "down": (COUNT, INNER, HIDDEN)},
    )
    save_file(
        {k: v for name, shape in shapes.items() for k, v in mxfp4(name, torch.empty(shape))[0].items()},
        folder / "model.safetensors",
    )
    source = SafetensorsWeights(folder, torch.bfloat16, device, MXFP4.of({}))
    found = {}
    for on in (True, False):
        gate_up, down = (load_weight(source, name, (e, out, size)) for name, (e, size, out) in shapes.items())
        layer = Experts(gate_up=gate_up, down=down, activation="clamped_swiglu", k=4, normalize=True)
        before = torch.cuda.memory_allocated(device)
        run = select(Switches.resolve({"quantized_linear": on}, "cuda"), "cuda").experts(layer)
        found[on] = run, torch.cuda.memory_allocated(device) - before
    return found


def test_the_memory_that_is_kept(experts):
    """4.25 bits a value; numbers of a byte each, or what was read, would stay without being used."""
    assert experts[True][1] < 0.3 * experts[False][1]
    assert experts[False][1] >= 2 * 3 * COUNT * HIDDEN * INNER


@pytest.mark.parametrize("tokens", [1, 16, 70, 300, 1000])
def test_graphs_and_values(experts, device, tokens):
    """A load that runs ahead of the chunk before it, or a wait for the host, would show."""
    generator = torch.Generator(device).manual_seed(tokens)
    x, logits = (torch.randn(tokens, size, device=device, generator=generator).bfloat16() for size in (HIDDEN, COUNT))
    run, expected = experts[True][0], experts[False][0](x, logits, None).value.float().sum(0)
    first = run(x, logits, None).value
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(x, logits, None).value
    for _ in range(3):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, first)
    # The same bf16 values are multiplied: sums alone may be in another order, and be rounded between both products.
    assert (first.float().sum(0) - expected).norm() / expected.norm() < 0.01
