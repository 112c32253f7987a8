"""HP1 once more, straight from the article: whole sequences, head by head, nothing kept between tokens.

It shares no code with the model. The article's mean of scores is a pooling here, and taps are a convolution.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Forms:
    """What a checkpoint may leave to the shapes of its tensors.

    Attributes:
        alpha, gamma: "each" (a number for each channel or head), "one" (a single number), or "mixed", tensor by tensor.
        filter: "sigma" or "taps", each for every head or, with "-layer", for the layer.
    """

    alpha: str = "each"
    gamma: str = "one"
    filter: str = "sigma"


class PlainHP1:
    """Has as much of transformers' interface as the tests need.

    Args:
        config: of config.json.
        weights: by name.
        dtype: of the run; gates and factors are in fp32, or in float64 if the run is.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.wide = torch.promote_types(dtype, torch.float32)
        kept = ("sigma", "gamma", "taps")
        self.weights = {n: w.to(self.wide if n.endswith(kept) else dtype) for n, w in weights.items()}

    @classmethod
    def random(cls, config: dict[str, Any], seed: int = 0, forms: Forms | None = None) -> "PlainHP1":
        """Random weights that use every part: clips cut much but not all, and no two channels or heads are alike.

        Without ``forms``: as in the article, and gammas of attention for each head.
        """
        generator, numbers = torch.Generator().manual_seed(seed), random.Random(seed)
        size, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        kv_size = config["num_key_value_heads"] * head_dim
        inner, vocab = config["intermediate_size"], config["vocab_size"]
        weights = {}

        def matrix(name: str, *shape: int) -> None:
            weights[name] = torch.randn(shape, generator=generator) * 1.2 * shape[1] ** -0.5

        def vector(name: str, size: int, minimum: float, limit: float) -> None:
            weights[name] = torch.rand(size, generator=generator) * (limit - minimum) + minimum

        def formed(form: str, name: str, size: int, minimum: float, limit: float) -> None:
            one = numbers.random() < 0.5 if form == "mixed" else form == "one"
            vector(name, 1 if one else size, minimum, limit)
            if one and numbers.random() < 0.5:
                weights[name] = weights[name][0]

        def clip(name: str, size: int) -> None:
            formed(forms.alpha if forms else "each", f"{name}.alpha", size, 0.3, 1.2)
            if forms:
                formed(forms.gamma, f"{name}.gamma", size, 0.7, 1.4)
            else:
                vector(f"{name}.gamma", 1, 0.7, 1.4)

        def gate(name: str) -> None:
            kind, _, by_layer = (forms.filter if forms else "sigma").partition("-")
            if kind == "sigma":
                formed("one" if by_layer else "each", f"{name}.sigma", heads, 0.2, 1.6)
            else:
                shape = (config["fir_k"],) if by_layer else (heads, config["fir_k"])
                weights[f"{name}.taps"] = torch.rand(shape, generator=generator) - 0.3
            formed(forms.gamma if forms else "each", f"{name}.gamma", heads, 0.5, 1.5)

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
            gate(f"{layer}self_attn")
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

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["model.embed_tokens.weight"].device

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
        alpha, gamma = self.weights[f"{name}.alpha"].to(self.wide), self.weights[f"{name}.gamma"]
        return (gamma * torch.clamp(alpha * x.to(self.wide), -1, 1)).to(x.dtype)

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
            scores = query.to(self.wide) @ key.to(self.wide).mT * self.config["head_dim"] ** -0.5
            outputs.append((self._gate(layer, head, scores) @ value.to(self.wide)).to(x.dtype))
        return self._project(f"{layer}self_attn.o_proj", torch.cat(outputs, -1))

    def _gate(self, layer: str, head: int, s: Tensor) -> Tensor:
        """Scores ``[B, T, T]`` to weights; keys after the query get none."""
        r = s.relu() if self.config.get("relu_pre", True) else s
        z = s - self._filtered(layer, head, r)
        minimum, limit = self.config.get("clip_min", 0.0), self.config.get("clip_max", 1.0)
        p = torch.maximum(torch.minimum(z.relu(), z.new_tensor(limit)), z.new_tensor(minimum))
        return (self._of_head(f"{layer}self_attn.gamma", head) * p).tril()

    def _filtered(self, layer: str, head: int, r: Tensor) -> Tensor:
        """What each key's score loses to its own ``r [B, T, T]`` and to the keys' before it."""
        taps = self.config.get("fir_k", 3)
        rows = functional.pad(r, (taps - 1, 0)).flatten(0, 1)[:, None]
        own = self.weights.get(f"{layer}self_attn.taps")
        if own is None:
            sigma = self._of_head(f"{layer}self_attn.sigma", head)
            return sigma * functional.avg_pool1d(rows, taps, stride=1)[:, 0].view_as(r)
        # A convolution in PyTorch meets the earliest key first.
        factors = own.expand(self.config["num_attention_heads"], taps)[head].flip(0)
        return functional.conv1d(rows, factors[None, None])[:, 0].view_as(r)

    def _of_head(self, name: str, head: int) -> Tensor:
        numbers = self.weights[name].flatten()
        return numbers[head if len(numbers) > 1 else 0]

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
