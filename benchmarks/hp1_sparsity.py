"""How much of HP1 is exactly zero, layer by layer: weights of attention, and activations of the MLP.

``python -m benchmarks.hp1_sparsity [--model MODEL] [--load-format dummy] [--tokens 256] [--block 16]``
runs prompts of random token ids through the model, in PyTorch. One run uses the model's own filters, further runs one
sigma each.

A column of attention has two shares of all pairs of a token and a key up to it. Left of the bar are the pairs without
weight. Right of it are those without weight for every head that shares the key: decode does not read their values.

The column of the MLP, with the model's own filters, has two shares of ReLU(gate) ⊙ up: the elements that are zero, and
the blocks of successive channels of one token that are zero as a whole. Sixteen weights in 16 bits are 32 bytes, the
least that a GPU reads. No smaller block could be left out of the product behind it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.options import options
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.engine.load import pick_device
from rosebatch.model.contract import Model
from rosebatch.model.mixers.hp1.mixer import HP1Spec
from rosebatch.model.mixers.mixer import MixerSpec
from rosebatch.model.registry import build_model
from rosebatch.model.source import find_model
from rosebatch.ops.hp1 import mean_taps
from rosebatch.ops.ops import Linear
from rosebatch.ops.select import select
from rosebatch_kernels.hp1.reference import probabilities
from rosebatch_kernels.qkv.torch_heads import split_heads

_SIGMAS = (0.0, 0.5, 1.0, 1.4, 2.0)
_SEQUENCES = 4


class Zeros(NamedTuple):
    """Shares of one layer's attention: weights that are zero, and keys without weight for all heads of a group."""

    weights: float
    values: float


class MlpZeros(NamedTuple):
    """Shares of one layer's MLP: elements that are zero, and blocks that are zero as a whole."""

    elements: float
    blocks: float


@dataclass(slots=True)
class CountingMlp:
    """Activations of MLPs, counted on the way (see ``rosebatch.ops.ops.Ops.gated``).

    Attributes:
        gated: the operator.
        block: channels of a block; a divisor of the MLP's width.
        zeros: the counts of the layers so far.
    """

    gated: Callable[[str, Linear, Tensor, Linear], Tensor]
    block: int
    zeros: list[MlpZeros] = field(default_factory=list)

    def __call__(self, kind: str, gate_up: Linear, x: Tensor, down: Linear) -> Tensor:
        """Activate, and count."""
        out = self.gated(kind, gate_up, x, down)
        zero = out == 0
        blocks = zero.unflatten(-1, (-1, self.block)).all(-1)
        self.zeros.append(MlpZeros(*(float(mask.float().mean()) for mask in (zero, blocks))))
        return out


@dataclass(slots=True)
class CountingAttention:
    """Attention of whole prompts of one length, without a cache (see ``rosebatch.model.contract.Attention``).

    Attributes:
        length: tokens of each prompt.
        sigma: replaces every layer's own; None keeps the filters as they are.
        zeros: the counts of the layers so far.
    """

    length: int
    sigma: float | None = None
    zeros: list[Zeros] = field(default_factory=list)

    def __call__(self, spec: MixerSpec, *inputs: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Attend, and count in all rows."""
        assert isinstance(spec, HP1Spec), "a layer of HP1"
        (qkv,) = inputs
        gate, rotary, length = spec.gate, spec.rotary, self.length
        assert rotary is not None, "HP1 has rotary positions"
        if self.sigma is not None:
            gate = gate._replace(taps=mean_taps(torch.full_like(gate.gamma, self.sigma), gate.taps.shape[1]))
        turned = [table[:length].repeat(len(qkv) // length, 1)[:, None] for table in (rotary.cos, rotary.sin)]
        heads = split_heads(qkv, spec.num_heads, spec.num_kv_heads, (turned[0], turned[1]), spec.qk_norm)
        group = spec.num_heads // spec.num_kv_heads
        q, k, v = (x.float().unflatten(0, (-1, length)).transpose(1, 2) for x in heads)
        scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * spec.scale
        seen = torch.ones(length, length, dtype=torch.bool, device=qkv.device).tril()
        weights = probabilities(scores, gate) * seen
        zero = weights == 0
        unread = zero.unflatten(1, (-1, group)).all(2)
        self.zeros.append(Zeros(*(float(mask[..., seen].float().mean()) for mask in (zero, unread))))
        out: Tensor = weights @ v.repeat_interleave(group, 1)
        return out.transpose(1, 2).flatten(0, 1).flatten(1).to(qkv.dtype)


@torch.inference_mode()
def count_zeros(model: Model, prompts: Tensor, sigma: float | None = None) -> list[Zeros]:
    """The counts of each layer, for prompts ``[S, T]`` of token ids."""
    sequences, length = prompts.shape
    attention = CountingAttention(length, sigma)
    positions = torch.arange(length, device=prompts.device).repeat(sequences)
    model.forward(prompts.flatten(), positions, attention)
    return attention.zeros


def main() -> None:
    """Print one line for each layer, and one for their mean."""
    model = str(configs_dir() / "models" / "hp1-0.6b.toml")
    formats = {"choices": ["auto", "dummy"], "default": "dummy"}
    given = options(__doc__, model=model, load_format=formats, tokens=256, block=16)
    device = pick_device("auto")
    source = find_model(RunConfig(model=given.model, load_format=given.load_format), device)
    if source.config.family != "hp1":
        raise UserError(f"--model {Path(given.model).name} is not an HP1 model")
    width = source.config.intermediate_size
    if given.block < 1 or width % given.block:
        raise UserError(f"--block {given.block} does not divide the {width} channels of the MLP")
    ops = select(Switches.resolve({}, "cpu"))
    mlp = CountingMlp(ops.gated, given.block)
    with torch.inference_mode():
        network = build_model(source.config, replace(ops, gated=mlp), source.weights(device))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(source.config.vocab_size, (_SEQUENCES, given.tokens), generator=generator).to(device)
    columns: dict[str, Sequence[Zeros | MlpZeros]] = {"own filters": count_zeros(network, prompts)}
    columns["MLP"] = mlp.zeros[:]
    columns |= {f"sigma {sigma}": count_zeros(network, prompts, sigma) for sigma in _SIGMAS}
    sys.stdout.write(f"{'layer':<8}" + "".join(f"{name:>16}" for name in columns) + "\n")
    for number, layer in enumerate(zip(*columns.values(), strict=True)):
        sys.stdout.write(f"{number:<8}" + "".join(map(_cell, layer)) + "\n")
    means = [[sum(share) / len(counts) for share in zip(*counts, strict=True)] for counts in columns.values()]
    sys.stdout.write(f"{'all':<8}" + "".join(map(_cell, means)) + "\n")


def _cell(shares: Sequence[float]) -> str:
    return " | ".join(f"{share:.1%}" for share in shares).rjust(16)


if __name__ == "__main__":
    main()
