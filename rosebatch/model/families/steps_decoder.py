"""What Nemotron-H and Falcon-H1 share: a sequence of steps, each a norm and what reads its result side by side."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, load_embedding, load_head, rows_of
from rosebatch.model.sublayers import MLP, Mixer
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops, Partial


@dataclass(frozen=True, slots=True)
class Step:
    """A norm, and mixers or MLPs that read its result. All their results are added to the residual.

    Attributes:
        norm: ``[H]``.
        mixers: of tokens; empty where an MLP is.
        mlp: None where mixers are.
    """

    norm: Tensor
    mixers: tuple[Mixer, ...] = ()
    mlp: MLP | None = None

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None) -> Sequence[Partial]:
        """``[T, H] -> [T, H]``, or the wanted rows, of each."""
        if self.mlp is not None:
            return (self.mlp(normed),)
        return [mixer(normed, attention, wanted) for mixer in self.mixers]


class StepsDecoder(ABC):
    """Transformer of such steps, with RMSNorm.

    Args:
        config: of the model.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    # Names of tensors outside of layers.
    embedding_name: ClassVar[str]
    norm_name: ClassVar[str]

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, self.embedding_name)
        self.layers = self.load_steps(weights)
        self.mixers = [mixer.spec for step in self.layers for mixer in step.mixers]
        self.norm = self.load_norm(self.norm_name, weights)
        self.logits = load_head(config, ops, weights, self.embedding)
        self._last_mix = max(index for index, step in enumerate(self.layers) if step.mixers)

    @abstractmethod
    def load_steps(self, weights: WeightSource) -> list[Step]:
        """The steps of all layers, in order."""

    def load_norm(self, name: str, weights: WeightSource) -> Tensor:
        """The weight of an RMSNorm ``[H]``; an fp32 one is applied before the result is rounded."""
        return weights.get(f"{name}.weight", (self.config.hidden_size,), fill=1.0)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        config, ops = self.config, self.ops
        residual = ops.embed(input_ids, self.embedding, config.vocab_size)
        if config.embedding_multiplier != 1:
            residual = residual.mul_(config.embedding_multiplier)
        normed = ops.rms_norm(residual, self.layers[0].norm, config.norm_eps)
        following = [*(step.norm for step in self.layers[1:]), self.norm]
        for index, (step, norm) in enumerate(zip(self.layers, following, strict=True)):
            rows = wanted if index == self._last_mix else None
            *others, last = step(normed, attention, rows)
            residual = rows_of(residual, rows)
            for partial in others:
                residual = ops.add(partial, residual)
            normed, residual = ops.add_rms_norm(last, residual, norm, config.norm_eps, 1.0, overwrite=True)
        return normed
