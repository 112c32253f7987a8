"""Folders of adapters."""

from pathlib import Path

from rosebatch.host.model_files import read_json, refusal, shown
from rosebatch.model.weight_files import has_weight_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def require_no_adapter(folder: Path) -> None:
    """Check that a folder does not hold an adapter in place of a model.

    Raises:
        UserError: it does; the message names the model that the adapter is for.
    """
    path = folder / ADAPTER_CONFIG
    # Some trainers write the model's config.json beside an adapter.
    is_alone = not (folder / "config.json").exists() or any(folder.glob("adapter_model*"))
    if not path.exists() or not is_alone or has_weight_files(folder):
        return
    base = read_json(path).get("base_model_name_or_path")
    model = f"its model, {shown(base)}" if base else "its model"
    raise refusal(path, f"the folder holds an adapter alone: give {model}, to --model, and --lora NAME={folder}")
