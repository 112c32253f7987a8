"""Rotary positions of config.json, as transformers 4 and 5 write them -> fields of ``RopeConfig``."""

import math
from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.hf.fields import UnservedError, supported

_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "mrope")
_THETA = 10000.0
# Members that are read, and those that change nothing: sections of positions are alike in text.
_MEMBERS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "mrope_section", "mrope_interleaved", "finetuned"),
}


def rope(values: Mapping[str, Any], theta_name: str = "rope_theta") -> dict[str, Any]:
    """The positions of a model whose layers all have the same ones.

    Args:
        values: of config.json.
        theta_name: of transformers 4's field.
    """
    stored = rope_members(values)
    theta = stored.get("rope_theta") or values.get(theta_name) or _THETA
    return _fields(stored, values, theta, _trained(stored, values))


def whole_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, for a family that rotates whole heads."""
    if rotary_share(values, 1.0) != 1.0:
        raise UnservedError("partial_rotary_factor other than 1 is not supported")
    return rope(values)


def ropes_by_type(
    values: Mapping[str, Any], theta: float, sliding_theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The positions of full and of sliding layers.

    transformers 5 writes an object for each type of layer. transformers 4 wrote the base and the scaling of full
    layers, and ``rope_local_base_freq``.

    Args:
        values: of config.json.
        theta, sliding_theta: where none is given.
    """
    stored = _object(values.get("rope_parameters"))
    _require_known(stored, {*_MEMBERS, "full_attention", "sliding_attention"})
    full = {**_object(stored.get("full_attention")), **_object(values.get("rope_scaling"))}
    sliding = _object(stored.get("sliding_attention"))
    bases = (
        full.get("rope_theta") or values.get("rope_theta") or theta,
        sliding.get("rope_theta") or values.get("rope_local_base_freq") or sliding_theta,
    )
    limit = values["max_position_embeddings"]
    lengths = [each.get("original_max_position_embeddings") or limit for each in (full, sliding)]
    return _fields(full, values, bases[0], lengths[0]), _fields(sliding, values, bases[1], lengths[1])


def rope_members(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of rotary positions: transformers 5 writes all in one, transformers 4 wrote the base apart.

    Its members win over fields of the same name beside it, which some versions of transformers write as well.
    """
    return _object(values.get("rope_scaling") or values.get("rope_parameters"))


def rotary_share(values: Mapping[str, Any], default: float, name: str = "partial_rotary_factor") -> float:
    """The share of each head's channels that is rotated."""
    stored = rope_members(values).get("partial_rotary_factor")
    share = values.get(name) if stored is None else stored
    share = default if share is None else share
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {shown(share)}")
    return float(share)


def rotary_dim(head_dim: int, share: float) -> int:
    """The channels of a head that are rotated; 0 for all, as in ``ModelConfig``."""
    channels = int(head_dim * share)
    if channels < 1:
        raise ValueError(f"partial_rotary_factor {share} leaves no channel of {head_dim} to rotate")
    return 0 if channels == head_dim else channels


def _object(stored: Any) -> Mapping[str, Any]:
    if not isinstance(stored, dict | None):
        raise ValueError(f"the scaling of rotary positions is no object: {shown(stored)}")
    return stored or {}


def _trained(stored: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The trained length. Phi-3 writes it next to the scaling, and then it wins."""
    name = "original_max_position_embeddings"
    return values.get(name) or stored.get(name) or values["max_position_embeddings"]


def _fields(stored: Mapping[str, Any], values: Mapping[str, Any], theta: Any, trained: Any) -> dict[str, Any]:
    kind = supported("rope_type", stored.get("rope_type") or stored.get("type") or "default", _KINDS)
    if kind == "mrope":
        # Sections of time, height and width: all alike in text.
        kind = "default"
    _require_known(stored, _MEMBERS)
    fields: dict[str, Any] = {"theta": theta, "scaling": kind}
    if kind == "default":
        return fields
    if kind == "dynamic":
        # It changes the base past max_position_embeddings, which no sequence passes here.
        return {"theta": theta, "scaling": "default"}
    if kind == "linear":
        return fields | {"factor": stored["factor"]}
    fields["original_max_position_embeddings"] = trained
    if kind == "llama3":
        return fields | {name: stored[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    # transformers: without a factor, how much longer the model is than it was trained.
    factor = stored.get("factor") or values["max_position_embeddings"] / trained
    if kind == "longrope":
        given = stored.get("attention_factor")
        growth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        fields["attention_factor"] = growth if given is None else given
        return fields | {name: stored[name] for name in ("short_factor", "long_factor")}
    fields |= {"factor": factor, "attention_factor": _yarn_attention(stored, factor)}
    fields |= {name: stored[name] for name in ("beta_fast", "beta_slow") if stored.get(name)}
    return fields | {"truncate": stored.get("truncate", True)}


def _require_known(stored: Mapping[str, Any], known: set[str]) -> None:
    for name in sorted(stored.keys() - known):
        if stored[name]:
            raise UnservedError(f"rope_parameters.{shown(name)[1:-1]} is not supported")


def _yarn_attention(stored: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin (arXiv 2309.00071); DeepSeek's mscale fields change it."""
    given = stored.get("attention_factor")
    if given is not None:
        return given  # type: ignore[no-any-return]

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = stored.get("mscale"), stored.get("mscale_all_dim")
    return growth(mscale) / growth(all_dim) if mscale and all_dim else growth(1.0)
