"""The model families, and transformers' architectures that they serve: those of each file in ``families``."""

from importlib import import_module
from pkgutil import iter_modules

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.model import families
from rosebatch.model.family import Architecture, Family
from rosebatch.model.layers import Model
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, GATES, Ops

# Matrices of an MLP with a gate.
_GATED = 3

_FILES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
# By the names that ``ModelConfig.family`` may have; a file may serve an architecture by the class of another file.
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES if hasattr(file, "FAMILY")}
# By transformers' names.
ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for file in _FILES for name, architecture in getattr(file, "ARCHITECTURES", {}).items()
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
    return family.load(config, ops, weights)
