"""Parts of transformers' models with the weights of a folder: towers, and what fits their vectors to the text part."""

from pathlib import Path
from typing import Any

import torch

from rosebatch.model.weights import WeightSource

# Names of parts in files that are no transformers' own.
FORMER_PARTS = {"projector": "mlp_AR"}


def load_config(folder: Path) -> Any:
    """transformers' config of a whole model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def empty_whole(config: Any) -> Any:
    """transformers' whole model on the meta device."""
    from transformers import AutoModelForImageTextToText

    # Not all parts have a name of their own among transformers' models.
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


def load_parts(config: Any, weights: WeightSource, names: tuple[str, ...]) -> Any:
    """transformers' whole model, of which these parts have weights, and the others are on the meta device.

    Args:
        config: of the whole model.
        weights: of the model.
        names: of the parts.

    Raises:
        UserError: a tensor is missing, or has another shape.
    """
    from transformers import PreTrainedModel

    whole = empty_whole(config)
    for name in names:
        part = getattr(whole, name)
        if isinstance(part, torch.nn.Parameter):
            own = weights.get(f"model.{name}", tuple(part.shape))
            setattr(whole, name, torch.nn.Parameter(own, requires_grad=False))
            continue
        if isinstance(part, PreTrainedModel):
            # Its buffers are computed here.
            part = type(part)._from_config(part.config, dtype=weights.dtype)
        state = {
            key: weights.get(_stored(weights, name, key), tuple(each.shape)) for key, each in part.state_dict().items()
        }
        part.load_state_dict(state, assign=True)
        device = next(iter(state.values())).device
        setattr(whole, name, part.to(device).eval().requires_grad_(False))
    return whole


def _stored(weights: WeightSource, part: str, key: str) -> str:
    """The name of a part's tensor: towers of CLIP and SigLIP have one more level in files than in transformers 5."""
    names = f"model.{part}.{key}", f"model.{part}.vision_model.{key}", f"{FORMER_PARTS.get(part, part)}.{key}"
    return next((name for name in names if weights.shape(name) is not None), names[0])
