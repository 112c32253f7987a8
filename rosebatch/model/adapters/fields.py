"""``adapter_config.json``: what it says beyond the tensors."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rosebatch.host.model_files import shown

# Which tensors there are, which say so themselves, and how they were trained.
_SAID_BY_TENSORS = (
    *("r", "rank_pattern", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "modules_to_save", "bias", "lora_bias", "use_dora", "fan_in_fan_out", "ensure_weight_tying"),
)
_OF_TRAINING = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "init_lora_weights"),
)
_READ = ("lora_alpha", "alpha_pattern", "use_rslora", "trainable_token_indices")
# How A and B began, with the model as it is. Others, such as pissa, take something from the model's weights first.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")


class _Read(msgspec.Struct, frozen=True):
    """The fields that are read, with PEFT's defaults."""

    lora_alpha: float = 8.0
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None


@dataclass(frozen=True, slots=True)
class AdapterFields:
    """What an adapter's config says beyond its tensors.

    Attributes:
        alpha: of modules without one of their own.
        alphas: by a pattern of the end of a module's name; the first that matches counts.
        by_root: whether the scale is alpha / √r in place of alpha / r.
        token_ids: of rows that the adapter has in place of the model's: those of a module by the end of its name, or
            those of the embedding.
    """

    alpha: float
    alphas: Mapping[str, float]
    by_root: bool
    token_ids: Mapping[str, Sequence[int]] | Sequence[int]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "AdapterFields":
        """Read the fields.

        Raises:
            ValueError: one is not served, or no value of its kind; the message names it.
        """
        if (kind := values.get("peft_type")) != "LORA":
            raise ValueError(f"peft_type {shown(kind)} is not supported; LORA is")
        if (beginning := values.get("init_lora_weights", True)) not in _PLAIN_BEGINNINGS:
            what = "it changes the model's own weights, too: save it with path_initial_model_for_weight_conversion"
            raise ValueError(f"init_lora_weights {shown(beginning)} is not supported: {what}")
        known = {*_SAID_BY_TENSORS, *_OF_TRAINING, *_READ}
        for name, value in values.items():
            # Fields of later versions may change anything.
            if value and name not in known:
                raise ValueError(f"{name} is not supported")
        try:
            read = msgspec.convert({name: values[name] for name in _READ if name in values}, _Read)
            alphas = read.alpha_pattern or {}
            for pattern in alphas:
                re.compile(pattern)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        except re.error as error:
            raise ValueError(f"alpha_pattern {shown(pattern)}: {error}") from None
        for name, alpha in {"lora_alpha": read.lora_alpha, **alphas}.items():
            if not math.isfinite(alpha):
                raise ValueError(f"{name}: the alpha {alpha} is not finite")
        return cls(read.lora_alpha, alphas, read.use_rslora, read.trainable_token_indices or ())

    def scale(self, module: str, rank: int) -> float:
        """What the product of A and B is multiplied by.

        Args:
            module: the name of a linear, or of a parameter.
            rank: of its A and B.
        """
        matching = (alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return next(matching, self.alpha) / (math.sqrt(rank) if self.by_root else rank)

    def tokens_of(self, module: str) -> Sequence[int]:
        """Ids of the rows that the adapter has of a module."""
        if not isinstance(self.token_ids, Mapping):
            return self.token_ids
        return next((ids for name, ids in self.token_ids.items() if f".{module}".endswith(f".{name}")), ())
