"""transformers, kept from running what it finds."""

from pathlib import Path
from typing import Any

from rosebatch.host.model_files import require_file


def load_pretrained_tokenizer(folder: Path, **options: Any) -> Any:
    """transformers' tokenizer of a folder. No code of the folder runs, nobody is asked, nothing is downloaded.

    Args:
        folder: with the files of a tokenizer.
        options: of ``from_pretrained``.

    Raises:
        UserError: a file is not a regular one. transformers may raise any other exception.
    """
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            require_file(path)
    from transformers import AutoTokenizer, dynamic_module_utils

    # Other calls inside transformers give up instead of waiting for an answer.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True, **options)


def load_pretrained_config(folder: Path) -> Any:
    """transformers' config of a folder, like ``load_pretrained_tokenizer``."""
    require_file(folder / "config.json")
    from transformers import AutoConfig, dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
