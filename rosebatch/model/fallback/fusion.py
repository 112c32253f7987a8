"""Fused operators inside transformers' networks: projections, norms, MLPs, attention, and whole layers.

A module's ``forward`` is replaced only if ours returns the same for what the module got in a trial run. So names are
hints: what a family computes otherwise stays as it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from rosebatch.model.fallback.attention import Call, Step, attend, project, running
from rosebatch.model.fallback.network import Decoder
from rosebatch.model.fallback.parts import (
    GatedMLP,
    Norm,
    Seen,
    agrees,
    find_gated_mlp,
    find_norm,
    find_qk_norm,
    fused,
    rms_norm,
)
from rosebatch.model.fallback.trial import PerToken
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.rope import Rotary
from rosebatch.ops.ops import Linear, Ops, Partial

# Tokens of the trial run.
_TOKENS = 6
# Elements of a rotary table, see ``rosebatch.model.contract``.
_MAX_ROTARY = 2**28
_OUT = ("o_proj", "out_proj", "dense")


class Fusion:
    """What was found in a network and replaced; results stay the same but for rounding.

    Args:
        decoder: as loaded.
        ops: the operators of the run.
        max_model_len: the longest sequence, for tables of positions.
    """

    def __init__(self, decoder: Decoder, ops: Ops, max_model_len: int) -> None:
        self.decoder = decoder
        self.ops = ops
        self.max_model_len = max_model_len
        self.positions = spread_positions(_TOKENS, max_model_len, next(decoder.network.parameters()).device)
        self.seen, self.calls = _watch(decoder, self.positions)
        self.norms: dict[Module, Norm] = {}
        self.mlps: dict[Module, GatedMLP] = {}
        self.attention: dict[Module, tuple[Linear, Linear]] = {}
        self.tables: dict[int, Rotary] = {}
        # The residual that a layer returned last, the norm after it, and its result.
        self.normed: tuple[Tensor, Norm, Tensor] | None = None
        self._specs = list(decoder.layers.specs)

    def undo(self) -> None:
        """Everything is as it was."""
        self.decoder.layers.specs[:] = self._specs
        for module in self.seen:
            vars(module).pop("forward", None)
        self.seen.clear()
        self.calls.clear()

    def release(self) -> None:
        """Forget the weights that operators hold instead, some in a layout of their own."""
        ran = [module for module, seen in self.seen.items() if "forward" in vars(module)]
        inside = {each for module in [*self.attention, *self.mlps] for each in module.children()}
        for module in {*ran, *inside}:
            if type(module) is nn.Linear:
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self.seen.clear()
        self.calls.clear()

    def run(self) -> None:
        """Replace parts from the inside out."""
        for module in self.seen:
            if (norm := find_norm(module, self.seen[module], self.ops)) is not None:
                self.norms[module] = norm
                _replace(module, lambda x, norm=norm: self._norm(norm, x))
            elif (mlp := find_gated_mlp(module, self.seen[module], self.ops)) is not None:
                self.mlps[module] = mlp
                _replace(module, lambda x, mlp=mlp: self._mlp(mlp, x))
        self._fuse_attention()
        self._fuse_layers()
        self._fuse_linears()

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        ready, self.normed = self.normed, None
        if ready is not None and x is ready[0] and norm is ready[1]:
            return ready[2]
        return rms_norm(norm, x, self.ops)

    def _mlp(self, mlp: GatedMLP, x: Tensor) -> Tensor:
        return mlp.down(self.ops.gated(mlp.kind, mlp.gate_up, x.reshape(-1, x.shape[-1]), mlp.down)).view(x.shape)

    def _fuse_attention(self) -> None:
        layers = self.decoder.layers
        for index, (module, spec) in enumerate(zip(layers.modules, layers.specs, strict=True)):
            if layers.modules.count(module) > 1:
                continue
            found = self._find_attention(module, spec, self.calls[index])
            if found is None:
                continue
            layers.specs[index], qkv, out = found
            self.attention[module] = qkv, out
            _replace(module, lambda *args, qkv=qkv, out=out, **options: self._attend(qkv, out, args, options))

    def _attend(self, qkv: Linear, out: Linear, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, None]:
        hidden = args[0] if args else options["hidden_states"]
        return out(project(qkv(hidden[0])))[None], None

    def _find_attention(
        self, module: Module, spec: PagedAttentionSpec, call: Call
    ) -> tuple[PagedAttentionSpec, Linear, Linear] | None:
        """Projections around an attention whose norms and rotation our spec describes."""
        parts = [getattr(module, f"{name}_proj", None) for name in "qkv"]
        last = next((getattr(module, name) for name in _OUT if hasattr(module, name)), None)
        seen = self.seen.get(module)
        plain = [part for part in [*parts, last] if type(part) is nn.Linear]
        if seen is None or len(plain) < 4 or len(seen.out) != 2:
            return None
        hidden = seen.args[0] if seen.args else seen.options.get("hidden_states")
        if not isinstance(hidden, Tensor) or call.v.shape[3] != spec.head_dim:
            return None
        x = hidden[0]
        qkv = torch.cat([part(x) for part in plain[:3]], 1)
        expected = [each[0].transpose(0, 1) for each in (call.q, call.k, call.v)]
        qk_norm = find_qk_norm(module, self.seen, spec.head_dim, self.ops)
        # A layer may get positions and not use them (SmolLM3).
        for rotary in dict.fromkeys((self._rotary(seen.options.get("position_embeddings"), x.dtype), None)):
            spec = replace(spec, rotary=rotary, qk_norm=qk_norm)
            heads = PerToken(self.positions).heads(spec, qkv)
            out = plain[3](PerToken(self.positions)(spec, qkv))
            if all(map(agrees, [*heads, out[None]], [*expected, seen.out[0]])):
                first, second = fused(plain[:3], self.ops), fused(plain[3:], self.ops)
                return None if first is None or second is None else (spec, first, second)
        return None

    def _rotary(self, given: Any, dtype: torch.dtype) -> Rotary | None:
        """Tables of all positions, by the module whose cosines and sines a layer got."""
        if not isinstance(given, tuple) or len(given) != 2:
            return None
        if id(given[0]) not in self.tables:
            maker = next((m for m, s in self.seen.items() if isinstance(s.out, tuple) and s.out[0] is given[0]), None)
            if maker is None or given[0].shape[-1] * self.max_model_len > _MAX_ROTARY:
                return None
            cos, sin = self._all_positions(maker, self.seen[maker])
            half = cos.shape[-1] // 2
            signed = torch.cat((-sin[:, :half], sin[:, half:]), 1)
            self.tables[id(given[0])] = Rotary(cos.to(dtype), signed.to(dtype))
        return self.tables[id(given[0])]

    def _all_positions(self, maker: Module, seen: Seen) -> tuple[Tensor, Tensor]:
        device = seen.out[0].device
        positions = torch.arange(self.max_model_len, device=device)[None]

        def longer(value: Any) -> Any:
            # Of some models, they are in three rows: of time, height and width.
            shape = value.shape if isinstance(value, Tensor) and not value.is_floating_point() else ()
            return positions.expand(*shape[:-2], 1, -1) if shape[-2:] == (1, _TOKENS) else value

        options = {name: longer(value) for name, value in seen.options.items()}
        cos, sin = maker(*map(longer, seen.args), **options)
        return cos[0], sin[0]

    def _fuse_layers(self) -> None:
        """Layers that add attention and MLP to the residual, each after a norm."""
        found = [layer for layer in self.seen if self._is_pre_norm(layer)]
        final = [module for module in self.decoder.layers.body.children() if module in self.norms]
        for index, layer in enumerate(found):
            following = found[index + 1].input_layernorm if index + 1 < len(found) else (final[0] if final else None)
            step = self._pre_norm_step(layer, self.norms.get(following))  # type: ignore[arg-type]
            _replace(layer, step)

    def _is_pre_norm(self, layer: Module) -> bool:
        names = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        first, second, attention, mlp = (getattr(layer, name, None) for name in names)
        known = (first in self.norms, second in self.norms, attention in self.attention, mlp in self.seen)
        if not all(known) or {name for name, _ in layer.named_children()} != set(names):
            return False
        seen, inner = self.seen[layer], self.seen[attention]  # type: ignore[index]
        hidden = seen.args[0] if seen.args else None
        added = self.seen[mlp].out  # type: ignore[index]
        if not all(isinstance(each, Tensor) for each in (hidden, seen.out, added)):
            return False
        residual = hidden + inner.out[0]
        middle = self.seen[second].args[0]  # type: ignore[index]
        return agrees(middle, residual) and agrees(seen.out, residual + added)

    def _pre_norm_step(self, layer: Any, following: Norm | None) -> Callable[..., Tensor]:
        ops = self.ops
        first, second = self.norms[layer.input_layernorm], self.norms[layer.post_attention_layernorm]
        mlp, (qkv, out) = self.mlps.get(layer.mlp), self.attention[layer.self_attn]

        def step(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            residual, normed = hidden_states[0], self._norm(first, hidden_states)[0]
            attended = ops.project(out, project(qkv(normed)))
            normed, residual = ops.add_rms_norm(attended, residual, second.weight, second.eps)
            if mlp is None:
                last = Partial(layer.mlp(normed[None])[0])
            else:
                last = ops.project(mlp.down, ops.gated(mlp.kind, mlp.gate_up, normed, mlp.down))
            if following is None:
                return ops.add(last, residual)[None]
            normed, residual = ops.add_rms_norm(last, residual, following.weight, following.eps)
            result = residual[None]
            self.normed = result, following, normed[None]
            return result

        return step

    def _fuse_linears(self) -> None:
        """Every other plain projection that ran, the output projection with it."""
        for module, seen in self.seen.items():
            if type(module) is not nn.Linear or "forward" in vars(module) or len(seen.args) != 1:
                continue
            weight = DenseWeight.of(module.weight.detach())
            if module is self.decoder.network.get_output_embeddings() and module.bias is None:
                product: Callable[[Tensor], Tensor] = self.ops.head(weight)
            else:
                product = self.ops.linear(weight, module.bias)
            _replace(module, lambda x, product=product: product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1))


def spread_positions(count: int, length: int, device: torch.device) -> Tensor:
    """Positions from the first to the last of a sequence, in no order: some models treat late ones otherwise."""
    return (torch.arange(count, device=device) * 5 % count) * (length - 1) // (count - 1)


def _replace(module: Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _watch(decoder: Decoder, positions: Tensor) -> tuple[dict[Module, Seen], list[Call]]:
    """What every module got and returned in a trial run, and the calls of the attention function."""
    seen: dict[Module, Seen] = {}
    calls: list[Call] = []
    specs = iter(decoder.layers.specs)
    ids = decoder.some_ids(_TOKENS, positions.device)

    def keep(module: Module, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        seen[module] = Seen(args, options, out)

    def watch(call: Call) -> Tensor:
        calls.append(call)
        return attend(next(specs), call, PerToken(positions))

    hooks = [m.register_forward_hook(keep, with_kwargs=True) for m in decoder.network.modules()]
    with torch.no_grad(), running(Step(watch)):
        decoder.logits(decoder.hidden(ids, positions))
    for hook in hooks:
        hook.remove()
    return seen, calls
