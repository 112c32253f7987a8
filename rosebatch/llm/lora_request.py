"""vLLM's ``LoRARequest``: which of the adapters that an ``LLM`` has answers a prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rosebatch.core.words import counted


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter of ``LLM(lora={name: folder})``, by its name or its folder.

    Attributes:
        lora_name: its name.
        lora_int_id: changes nothing.
        lora_path: its folder, or its Hub id.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


def names_of(given: Any, count: int, adapters: Mapping[str, str]) -> list[str | None]:
    """The names of the adapters of each prompt.

    Args:
        given: a request for all prompts, or one for each; None is the model as the run has it. A name will do.
        count: of the prompts.
        adapters: folders or Hub ids by name.

    Raises:
        ValueError: there is no such adapter, or the list has another length.
    """
    if given is None or isinstance(given, str) or not isinstance(given, Iterable):
        return [_name_of(given, adapters)] * count
    each: Sequence[Any] = list(given)
    if len(each) != count:
        raise ValueError(f"lora_request has {counted(len(each), 'adapter')} for {counted(count, 'prompt')}")
    return [_name_of(one, adapters) for one in each]


def _name_of(given: Any, adapters: Mapping[str, str]) -> str | None:
    if given is None:
        return None
    # vLLM's own objects have these attributes, too.
    name, path = (given, "") if isinstance(given, str) else (getattr(given, "lora_name", None), _path_of(given))
    if not isinstance(name, str):
        raise ValueError(f"lora_request must be a LoRARequest, got {type(given).__name__}")
    if name in adapters:
        own = adapters[name]
        if path and path != own and not _may_be(Path(path), Path(own)):
            raise ValueError(f"lora_request {name}: lora={{...}} of LLM has {own} by this name, not {path}")
        return name
    for other, folder in adapters.items():
        if path and (path == folder or (Path(path).is_dir() and Path(folder).is_dir() and Path(folder).samefile(path))):
            return other
    raise ValueError(f"lora_request {name}: adapters are loaded with the model: LLM(…, lora={{{name!r}: {path!r}}})")


def _may_be(path: Path, own: Path) -> bool:
    """Whether a folder may be the adapter that is loaded: a Hub id may have been downloaded to it."""
    return path.is_dir() and (not own.is_dir() or own.samefile(path))


def _path_of(given: Any) -> str:
    return str(getattr(given, "lora_path", None) or getattr(given, "lora_local_path", None) or "")
