"""Random weights for engines that read a checkpoint tensor by tensor."""

from typing import Any


class RandomCheckpoint:
    """In the place of LMDeploy's ``Checkpoint``: tensors are drawn on the GPU when they are asked for.

    Matrices are normal with the usual spread, weights of norms are 1, biases 0. Names and shapes are those of
    transformers' model, which is built without memory.

    Args:
        folder: of a config.
        dtype: PyTorch's name of it.
        device: of the tensors.
    """

    def __init__(self, folder: str, dtype: str, device: str = "cuda") -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            weights = AutoModelForCausalLM.from_config(config).state_dict()
        self._shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self._of = {"dtype": getattr(torch, dtype), "device": device}

    def has(self, name: str) -> bool:
        """Whether the model has such a tensor."""
        return name in self._shapes

    def get(self, name: str, index: Any = None) -> Any:
        """A tensor, or what ``index`` takes of it.

        Raises:
            KeyError: there is no such tensor.
        """
        import torch

        shape = self._shapes[name]
        if len(shape) > 1:
            drawn = torch.empty(shape, **self._of).normal_(0, 0.02)
        else:
            drawn = torch.full(shape, float(name.endswith("weight")), **self._of)
        return drawn if index is None else drawn[index]

    pop = get

    def close(self) -> None:
        """Nothing is open."""
