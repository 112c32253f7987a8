"""The weight files of a model folder."""

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import read_json, refusal, refused, require_file, shown

_CONSOLIDATED = "consolidated"
# Of PEFT, in a folder that may hold its model too.
_ADAPTER = "adapter_model"
_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder.

    These are the files in the index; without an index ``model.safetensors``, or else every ``.safetensors`` file but
    those with Mistral's own names of tensors, ``consolidated*``, and adapters, ``adapter_model*``.

    Raises:
        UserError: there are none, some are missing, or the index is unreadable.
    """
    if index := weight_map(folder):
        names = sorted(set(index.values()))
        missing = [name for name in names if not _exists(folder / name)]
        if missing:
            raise refusal(folder, f"{len(missing)} weight files are missing, the first is {missing[0]}")
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    every = sorted(path for path in folder.glob("*.safetensors") if path.exists())
    files = [path for path in every if not path.name.startswith((_CONSOLIDATED, _ADAPTER))]
    if not files:
        raise UserError(f"{folder}: {_no_files(folder, every)}")
    totals = [int(match[1]) for path in files if (match := _SHARD.fullmatch(path.name))]
    if len(set(totals)) > 1:
        raise UserError(f"{folder}: weight files of several sets, of {' and of '.join(map(str, sorted(set(totals))))}")
    if totals and len(totals) < totals[0]:
        raise UserError(f"{folder}: {totals[0] - len(totals)} of {totals[0]} weight files are missing")
    return files


def _no_files(folder: Path, others: list[Path]) -> str:
    """Why a folder has no weights that are read, and what to do."""
    if found := sorted(folder.glob("*.gguf")):
        return f"no .safetensors weights: give the file itself, --model {found[0]}"
    # A trainer leaves other files of these forms.
    if not others and (found := sorted((*folder.glob("pytorch_model*.bin"), *folder.glob("consolidated*.pth")))):
        return f"{found[0].name} is not read, for it may run code: save_pretrained of transformers writes .safetensors"
    own = next((path.name for path in others if path.name.startswith(_CONSOLIDATED)), None)
    what = f"{own} has Mistral's own names of tensors" if own else "no .safetensors weights"
    return f"{what}: use the model's transformers files, such as model.safetensors"


def open_tensors(path: Path, what: str) -> Any:
    """A ``.safetensors`` file.

    Args:
        path: of the file.
        what: it is if it is broken.

    Raises:
        UserError: it is missing or broken.
    """
    require_file(path)
    with refused(path, f"{what}: copy or download the file again"):
        return safe_open(str(path), framework="pt")


def has_weight_files(folder: Path) -> bool:
    """Whether they are all there."""
    try:
        return bool(weight_files(folder))
    except UserError:
        return False


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index; empty without one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {}
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise refusal(index, "unreadable index: weight_map is no object of file names")
    for name in found.values():
        # Nothing outside of the folder is read.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise refusal(index, f"unreadable index: {shown(name)} is no .safetensors file beside it")
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # No file can have such a name.
        return False
