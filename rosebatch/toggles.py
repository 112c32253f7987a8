"""Every A/B switch of the engine: one field, one line of help, the devices it means something on.

The CLI flags, the report and the on-equals-off tests all enumerate these fields, so that a new switch
is one line here and one reader in the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rosebatch.errors import FlagError

_ANYWHERE = ("cpu", "cuda")
_CPU = ("cpu",)
_CUDA = ("cuda",)


def _switch(text: str, devices: tuple[str, ...] = _ANYWHERE) -> Any:
    return field(default=True, metadata={"help": text, "devices": devices})


@dataclass(frozen=True, slots=True)
class Toggles:
    """The switches of a run, all on by default where the device can serve them."""

    prefix_cache: bool = _switch("Reuse the KV blocks of a prefix that was computed before.")
    chunked_prefill: bool = _switch("Split long prompts over steps, beside running decodes.")
    batched_sampling: bool = _switch("Sample all rows of a step in as few calls as there are kinds of sampling.")
    batch_invariant: bool = _switch("Matrix products whose bits do not depend on what else is in the batch.", _CPU)
    paged_attention: bool = _switch("Read K and V in their blocks, instead of gathering them first.", _CUDA)
    cuda_graph: bool = _switch("Replay decode steps, and prompts of a few thousand tokens, as CUDA graphs.", _CUDA)
    late_results: bool = _switch("Read sampled tokens some steps late, while the GPU works on.", _CUDA)
    batched_rollover: bool = _switch("Hand new blocks to all sequences in one write.", _CUDA)
    fused_sampler: bool = _switch("One kernel from logits to tokens, inside the graph.", _CUDA)
    streamed_linear: bool = _switch("Products of few rows by a kernel that reads the weight ahead.", _CUDA)
    fused_norm: bool = _switch("Residual addition and norm in one kernel.", _CUDA)
    fused_mlp: bool = _switch("Bias and activation, bias and residual, gate and product in one kernel each.", _CUDA)
    fused_rotary: bool = _switch("QK norm and rotary positions in one kernel, with the KV append.", _CUDA)
    fused_kv_append: bool = _switch("Decode attention writes the new K and V itself.", _CUDA)
    split_keys: bool = _switch("Decode attention divides a sequence's keys among several programs.", _CUDA)
    fused_peri_norm: bool = _switch("HP1's clip, the residual addition and the next clip in one kernel.", _CUDA)
    sparse_values: bool = _switch("Leave out the values that HP1's gate gives no weight.", _CUDA)
    batched_kv_append: bool = _switch("One kernel writes or copies K and V where they are not fused.", _CUDA)

    @classmethod
    def resolve(cls, requested: Mapping[str, bool | None], device: str) -> "Toggles":
        """Defaults for ``device`` overlaid with what was asked for by name.

        Args:
            requested: switch name -> True, False, or None for the default.
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            FlagError: a switch asked for by name that the device cannot serve.
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
