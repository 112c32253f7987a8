"""Where rosebatch keeps what it can make again."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder in ``$XDG_CACHE_HOME/rosebatch`` (default ``~/.cache/rosebatch``); it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rosebatch" / name
