"""Rotary positions: the tables of a model's layers, for every way to stretch them past the trained length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig, RopeConfig
from rosebatch.core.errors import UserError

# Elements of a rotary table: 2 million positions of usual heads. Its fp32 values take a gigabyte.
_MAX_ROTARY = 2**28


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary tables; layers with the same positions share one object.

    Attributes:
        cos, sin: ``[max_len, R]`` in the model's dtype, both halves of cos alike, the first half of sin negated. R is
            even and at most D: the first R channels of a head are rotated, channel ``i`` with channel ``i + R/2``; the
            others stay (partial rotary). Factors on attention (yarn, longrope) are inside the tables.
        trained_len: of longrope, if sequences may be longer: rows of positions before it have short factors, and after
            the rows of all positions, as many follow with long ones. 0 if each position has one row.
    """

    cos: Tensor
    sin: Tensor
    trained_len: int = 0

    @property
    def max_len(self) -> int:
        """Positions that have a row."""
        return len(self.cos) - self.trained_len

    def of_rows(self, rows: Tensor, sections: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, R]`` of tokens.

        Args:
            rows: ``[T]`` of the tables; or ``[T, 3]``, and each channel has the one of its section.
            sections: ``[R]`` int64, see ``rosebatch.model.vision.vision.Vision``.
        """
        if rows.ndim == 1:
            return self.cos[rows], self.sin[rows]
        assert sections is not None, "channels have sections"
        channels = torch.arange(self.cos.shape[1], device=rows.device)
        return self.cos[rows[:, sections], channels], self.sin[rows[:, sections], channels]


def layer_rotaries(config: ModelConfig, like: Tensor) -> list[Rotary | None]:
    """The tables of each layer, in the dtype and on the device of ``like``; layers with equal positions share one.

    Raises:
        UserError: see ``rope_tables``.
    """
    each = [config.of_layer(layer) for layer in range(config.num_layers)]
    kinds = [(config.layer_rope(layer), own.rotary_dim or own.head_dim) for layer, own in enumerate(each)]
    tables = {
        (rope, channels): rope_tables(rope, channels, config.max_model_len, like.dtype, like.device)
        for rope, channels in dict.fromkeys(kinds)
        if rope is not None
    }
    return [None if rope is None else tables[rope, channels] for rope, channels in kinds]


def rope_tables(rope: RopeConfig, channels: int, max_len: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Tables for ``max_len`` positions of so many rotated channels, in whole pairs.

    Longrope has short factors in sequences up to the trained length, and long ones in longer sequences. So positions
    before that length have two rows, see ``Rotary``.

    Raises:
        UserError: they are too large: the length of a model is only a number in its config.
    """
    if max_len * channels > _MAX_ROTARY:
        limit = _MAX_ROTARY // channels
        raise UserError(f"tables for {max_len} positions take too much memory: give --max-model-len {limit} or less")
    positions = torch.arange(max_len, dtype=torch.float32, device=device)[:, None]
    angles, trained_len = positions * _inverse_frequencies(rope, channels).to(device), 0
    if rope.scaling == "longrope" and max_len > rope.original_max_position_embeddings:
        trained_len = rope.original_max_position_embeddings
        long_angles = positions * _inverse_frequencies(rope, channels, is_long=True).to(device)
        angles = torch.cat((angles[:trained_len], long_angles[trained_len:], long_angles[:trained_len]))
    cos, sin = ((turn * rope.attention_factor).to(dtype) for turn in (angles.cos(), angles.sin()))
    return Rotary(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), trained_len)


def interleaved_qkv_order(config: ModelConfig) -> Tensor:
    """The rows of a q, k and v projection whose checkpoint rotates channel ``2i`` with ``2i + 1``.

    In this order, channel ``i`` is rotated with ``i + rotary_size / 2``.
    """
    return qkv_order(config, pairs_to_halves(config))


def qkv_order(config: ModelConfig, channels: Tensor) -> Tensor:
    """The rows of a q, k and v projection, with the channels of each head ``[D]`` of q and k in this order.

    Both are reordered, which leaves q·k as it was.
    """
    rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    turned = config.num_heads + config.num_kv_heads
    rows[:turned] = rows[:turned, channels]
    return rows.flatten()


def halves_together(config: ModelConfig) -> Tensor:
    """The channels of a head ``[D]``, those that are rotated first: a checkpoint has half of them in each half."""
    half, rotated = config.head_dim // 2, config.rotary_size // 2
    first, second = torch.arange(half), torch.arange(half, config.head_dim)
    return torch.cat((first[:rotated], second[:rotated], first[rotated:], second[rotated:]))


def pairs_to_halves(config: ModelConfig) -> Tensor:
    """The channels of a head ``[D]`` in that order."""
    rotated = torch.arange(config.rotary_size).view(-1, 2).t().flatten()
    return torch.cat((rotated, torch.arange(config.rotary_size, config.head_dim)))


def _inverse_frequencies(rope: RopeConfig, size: int, *, is_long: bool = False) -> Tensor:
    """Radians per position of each channel pair: ``[ceil(size / 2)]`` fp32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / (rope.spread or size))
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        # Long waves are stretched by the factor, short ones kept, those between interpolated (Llama 3.1's rule).
        wavelengths = 2 * math.pi / frequencies
        turns = rope.original_max_position_embeddings / wavelengths
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    if rope.scaling == "yarn":
        kept = 1 - _yarn_ramp(rope, size)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    if rope.scaling == "longrope":
        return frequencies / torch.tensor(rope.long_factor if is_long else rope.short_factor)
    return frequencies


def _yarn_ramp(rope: RopeConfig, size: int) -> Tensor:
    """How far each channel pair is interpolated, ``[ceil(size / 2)]`` from 0 to 1 (arXiv 2309.00071)."""

    def channel(turns: float) -> float:
        """The channel that makes so many turns in the trained length."""
        length = rope.original_max_position_embeddings
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange((size + 1) // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
