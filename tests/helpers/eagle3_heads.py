"""Small heads of EAGLE-3 in the published form, what they compute by the definition, and models that they draft for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.tiny_engines import random_model

VOCAB, DRAFTED, HIDDEN, HEAD_DIM = 211, 150, 64, 24
LAYERS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 88,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
}


def save_target(folder: Path, **values: Any) -> Any:
    """A random model of eight layers."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 88,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
    }
    model = random_model(LlamaConfig(**sizes | {"initializer_range": 0.2} | values))
    model.save_pretrained(folder)
    return model


def save_head(
    folder: Path,
    tensors: dict[str, Tensor | None] | None = None,
    *,
    layer: str = "midlayer",
    own_embedding: bool = False,
    **values: Any,
) -> None:
    """A random head.

    Args:
        folder: for it.
        tensors: in place of others, or further ones; None for none of this name.
        layer: how the tensors of its layer begin.
        own_embedding: whether it has a table of its own.
        values: of its config; None for none.
    """
    config = {name: value for name, value in {**CONFIG, **values}.items() if value is not None}
    size, vocab = config["hidden_size"], config["vocab_size"]
    drafted = config.get("draft_vocab_size", vocab)
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "fc.weight": (size, 3 * config.get("target_hidden_size", size)),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * size),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * size),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * size),
        f"{layer}.self_attn.o_proj.weight": (size, q),
        f"{layer}.mlp.gate_proj.weight": (config["intermediate_size"], size),
        f"{layer}.mlp.up_proj.weight": (config["intermediate_size"], size),
        f"{layer}.mlp.down_proj.weight": (size, config["intermediate_size"]),
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.hidden_norm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (drafted, size),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = vocab, size
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor | None] = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()
    }
    if drafted < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        found["d2t"] = ids - torch.arange(drafted)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: each for name, each in {**found, **(tensors or {})}.items() if each is not None}
    save_file(kept, folder / "model.safetensors")


class PlainHead:
    """The definition, computed anew for each draft: no cache, one sequence.

    Args:
        folder: of a head.
        target: transformers' model that it drafts for.
        layers: whose inputs it takes.
    """

    def __init__(self, folder: Path, target: Any, layers: Sequence[int] = (2, LAYERS // 2, LAYERS - 3)) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {
            name.replace("layers.0.", "midlayer."): each
            for name, each in load_file(folder / "model.safetensors").items()
        }
        self.target, self.layers = target, layers

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    @torch.no_grad()
    def drafts(self, token_ids: Sequence[int], most: int) -> list[int]:
        """So many tokens after these, each the likeliest."""
        tokens = torch.tensor([*token_ids])
        found = self.target(tokens[None], output_hidden_states=True).hidden_states
        # Row j has token j + 1 and the model's states at token j; the last token has none yet.
        hidden = torch.cat([found[layer][0, :-1] for layer in self.layers], -1) @ self["fc"].T
        drafts: list[int] = []
        for _ in range(most):
            out = self._layer(tokens[1:], hidden)[-1:]
            logits = self._norm(out, "norm") @ self["lm_head"].T
            draft = int(logits.argmax())
            draft += int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else 0
            drafts.append(draft)
            tokens, hidden = torch.cat((tokens, torch.tensor([draft]))), torch.cat((hidden, out))
        return drafts

    def _layer(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedding = self.tensors.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        inputs = torch.cat((self._norm(embedding[tokens], "midlayer.input_layernorm"), normed), -1)
        q, k, v = (
            (inputs @ self[f"midlayer.self_attn.{name}_proj"].T).unflatten(1, (-1, self._size)) for name in "qkv"
        )
        q, k, v = self._turned(q).transpose(0, 1), self._turned(k).transpose(0, 1), v.transpose(0, 1)
        attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        attended = attended[0].transpose(0, 1).flatten(1) @ self["midlayer.self_attn.o_proj"].T
        hidden = attended + (normed if self.config.get("norm_before_residual") else hidden)
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (normed @ self[f"midlayer.mlp.{name}_proj"].T for name in ("gate", "up"))
        return hidden + (functional.silu(gate) * up) @ self["midlayer.mlp.down_proj"].T

    @property
    def _size(self) -> int:
        return int(self.config["head_dim"])

    def _turned(self, x: Tensor) -> Tensor:
        half = self._size // 2
        angles = torch.arange(len(x))[:, None] / self.config["rope_theta"] ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self[name], self.config["rms_norm_eps"])


# Of a model whose next token follows from its last one.
CHAIN = 96


def successor() -> Tensor:
    """``[CHAIN]``: each token's next one, all tokens in one cycle."""
    order = torch.randperm(CHAIN, generator=torch.Generator().manual_seed(2))
    return torch.empty_like(order).index_copy_(0, order, order.roll(-1))


def save_chain(target: Path, head: Path, drafted: int = CHAIN) -> None:
    """A model whose likeliest token follows from the last one alone, and a head that has learnt so.

    The model's layers add nothing to the embedding, a unit vector for each token. The head's attention finds the rows
    of its own token: both halves of a head turn together, and only one has numbers.

    Args:
        target, head: folders.
        drafted: tokens that the head may guess.
    """
    units, after = torch.eye(CHAIN), successor()
    sizes = {"vocab_size": CHAIN, "hidden_size": CHAIN, "head_dim": 2 * CHAIN}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    with torch.no_grad():
        model = LlamaForCausalLM(
            LlamaConfig(
                **sizes,
                intermediate_size=8,
                num_hidden_layers=LAYERS,
                max_position_embeddings=256,
                **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
            )
        )
        for each in model.model.layers:
            each.self_attn.o_proj.weight.zero_()
            each.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(units)
        model.lm_head.weight[after] = units
    model.save_pretrained(target)
    wide = torch.zeros(2 * CHAIN, 2 * CHAIN)
    # Of the embedding, not of the state before.
    wide[:CHAIN, :CHAIN] = units
    ids = torch.arange(CHAIN)[CHAIN - drafted :]
    own: dict[str, Tensor | None] = {
        "fc.weight": torch.zeros(CHAIN, 3 * CHAIN),
        **{f"midlayer.self_attn.{name}_proj.weight": wide.clone() for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": torch.cat((units[after].T, torch.zeros(CHAIN, CHAIN)), 1).contiguous(),
        "midlayer.mlp.down_proj.weight": torch.zeros(CHAIN, 8),
        "midlayer.input_layernorm.weight": torch.ones(CHAIN),
        "midlayer.hidden_norm.weight": torch.full((CHAIN,), 0.01),
        "norm.weight": torch.ones(CHAIN),
        "lm_head.weight": units[ids].contiguous(),
    }
    if drafted < CHAIN:
        own["d2t"] = ids - torch.arange(drafted)
        own["t2d"] = torch.arange(CHAIN) >= CHAIN - drafted
    save_head(
        head,
        own,
        **sizes,
        intermediate_size=8,
        draft_vocab_size=drafted,
        norm_before_residual=True,
    )
