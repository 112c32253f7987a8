"""Every A/B switch of the engine: one field, one line of help, the devices it means something on.

The CLI flags, the report and the on-equals-off tests all enumerate these fields, so that a new switch
is one line here and one reader in the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rosebatch.errors import FlagError

_ANYWHERE = ("cpu", "cuda")


def _switch(text: str, devices: tuple[str, ...] = _ANYWHERE) -> Any:
    return field(default=True, metadata={"help": text, "devices": devices})


@dataclass(frozen=True, slots=True)
class Toggles:
    """The switches of a run, all on by default where the device can serve them."""

    prefix_cache: bool = _switch("Reuse the KV blocks of a prefix that was computed before.")
    chunked_prefill: bool = _switch("Split long prompts over steps, beside running decodes.")
    batch_invariant: bool = _switch("Matrix products whose bits do not depend on what else is in the batch.", ("cpu",))

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
