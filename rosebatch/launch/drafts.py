"""What a head for drafts needs of a run: ``--speculative-model`` is refused where no step could have its drafts."""

import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches, flag
from rosebatch.core.errors import FlagError
from rosebatch.core.plain import dtype_name
from rosebatch.model.source import ModelSource
from rosebatch.ops.select import has_invariant_products

_GPU = "on a GPU, drafts are made inside of CUDA graphs, which have no layer of a head yet"


def require_drafts(source: ModelSource, config: RunConfig, switches: Switches, device: torch.device) -> None:
    """Check that the head of a run drafts.

    Raises:
        FlagError: no step would have drafts of it; the message says why.
    """
    if source.head is not None and (reason := _why_none(source, config, switches, device)) is not None:
        raise FlagError(f"--speculative-model: {reason}")


def _why_none(source: ModelSource, config: RunConfig, switches: Switches, device: torch.device) -> str | None:
    """Why no step has drafts of the head, and what would mend it."""
    model, dtype = source.config, source.dtype
    reasons = {
        "--speculative off leaves out all drafts: leave it out or": config.speculative == "off",
        f"{_GPU}: take --device cpu or": device.type != "cpu",
        "a head is not divided among ranks: leave --tensor-parallel-size out or": config.tensor_parallel_size > 1,
        "transformers' code runs this model, and hands out no states of its layers:": source.hf_config is not None,
        "the model generates no tokens:": model.bidirectional or not model.head,
        "layers of this model keep states, from which tokens cannot be taken back:": model.num_state_layers > 0,
        "all keys of a row change at a length (longrope):": model.rope is not None and model.rope.scaling == "longrope",
        f"with {flag('batch_invariant', on=False)}, answers would depend on drafts: leave it out or": (
            not switches.batch_invariant
        ),
        f"in {dtype_name(dtype)} on this CPU, answers would depend on drafts: take --dtype float32 or": (
            not has_invariant_products(dtype)
        ),
        "rows with images have no such drafts: take --limit-images 0 for texts alone, or": (
            config.limit_images != 0 and source.vision is not None
        ),
    }
    return next((f"{reason} leave the head out" for reason, applies in reasons.items() if applies), None)
