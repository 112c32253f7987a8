"""Samples rows of logits: one call for each group of like rows, so that a step needs one sync."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.staging import Staging
from rosebatch.ops.ops import Ops
from rosebatch_kernels.common import host_waits
from rosebatch_kernels.sampling.philox import uniform

# What decides which operator serves a row. None: greedy; otherwise (top_k, whether any filter is on).
_Group = tuple[int, bool] | None


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    positions: list[int],
    ops: Ops,
    staging: Staging,
    *,
    batched: bool = True,
) -> Tensor:
    """Sample one token a row (source: article S3).

    Args:
        logits: ``[S, V]``.
        params: those of each row.
        positions: those of the tokens to be sampled. Seed and position decide a row's random number.
        ops: the operators of this run.
        staging: to the device of the logits.
        batched: False samples and fetches row after row. Batching is measured against that.

    Returns:
        ``[S]`` int64 on the device of the logits. Only the operators read anything from there, unless ``batched`` is
        False.
    """
    if not batched:
        alone = zip(logits.split(1), params, positions, strict=True)
        ids = [
            host_waits.to_int(_sample_group(_group(p), row, [p], [position], ops, staging))
            for row, p, position in alone
        ]
        (together,) = staging.send(np.array(ids, np.int64))
        return together
    groups: dict[_Group, list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault(_group(p), []).append(row)
    if len(groups) == 1:
        (key,) = groups
        return _sample_group(key, logits, params, positions, ops, staging)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    for key, rows in groups.items():
        (index,) = staging.send(np.array(rows, np.int64))
        chosen = [params[r] for r in rows]
        tokens[index] = _sample_group(key, logits[index], chosen, [positions[r] for r in rows], ops, staging)
    return tokens


def _group(params: SamplingParams) -> _Group:
    if params.greedy:
        return None
    return params.top_k, params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _sample_group(
    key: _Group, logits: Tensor, params: list[SamplingParams], positions: list[int], ops: Ops, staging: Staging
) -> Tensor:
    if key is None:
        return ops.greedy(logits)
    top_k, filtered = key
    numbers = [uniform(p.seed or 0, position) for p, position in zip(params, positions, strict=True)]
    columns = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    # A number beyond fp32 becomes infinite, and the operators clamp it.
    with np.errstate(over="ignore"):
        reals = [np.array(values, np.float32) for values in columns]
    uniforms, temperature, top_p, min_p = staging.send(np.array(numbers, np.float64), *reals)
    if not filtered:
        return ops.sample(logits, temperature, uniforms)
    uses_min_p = any(p.min_p > 0 for p in params)
    return ops.sample_filtered(logits, temperature, uniforms, top_k, top_p, min_p if uses_min_p else None)
