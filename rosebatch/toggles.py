"""Every A/B switch of the engine: one field, one line of help, the devices where it has an effect.

Flags, the report, on-equals-off tests and ``bench --compare`` enumerate these fields. So a new switch is one line here
and one reader in the code, at load.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rosebatch.errors import FlagError

_ANYWHERE = ("cpu", "cuda")
_CPU = ("cpu",)
_CUDA = ("cuda",)


def _switch(text: str, devices: tuple[str, ...] = _ANYWHERE, hidden_by: tuple[str, ...] = ()) -> Any:
    """A switch; it has no effect while one of those in ``hidden_by`` is on."""
    return field(default=True, metadata={"help": text, "devices": devices, "hidden_by": hidden_by})


@dataclass(frozen=True, slots=True)
class Toggles:
    """The switches of a run. All are on by default, as far as the device has them."""

    prefix_cache: bool = _switch("Reuse the KV blocks of prefixes computed before.")
    chunked_prefill: bool = _switch("Split long prompts over steps.")
    batched_sampling: bool = _switch("Sample like rows of a step together.", hidden_by=("fused_sampler",))
    batch_invariant: bool = _switch("Results do not depend on what else is in the batch.", _CPU)
    paged_attention: bool = _switch("Read K and V in their blocks, without gathering them.", _CUDA)
    cuda_graph: bool = _switch("Replay steps as CUDA graphs.", _CUDA)
    late_results: bool = _switch("Read sampled tokens late, while the GPU works on.", _CUDA)
    batched_rollover: bool = _switch("Give new blocks to all sequences in one write.", _CUDA)
    fused_sampler: bool = _switch("One kernel from logits to tokens, inside the graph.", _CUDA)
    streamed_linear: bool = _switch("Small products by a kernel that reads weights ahead.", _CUDA)
    fused_norm: bool = _switch("Residual addition and norm in one kernel.", _CUDA)
    fused_mlp: bool = _switch("Bias, activation and gate of the MLP in one kernel.", _CUDA)
    fused_rotary: bool = _switch("QK norm, rotary and KV append in one kernel.", _CUDA)
    fused_kv_append: bool = _switch("Decode attention writes the new K and V.", _CUDA)
    split_keys: bool = _switch("Decode attention splits a sequence's keys.", _CUDA)
    fused_peri_norm: bool = _switch("HP1: clip, residual addition, clip in one kernel.", _CUDA)
    sparse_values: bool = _switch("HP1: skip values that the gate gives no weight.", _CUDA)
    batched_kv_append: bool = _switch(
        "Write K and V by one kernel where it is not fused.", _CUDA, ("fused_rotary", "fused_kv_append")
    )

    @classmethod
    def resolve(cls, requested: Mapping[str, bool | None], device: str) -> "Toggles":
        """Defaults for ``device`` overlaid with what was asked for by name.

        Args:
            requested: switch name -> True, False, or None for the default.
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            FlagError: a switch was asked for that the device does not have.
        """
        values = {}
        for switch in fields(cls):
            served = device in switch.metadata["devices"]
            wanted = requested.get(switch.name)
            if wanted and not served:
                flag = "--" + switch.name.replace("_", "-")
                raise FlagError(f"{flag} has no meaning on {device}: leave it out or choose another --device")
            values[switch.name] = served if wanted is None else wanted
        return cls(**values)


def hidden_by(switch: str, device: str) -> list[str]:
    """Switches that must be off on ``device`` for this one to have an effect."""
    served = {each.name for each in fields(Toggles) if device in each.metadata["devices"]}
    (found,) = (each.metadata["hidden_by"] for each in fields(Toggles) if each.name == switch)
    return [name for name in found if name in served]


SWITCH_NAMES = tuple(switch.name for switch in fields(Toggles))
