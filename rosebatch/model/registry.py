"""The model class of each family."""

from collections.abc import Callable

from rosebatch.config import ModelConfig
from rosebatch.model.gpt2 import GPT2
from rosebatch.model.hp1 import HP1
from rosebatch.model.layers import Model
from rosebatch.model.llama import Llama
from rosebatch.model.weights import WeightSource
from rosebatch.ops import Ops

FAMILIES: dict[str, Callable[[ModelConfig, Ops, WeightSource], Model]] = {"gpt2": GPT2, "hp1": HP1, "llama": Llama}


def build_model(config: ModelConfig, ops: Ops, weights: WeightSource) -> Model:
    """Build the model that ``config`` describes.

    Raises:
        UserError: a weight is missing or has the wrong shape.
    """
    return FAMILIES[config.family](config, ops, weights)
