"""From transformers' config.json to ModelConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.config.toml_file import convert
from rosebatch.host.model_files import read_json, refusal, shown
from rosebatch.model.family import Architecture
from rosebatch.model.hf.classifier import has_head, parse_classifier, split_class
from rosebatch.model.hf.fields import UnservedError, end_tokens, run_dtype
from rosebatch.model.hf.rope import rope_members
from rosebatch.model.hf.unread_keys import require_read
from rosebatch.model.quantization.folder_config import quantization_of
from rosebatch.model.quantization.forms import form_of
from rosebatch.model.registry import ARCHITECTURES, check_config
from rosebatch.model.sentence_transformers import own_activation, require_plain_texts
from rosebatch.model.text_parts import WHOLES, Whole, text_values

# How transformers names the class of all layers, and the one with an output projection as well.
_BARE, _WHOLE = "Model", ("ForCausalLM", "LMHeadModel")
# How it names the text part of a model with images, where that has a class of its own with a head.
_TEXT = "Text"
# What config.json says of a head that classifies.
_OF_HEAD = ("id2label", "num_labels", "problem_type")
# Those of encoders that were trained with a head, which is not read.
_TRAINED = ("ForMaskedLM", "ForPreTraining")
_BY_MODEL_TYPE = {each.model_type: name for table in (ARCHITECTURES, WHOLES) for name, each in table.items()}


def read_model_config(folder: Path) -> ModelConfig:
    """The shape of the model in a folder, from config.json. The end tokens in generation_config.json win.

    Raises:
        UserError: a file is missing or broken, or rosebatch does not support the architecture or one of its options.
    """
    path = require_config(folder)
    values, own = read_json(path), generation_end_tokens(folder)
    if quantization := quantization_of(folder, values):
        values = {**values, "quantization_config": quantization}
    if own is not None:
        values = {**values, "eos_token_id": own}
    classifies = bool(split_class(str(_named_architecture(values)))[1])
    if classifies:
        require_plain_texts(folder, "without this file, rows with messages are served")
    if classifies and (function := own_activation(folder)):
        # Where config.json has one too, that is of a former version.
        values = {**values, "sentence_transformers": {"activation_fn": function}}
    return parse_model_config(values, str(path))


def require_config(folder: Path) -> Path:
    """A folder's config.json.

    Raises:
        UserError: there is none; the message says what the folder holds in its place.
    """
    path = folder / "config.json"
    if path.exists():
        return path
    if (folder / "params.json").exists():
        raise refusal(path, "no such file; params.json is Mistral's own form: use the model's transformers files")
    raise refusal(path, "no such file; a model folder holds config.json and .safetensors weights")


def generation_end_tokens(folder: Path) -> list[int] | None:
    """The end tokens of generation_config.json; None if it names none.

    Raises:
        UserError: they are no token ids.
    """
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    try:
        return None if value is None else end_tokens(value)
    except ValueError as error:
        raise refusal(path, error) from None


def is_native(folder: Path) -> bool:
    """Whether rosebatch has the architecture that config.json names; also if there is no such file."""
    path = folder / "config.json"
    if not path.exists():
        return True
    values = read_json(path)
    try:
        found = _with_head(_of_text(_named_architecture(values), values)[0])
    except UnservedError:
        return False
    except (KeyError, ValueError):
        return True
    return isinstance(found, str) and found in ARCHITECTURES and not _is_of_another_type(values)


def _is_of_another_type(values: Mapping[str, Any]) -> bool:
    """Whether transformers reads config.json as another type than the class's; its tensors may have other names."""
    kind, named = values.get("model_type"), _named_architecture(values)
    if not isinstance(kind, str) or kind == (_whole_of(named, values) or ARCHITECTURES[_with_head(named)]).model_type:
        return False
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def parse_model_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Like ``read_model_config``, but from parsed JSON. Errors start with ``source``."""
    architecture = None
    try:
        name, values = _of_text(_named_architecture(values), values)
        architecture = _architecture(name, source)
        form_of(values.get("quantization_config"))
        values = {**architecture.defaults, **values}
        fields = {**architecture.parse(values), "eos_token_ids": end_tokens(values.get("eos_token_id"))}
        require_read(values, architecture.parse, {**architecture.defaults, **rope_members(values)})
        if _is_bare(name):
            fields["head"] = False
        if head := split_class(name)[1]:
            fields |= {"head": False, "classifier": parse_classifier(values, architecture, head)}
    except KeyError as error:
        raise refusal(source, f"{error.args[0]!r} is missing") from None
    except UnservedError as error:
        hint = "; --model-impl transformers may run it" if architecture and architecture.fallback else ""
        raise refusal(source, f"{error}{hint}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise refusal(source, error) from None
    dtype = run_dtype(values.get("dtype") or values.get("torch_dtype") or "float32")
    return check_config(convert({**fields, "dtype": dtype}, ModelConfig, source), source)


def _of_text(name: Any, values: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The class and the values of the language model, which may be a part of the whole."""
    whole = _whole_of(name, values)
    if whole is None:
        return name, values
    text, own = text_values(whole, values)
    # A head belongs to the whole.
    return (text, own) if name in WHOLES else (name, own | {key: values[key] for key in _OF_HEAD if key in values})


def _whole_of(name: Any, values: Mapping[str, Any]) -> Whole | None:
    """The model of more than text that a class is of, by itself or with a head that classifies."""
    if not isinstance(name, str):
        return None
    stem, head = split_class(name)
    if not head:
        return WHOLES.get(name)
    # Text parts have classes with a head too, some of the same name.
    return WHOLES.get(f"{stem}ForConditionalGeneration") if "text_config" in values else None


def _named_architecture(values: Mapping[str, Any]) -> Any:
    named = values.get("architectures") or [None]
    first = named[0] if isinstance(named, list) else named
    return first or _BY_MODEL_TYPE.get(str(values.get("model_type"))) or values.get("model_type")


def _is_bare(name: Any) -> bool:
    """Whether a class has no output projection, and its sibling with one is served."""
    return isinstance(name, str) and _with_head(name) != name


def _with_head(name: Any) -> Any:
    """The class with the output projection, or of encoders the one without, if it is served; else the class itself."""
    if not isinstance(name, str) or name in ARCHITECTURES:
        return name
    for end in _TRAINED:
        if (bare := f"{name.removesuffix(end)}{_BARE}") != f"{name}{_BARE}" and bare in ARCHITECTURES:
            return bare
    stem, head = split_class(name)
    if head:
        stems = stem, stem.removesuffix(_TEXT)
        siblings = (each for own in stems for end in (*_WHOLE, _BARE) if (each := own + end) in ARCHITECTURES)
        return next((each for each in siblings if has_head(ARCHITECTURES[each], head)), name)
    if not name.endswith(_BARE):
        return name
    stem = name.removesuffix(_BARE)
    return next((whole for end in _WHOLE if (whole := stem + end) in ARCHITECTURES), name)


def _architecture(name: Any, source: str) -> Architecture:
    found = _with_head(name)
    if not isinstance(found, str) or found not in ARCHITECTURES:
        name = shown(name).strip("'")
        raise refusal(source, f"{name} is not supported; docs/models.md lists what is")
    return ARCHITECTURES[found]
