"""HP1 once more, straight from its formulas: whole sequences, head by head, nothing kept between tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class PlainHP1:
    """Has as much of transformers' interface as the tests need.

    Args:
        config: of config.json.
        weights: by name.
        dtype: of the run; gates and factors stay in fp32.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        kept = ("sigma", "gamma")
        self.weights = {n: w if n.endswith(kept) else w.to(dtype) for n, w in weights.items()}

    @classmethod
    def random(cls, config: dict[str, Any], seed: int = 0) -> "PlainHP1":
        """Random weights that use every part: clips cut much but not all, and no two channels or heads are alike."""
        generator = torch.Generator().manual_seed(seed)
        size, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        kv_size = config["num_key_value_heads"] * head_dim
        inner, vocab = config["intermediate_size"], config["vocab_size"]
        weights = {}

        def matrix(name: str, *shape: int) -> None:
            weights[name] = torch.randn(shape, generator=generator) * 1.2 * shape[1] ** -0.5

        def vector(name: str, size: int, least: float, most: float) -> None:
            weights[name] = torch.rand(size, generator=generator) * (most - least) + least

        def clip(name: str, size: int) -> None:
            vector(f"{name}.alpha", size, 0.3, 1.2)
            vector(f"{name}.gamma", 1, 0.7, 1.4)

        matrix("model.embed_tokens.weight", vocab, size)
        weights["model.embed_tokens.weight"] *= size**0.5
        if not config["tie_word_embeddings"]:
            matrix("lm_head.weight", vocab, size)
        clip("model.norm", size)
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            for name in ("input", "post_attention", "pre_mlp", "post_mlp"):
                clip(f"{layer}{name}_layernorm", size)
            for name, out in (("q", heads * head_dim), ("k", kv_size), ("v", kv_size)):
                matrix(f"{layer}self_attn.{name}_proj.weight", out, size)
            matrix(f"{layer}self_attn.o_proj.weight", size, heads * head_dim)
            clip(f"{layer}self_attn.q_norm", head_dim)
            clip(f"{layer}self_attn.k_norm", head_dim)
            vector(f"{layer}self_attn.sigma", heads, 0.2, 1.6)
            vector(f"{layer}self_attn.gamma", heads, 0.5, 1.5)
            matrix(f"{layer}mlp.gate_proj.weight", inner, size)
            matrix(f"{layer}mlp.up_proj.weight", inner, size)
            matrix(f"{layer}mlp.down_proj.weight", size, inner)
        return cls(config, weights)

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder that the engine reads."""
        save_file(self.weights, folder / "model.safetensors")
        config = {"architectures": ["HP1ForCausalLM"], "model_type": "hp1", **self.config}
        (folder / "config.json").write_text(json.dumps(config))

    @classmethod
    def from_pretrained(
        cls, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "PlainHP1":
        """Read that folder."""
        weights = load_file(folder / "model.safetensors", device=str(device))
        return cls(json.loads((folder / "config.json").read_text()), weights, dtype)

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        """``logits [B, T, V]`` of ``input_ids [B, T]``."""
        x = self.weights["model.embed_tokens.weight"][input_ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self._clip(f"{layer}post_attention_layernorm", self._attention(layer, x))
            x = x + self._clip(f"{layer}post_mlp_layernorm", self._mlp(layer, x))
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return SimpleNamespace(logits=self._clip("model.norm", x) @ head.T)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **_: Any) -> SimpleNamespace:
        """Greedy continuations of prompts of one length: ``sequences``, and ``[B, V]`` logits for each token."""
        steps = []
        for _step in range(max_new_tokens):
            steps.append(self(input_ids).logits[:, -1])
            input_ids = torch.cat((input_ids, steps[-1].argmax(-1, keepdim=True)), 1)
        return SimpleNamespace(sequences=input_ids, scores=steps, logits=steps)

    def _clip(self, name: str, x: Tensor) -> Tensor:
        alpha, gamma = self.weights[f"{name}.alpha"].float(), self.weights[f"{name}.gamma"]
        return (gamma * torch.clamp(alpha * x.float(), -1, 1)).to(x.dtype)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        h = self._clip(f"{layer}input_layernorm", x)
        q, k, v = (self._project(f"{layer}self_attn.{name}_proj", h) for name in "qkv")
        outputs = []
        for head in range(heads):
            query, key, value = (
                y.chunk(count, -1)[head * count // heads] for y, count in ((q, heads), (k, kv_heads), (v, kv_heads))
            )
            query = self._rotate(self._clip(f"{layer}self_attn.q_norm", query))
            key = self._rotate(self._clip(f"{layer}self_attn.k_norm", key))
            weights = self._gate(layer, head, query.float() @ key.float().mT * self.config["head_dim"] ** -0.5)
            outputs.append((weights @ value.float()).to(x.dtype))
        return self._project(f"{layer}self_attn.o_proj", torch.cat(outputs, -1))

    def _gate(self, layer: str, head: int, s: Tensor) -> Tensor:
        """Scores ``[B, T, T]`` to weights; keys after the query get none."""
        sigma, gamma = (self.weights[f"{layer}self_attn.{name}"][head] for name in ("sigma", "gamma"))
        r = s.relu() if self.config.get("relu_pre", True) else s
        one_before, two_before = torch.zeros_like(r), torch.zeros_like(r)
        one_before[..., 1:], two_before[..., 2:] = r[..., :-1], r[..., :-2]
        z = s - sigma * (r + one_before + two_before) / 3
        least, most = self.config.get("clip_min", 0.0), self.config.get("clip_max", 1.0)
        return (gamma * torch.clamp(z, least, most)).tril()

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotates channels ``i`` and ``i + D/2`` of ``[B, T, D]`` as one complex number, by its angle."""
        half = x.shape[-1] // 2
        theta = self.config.get("rope_theta", 10000.0)
        speed = theta ** -(torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * speed
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _mlp(self, layer: str, x: Tensor) -> Tensor:
        h = self._clip(f"{layer}pre_mlp_layernorm", x)
        gate, up = (self._project(f"{layer}mlp.{name}_proj", h) for name in ("gate", "up"))
        return self._project(f"{layer}mlp.down_proj", gate.relu() * up)
