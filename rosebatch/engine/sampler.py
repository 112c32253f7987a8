"""Samples rows of logits: one call for each group of like rows, so that a step needs one sync."""

import torch
from torch import Tensor

from rosebatch.ops import Ops
from rosebatch.sampling_params import SamplingParams
from rosebatch_kernels.sampling.philox import uniform

# What decides which operator serves a row. None: greedy; otherwise (top_k, whether any filter is on).
_Group = tuple[int, bool] | None


def sample(
    logits: Tensor, params: list[SamplingParams], positions: list[int], ops: Ops, *, batched: bool = True
) -> Tensor:
    """Sample one token a row (source: article S3).

    Args:
        logits: ``[S, V]``.
        params: of each row.
        positions: of the tokens to be sampled. Seed and position decide a row's random number.
        ops: the operators of this run.
        batched: False samples and fetches row after row. Batching is measured against that.

    Returns:
        ``[S]`` int64 on the device of the logits. Nothing is fetched from there, unless ``batched`` is False.
    """
    if not batched:
        alone = zip(logits.split(1), params, positions, strict=True)
        ids = [int(_sample_group(_group(p), row, [p], [position], ops)) for row, p, position in alone]
        return torch.tensor(ids, dtype=torch.int64, device=logits.device)
    groups: dict[_Group, list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault(_group(p), []).append(row)
    if len(groups) == 1:
        (key,) = groups
        return _sample_group(key, logits, params, positions, ops)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    for key, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        chosen = [params[r] for r in rows]
        tokens[index] = _sample_group(key, logits[index], chosen, [positions[r] for r in rows], ops)
    return tokens


def _group(params: SamplingParams) -> _Group:
    if params.greedy:
        return None
    return params.top_k, params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _sample_group(key: _Group, logits: Tensor, params: list[SamplingParams], positions: list[int], ops: Ops) -> Tensor:
    if key is None:
        return ops.greedy(logits)
    top_k, filtered = key
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    numbers = [uniform(p.seed or 0, position) for p, position in zip(params, positions, strict=True)]
    uniforms = torch.tensor(numbers, dtype=torch.float64, device=device)
    if not filtered:
        return ops.sample(logits, temperature, uniforms)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
    return ops.sample_filtered(logits, temperature, uniforms, top_k, top_p, min_p)
