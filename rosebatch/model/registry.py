"""The model class of each family."""

from typing import Protocol

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.model.families.cohere import Cohere
from rosebatch.model.families.gemma import Gemma
from rosebatch.model.families.glm4 import Glm4
from rosebatch.model.families.gpt2 import GPT2
from rosebatch.model.families.gpt_neox import GPTNeoX
from rosebatch.model.families.gpt_oss import GptOss
from rosebatch.model.families.hp1 import HP1
from rosebatch.model.families.llama import Llama
from rosebatch.model.families.mixtral import Mixtral
from rosebatch.model.families.olmo2 import Olmo2
from rosebatch.model.families.phi3 import Phi3
from rosebatch.model.families.qwen3_next import Qwen3Next, Qwen35
from rosebatch.model.families.stablelm import StableLM
from rosebatch.model.families.starcoder2 import Starcoder2
from rosebatch.model.layers import Model
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, GATES, Ops

# Matrices of an MLP with a gate.
_GATED = 3


class Family(Protocol):
    """A class of models."""

    # Matrices of hidden size x intermediate size in a layer's MLP; the floor of a run counts their bytes.
    mlp_matrices: int

    def __call__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> Model:
        """Load a model of this shape."""
        ...


# By the names that ``ModelConfig.family`` may have.
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": Llama,
    "mixtral": Mixtral,
    "gpt_oss": GptOss,
    "gemma": Gemma,
    "phi3": Phi3,
    "olmo2": Olmo2,
    "glm4": Glm4,
    "stablelm": StableLM,
    "cohere": Cohere,
    "gpt_neox": GPTNeoX,
    "starcoder2": Starcoder2,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "hp1": HP1,
}


def build_model(config: ModelConfig, ops: Ops, weights: WeightSource) -> Model:
    """Build the model that ``config`` describes.

    Raises:
        UserError: a weight is missing or has the wrong shape, or the MLP cannot have this activation.
    """
    family = FAMILIES[config.family]
    served = GATES if family.mlp_matrices == _GATED else ACTIVATIONS
    if config.activation not in served:
        raise UserError(f"activation {config.activation!r} is not supported; supported are {', '.join(served)}")
    return family(config, ops, weights)
