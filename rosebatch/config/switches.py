"""Every A/B switch of the engine: a line of help, the devices that have it, and where it has an effect.

Flags, the report, on-equals-off tests and ``bench --compare`` enumerate these fields. So a new switch is one line here
and one reader in the code, at load.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rosebatch.core.errors import FlagError

_ANYWHERE = ("cpu", "cuda")
_CPU = ("cpu",)
_CUDA = ("cuda",)


def _switch(
    text: str,
    devices: tuple[str, ...] = _ANYWHERE,
    *,
    scenario: str,
    needs: tuple[str, ...] = (),
    hidden_by: Mapping[str, str] | None = None,
    on: tuple[str, ...] | None = None,
) -> Any:
    """A switch.

    Args:
        text: its line of help.
        devices: that have it.
        scenario: a name in ``configs/bench``, of work in which the switch changes what runs.
        needs: switches without which it has no effect.
        hidden_by: switches with which it has no effect, and where: nothing means anywhere.
        on: devices on which it is on where it is not asked for; None for all that have it.
    """
    on = devices if on is None else on
    metadata = {"help": text, "devices": devices, "scenario": scenario, "needs": needs, "hidden_by": hidden_by or {}}
    return field(default=bool(on), metadata={**metadata, "on": on})


_PAGED = ("paged_attention",)


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of a run. On by default are those that the device has, but for some that are not measured yet."""

    prefix_cache: bool = _switch("Reuse the KV blocks of prefixes computed before.", scenario="shared-prefix")
    chunked_prefill: bool = _switch("Split long prompts over steps.", scenario="qwen3-mixed")
    batched_sampling: bool = _switch(
        "Sample rows with equal settings together.", scenario="article-s3", hidden_by={"fused_sampler": ""}
    )
    trim_last_layer: bool = _switch("Compute only the rows of the last layer that are read.", scenario="prefill_only")
    batch_invariant: bool = _switch(
        "Results do not depend on the other rows of the batch.", scenario="balanced_b32", on=_CPU
    )
    paged_attention: bool = _switch("Read K and V in their blocks, without a gather.", _CUDA, scenario="article-s0")
    cuda_graph: bool = _switch("Replay steps as CUDA graphs.", _CUDA, scenario="article-s3", needs=_PAGED)
    parallel_compile: bool = _switch(
        "Compile the kernels of the first steps at once.", _CUDA, scenario="gpt2-sampled", needs=("cuda_graph",)
    )
    late_results: bool = _switch(
        "Read sampled tokens while the GPU runs the next step.", _CUDA, scenario="article-s3", needs=_PAGED
    )
    batched_rollover: bool = _switch(
        "Give new blocks to all full sequences in one write.", _CUDA, scenario="article-s1", needs=_PAGED
    )
    fused_sampler: bool = _switch(
        "One kernel from logits to tokens, inside the graph.", _CUDA, scenario="article-s0", needs=_PAGED
    )
    streamed_linear: bool = _switch(
        "Use our matrix products where they beat cuBLAS.", _CUDA, scenario="decode_heavy_b32"
    )
    fused_norm: bool = _switch("Residual addition and norm in one kernel.", _CUDA, scenario="article-s0")
    fused_mlp: bool = _switch("Bias, activation and gate of the MLP in one kernel.", _CUDA, scenario="article-s0")
    fused_rotary: bool = _switch(
        "Rotary positions and KV append in one kernel.", _CUDA, scenario="decode_heavy_b32", needs=_PAGED
    )
    fused_qk_norm: bool = _switch(
        "QK norm in the kernel that rotates.", _CUDA, scenario="article-s4", needs=("fused_rotary",)
    )
    fused_kv_append: bool = _switch(
        "Decode attention writes the new K and V.", _CUDA, scenario="article-s0", needs=_PAGED
    )
    split_keys: bool = _switch(
        "Decode attention splits a sequence's keys.", _CUDA, scenario="long_decode_b32", needs=_PAGED
    )
    shared_prefix_attention: bool = _switch(
        "Attention reads a common prefix once for all rows.",
        _CUDA,
        scenario="shared-prefix",
        needs=_PAGED,
    )
    hopper_prefill: bool = _switch(
        "Hopper's own kernel for the attention of prompts.", _CUDA, scenario="prefill_heavy_b16", needs=_PAGED
    )
    fused_peri_norm: bool = _switch(
        "HP1: clip, residual addition, clip in one kernel.", _CUDA, scenario="article-s4", needs=("fused_norm",)
    )
    sparse_values: bool = _switch(
        "HP1: skip values that the gate gives no weight.", _CUDA, scenario="article-s4", needs=_PAGED
    )
    batched_kv_append: bool = _switch(
        "Write K and V by one kernel where it is not fused.",
        _CUDA,
        scenario="article-s2",
        hidden_by={"fused_rotary": "", "fused_kv_append": " in decode steps"},
    )
    swap: bool = _switch("Save K and V of preempted sequences in host memory.", _CUDA, scenario="preempting", on=())
    quantized_linear: bool = _switch("Multiply quantized weights as they are.", _CUDA, scenario="llama-8b-short")

    @property
    def replays(self) -> bool:
        """Whether preempted sequences that are not saved sample their tokens again: prompts have other kernels."""
        return self.batch_invariant and self.paged_attention

    @classmethod
    def resolve(cls, requested: Mapping[str, bool | None], device: str) -> "Switches":
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
                raise FlagError(
                    f"{flag(switch.name)} has no meaning on {device}: leave it out or choose another --device"
                )
            values[switch.name] = is_on(switch, device) if wanted is None else wanted
        return cls(**values)


