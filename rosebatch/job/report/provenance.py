"""Where the figures of a report come from: when, by which command, on which machine, with which versions."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rosebatch.core.errors import printable
from rosebatch.core.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "flashinfer-python")
_ROOT = Path(__file__).resolve().parents[3]


def provenance(input: str | None = None, output: str | None = None) -> dict[str, Any]:
    """Fields of a report. Logins and queries of URLs are left out.

    Args:
        input, output: names of the job's files, as they were given.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": printable(shlex.join(sys.argv)),
        "input": None if input is None else printable(input),
        "output": None if output is None else printable(output),
        "host": platform.node(),
        "gpu": gpu_name(),
        "git_revision": _own_revision(),
        "versions": {"rosebatch": __version__, "python": platform.python_version(), **_versions()},
    }


def gpu_name() -> str | None:
    """The name of the GPU that this process uses; None without one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


@cache
def _own_revision() -> str | None:
    """That of the code of this process: what changes later is not what runs."""
    return git_revision(_ROOT)


def git_revision(root: Path) -> str | None:
    """The commit of a checkout, with ``-dirty`` where files have changed; None where there is none, or no git.

    It only reads. ``git describe --dirty`` writes the index, and where it is killed leaves a lock on the checkout.
    """
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        found = subprocess.run(command, check=True, capture_output=True, timeout=5)
        return found.stdout.decode(errors="replace").strip()

    try:
        commit = git("describe", "--always", "--abbrev=12", "--exclude=*")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
