"""Changes to vLLM's random weights. A module with a name: vLLM's worker processes import it."""

from typing import Any


def without_biases(model: Any) -> None:
    """Have random routers use all experts, as trained ones do.

    Random biases are as large as random embeddings, and the same for all tokens. Added up over the layers they would
    send all tokens to the same experts, and the others would not be read.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