def is_on(switch: "Field[Any]", device: str) -> bool:
    """Whether a field of ``Switches`` is on by default on ``device``."""
    return device in switch.metadata["on"]


def hidden_by(switch: str, device: str) -> list[str]:
    """Switches that must be off on ``device`` for this one to have all of its effect."""
    served = {each.name for each in fields(Switches) if device in each.metadata["devices"]}
    return [name for name in _metadata(switch)["hidden_by"] if name in served]


def hiding(switch: str, switches: Switches) -> dict[str, str]:
    """The switches that leave this one without effect while they are on, and where: nothing means anywhere."""
    named = _metadata(switch)["hidden_by"].items()
    return {other: where for other, where in named if getattr(switches, other) and not missing(other, switches)}


def missing(switch: str, switches: Switches) -> str:
    """A switch that is off and without which this one has no effect; empty if there is none."""
    for other in _metadata(switch)["needs"]:
        name = missing(other, switches) if getattr(switches, other) else other
        if name:
            return str(name)
    return ""


def without_effect(requested: Mapping[str, bool | None], switches: Switches, device: str) -> list[str]:
    """A sentence for each switch that was asked for by name and changes nothing, or less than it says.

    Args:
        requested: as for ``Switches.resolve``.
        switches: what it returned.
        device: the same.
    """
    found = []
    for switch in fields(Switches):
        name, value = switch.name, requested.get(switch.name)
        if value is None or device not in switch.metadata["devices"]:
            continue
        own = flag(name, on=value)
        if off := missing(name, switches):
            found.append(f"{own} has no effect with {flag(off, on=False)}")
        else:
            reasons = hiding(name, switches).items()
            found += [f"{own} has no effect{where} while {flag(other)} is on" for other, where in reasons][:1]
    return found


def flag(name: str, *, on: bool = True) -> str:
    """A switch, or another field, as it is written on the command line."""
    return ("--" if on else "--no-") + name.replace("_", "-")


def _metadata(switch: str) -> Mapping[str, Any]:
    (found,) = (each.metadata for each in fields(Switches) if each.name == switch)
    return found


SWITCH_NAMES = tuple(switch.name for switch in fields(Switches))
