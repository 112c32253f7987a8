"""Checks of a loaded network: whether its layers mix tokens in any way but attention, and whether it waits."""

import random
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rosebatch.model.fallback.attention import UnservedError
from rosebatch.model.fallback.network import Decoder

# Two runs share these many tokens, in another order; the others differ.
_SHARED, _OTHERS = 6, 5
# Most relative difference of a token's hidden state between the runs, by dtype.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def require_tokenwise(decoder: Decoder, vocab_size: int) -> None:
    """Check that with attention left out, a token's hidden state depends on its id and position only.

    State-space layers, convolutions over tokens, and positions that a model counts itself fail this check. So do
    masks and biases that do not go through the attention function.

    Raises:
        UnservedError: a module mixes tokens.
    """
    numbers, tokens = random.Random(0), _SHARED + _OTHERS
    order = [3, 0, 5, 4, 1, 2]
    ids = [numbers.randrange(vocab_size) for _ in range(tokens + _OTHERS)]
    positions = [2, 7, 0, 9, 4, 5, 1, 8, 3, 6, 10, 11, 3, 2, 6, 0]
    first = _outputs(decoder, ids[:tokens], positions[:tokens])
    second = _outputs(
        decoder, [ids[i] for i in order] + ids[tokens:], [positions[i] for i in order] + positions[tokens:]
    )
    for name, whole in first.items():
        expected, found = whole[:, order], second[name][:, :_SHARED]
        if torch.isfinite(expected).all() and not close(found, expected, _TOLERANCE[whole.dtype]):
            raise UnservedError(f"{name} mixes tokens outside of attention")


def close(found: Tensor, expected: Tensor, limit: float) -> bool:
    """Whether the relative difference of two results is at most this."""
    return bool((found.float() - expected.float()).norm() <= limit * expected.float().norm())


def _outputs(decoder: Decoder, ids: list[int], positions: list[int]) -> dict[str, Tensor]:
    """What modules return for each token, in the order of their calls."""
    outputs: dict[str, Tensor] = {}
    hooks = []
    device = next(decoder.network.parameters()).device
    for name, module in decoder.layers.body.named_modules():

        def keep(module: Module, args: Any, out: Any, name: str = name) -> None:
            out = out[0] if isinstance(out, tuple) and out else out
            if isinstance(out, Tensor) and out.shape[:2] == (1, len(ids)) and out.dtype in _TOLERANCE:
                outputs[name or "the model"] = out.clone()

        hooks.append(module.register_forward_hook(keep))
    hidden = decoder.hidden_per_token(torch.tensor(ids, device=device), torch.tensor(positions, device=device))
    for hook in hooks:
        hook.remove()
    return {**outputs, "the model": hidden[None]}


def waits_for_host(decoder: Decoder) -> str | None:
    """Why a forward pass waits for the host, which a CUDA graph cannot; None if it does not, or on a CPU."""
    device = next(decoder.network.parameters()).device
    if device.type != "cuda":
        return None
    ids, positions = decoder.some_ids(_SHARED, device), torch.arange(_SHARED, device=device)
    mode = torch.cuda.get_sync_debug_mode()
    decoder.logits(decoder.hidden_per_token(ids, positions))
    try:
        with warnings.catch_warnings():
            # PyTorch calls the mode a prototype, once.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        decoder.logits(decoder.hidden_per_token(ids, positions))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None
