"""Parts of transformers' models with the weights of a folder: towers, and what fits their vectors to the text part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rosebatch.model.weights import WeightSource


def load_config(folder: Path) -> Any:
    """transformers' config of a whole model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def empty_whole(config: Any, dtype: torch.dtype | None = None) -> Any:
    """transformers' whole model on the meta device, with its head."""
    from transformers import AutoModelForImageTextToText

    # Not all parts have a name of their own among transformers' models.
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def load_parts(config: Any, weights: WeightSource, names: Sequence[str], former: Sequence[str] = ()) -> Any:
    """transformers' whole model without its head, of which these parts have weights; the others are on the meta device.

    Args:
        config: of the whole model.
        weights: of the model.
        names: of the parts.
        former: what names of their tensors have between dots in files that are not of transformers.

    Raises:
        UserError: a tensor is missing, or has another shape.
    """
    from transformers import PreTrainedModel

    model = empty_whole(config, weights.dtype)
    whole, converted = model.model, _converted(model, weights, former)

    def stored(key: str, shape: tuple[int, ...]) -> Tensor:
        return converted[key] if key in converted else weights.get(_stored(weights, key), shape)

    for name in names:
        part = getattr(whole, name)
        if isinstance(part, torch.nn.Parameter):
            own = stored(f"model.{name}", tuple(part.shape))
            setattr(whole, name, torch.nn.Parameter(own, requires_grad=False))
            continue
        if isinstance(part, PreTrainedModel):
            # Its buffers are computed here.
            part = type(part)._from_config(part.config, dtype=weights.dtype)
        state = {key: stored(f"model.{name}.{key}", tuple(each.shape)) for key, each in part.state_dict().items()}
        part.load_state_dict(state, assign=True)
        device = next(iter(state.values())).device
        setattr(whole, name, part.to(device).eval().requires_grad_(False))
    return whole


def _stored(weights: WeightSource, key: str) -> str:
    """The name of a part's tensor: towers of CLIP and SigLIP have one more level in files than in transformers 5."""
    model, part, rest = (*key.split(".", 2), "")[:3]
    names = key, f"{model}.{part}.vision_model.{rest}"
    return next((name for name in names if weights.shape(name) is not None), key)


def _converted(model: Any, weights: WeightSource, former: Sequence[str]) -> dict[str, Tensor]:
    """Tensors with such names as transformers makes them, by its names: some are cut or joined."""
    given = {name: weights.shape(name) or () for name in weights.names() if not set(former).isdisjoint(name.split("."))}
    if not given:
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    tensors = {name: weights.get(name, shape) for name, shape in given.items()}
    device = next(iter(tensors.values())).device
    mapping = get_model_conversion_mapping(model)
    load = LoadStateDictConfig(dtype=weights.dtype, device_map={"": device}, weight_mapping=mapping)
    with _without_bar():
        found, _ = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=load)
    return {name: each.detach() for name, each in model.state_dict().items() if name not in found.missing_keys}


@contextmanager
def _without_bar() -> Iterator[None]:
    """A tower is loaded while rosebatch shows its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
