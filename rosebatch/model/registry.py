"""The model families, and transformers' architectures that they serve: those of each file in ``families``."""

from importlib import import_module
from pkgutil import iter_modules

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.host.model_files import refusal, shown
from rosebatch.model import families
from rosebatch.model.contract import Model
from rosebatch.model.family import Architecture, Family
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, GATES, Ops

# Matrices of an MLP with a gate.
_GATED = 3

_FILES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
# By the names that ``ModelConfig.family`` may have; a file may serve an architecture by the class of another file.
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES if hasattr(file, "FAMILY")}
# Parts of ``ModelConfig`` that only some families have.
_PARTS = {name for family in FAMILIES.values() for name in (*family.needs, *family.may_have)}
# By transformers' names.
ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for file in _FILES for name, architecture in getattr(file, "ARCHITECTURES", {}).items()
}


def check_config(config: ModelConfig, source: str) -> ModelConfig:
    """The shape, if its family has all of its options.

    Raises:
        UserError: there is no such family, or it lacks an option; the message starts with ``source``.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise refusal(source, f"unknown family {shown(config.family)}; families are {', '.join(FAMILIES)}")
    for name, what in family.needs.items():
        if getattr(config, name) is None:
            raise refusal(source, f"{name} is missing: {what}")
    for name in sorted(_PARTS - {*family.needs, *family.may_have}):
        if getattr(config, name) is not None:
            raise refusal(source, f"{name} has no meaning for {config.family}")
    if config.bidirectional and not family.bidirectional:
        raise refusal(source, f"bidirectional has no meaning for {config.family}")
    for name in family.lacks:
        if getattr(config, name):
            raise refusal(source, f"{name} is not supported for {config.family}")
    try:
        family.check(config)
    except ValueError as error:
        raise refusal(source, error) from None
    return config


def build_model(config: ModelConfig, ops: Ops, weights: WeightSource) -> Model:
    """Build the model that ``config`` describes.

    Raises:
        UserError: a weight is missing or has the wrong shape, or the MLP cannot have this activation.
    """
    family = FAMILIES[config.family]
    served = family.activations or (GATES if family.mlp_matrices == _GATED else ACTIVATIONS)
    if config.activation not in served:
        raise UserError(f"activation {config.activation!r} is not supported; supported are {', '.join(served)}")
    return family.load(config, ops, weights)
