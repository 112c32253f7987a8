"""Models by their id on the Hugging Face Hub: found in the local cache, downloaded otherwise."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import TOKENIZER_FILES
from rosebatch.model.adapters.folder import ADAPTER_CONFIG, ADAPTER_FILE, require_no_adapter
from rosebatch.model.weight_files import has_weight_files

_ID = re.compile(r"(?P<name>(?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)
# Paths with these endings are never ids.
_FILE_SUFFIXES = (".gguf", ".toml", ".json", ".safetensors", ".bin")

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_FILE)
# The patterns of huggingface_hub match "/" too, so subfolders (original/, onnx/) have to be excluded by name.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors",)
# Except 1_Pooling and 2_Dense, of sentence-transformers, and additional_chat_templates.
_IGNORED = ("[!1-9a]*/*", "a[!d]*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        name: ``ORG/NAME``, or a bare ``NAME`` such as ``gpt2``.
        revision: branch, tag or commit hash; None for ``main``.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def download_command(self) -> str:
        """The shell command that downloads the model into the cache."""
        return f"hf download {self.name}" + (f" --revision {self.revision}" if self.revision else "")


def parse_hub_id(model: str) -> HubModel | None:
    """Read ``ORG/NAME[@REVISION]``; None if it is a path.

    An existing path is never an id. A ``NAME`` without a slash is an id only if it is in the cache: otherwise each
    mistyped path would start a download.
    """
    match = _ID.fullmatch(model)
    if match is None or match["name"].lower().endswith(_FILE_SUFFIXES) or Path(model).exists():
        return None
    found = HubModel(match["name"], match["revision"])
    return found if "/" in found.name or _cache_folder(found.name).is_dir() else None


def find_snapshot(model: HubModel, *, weights: bool = True, tokenizer: bool = True, quiet: bool = False) -> Path:
    """The folder with the files of a Hub model.

    A complete snapshot in the local cache is used without any network call, even if the Hub has a newer one. The
    environment variables of huggingface_hub apply: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN.

    Args:
        model: id and revision.
        weights: False needs and downloads configs and tokenizer only.
        tokenizer: whether one is looked for, if the cache has none.
        quiet: no progress on stderr.

    Raises:
        UserError: the model is not cached and cannot be downloaded, or it has no safetensors weights.
    """
    from huggingface_hub import constants

    cached = _cached_snapshot(model)
    usable = cached if cached and _is_loadable(cached, weights) else None
    # A program that loaded only the weights of a model leaves a snapshot without the tokenizer.
    if usable and (constants.HF_HUB_OFFLINE or not tokenizer or _has_tokenizer(usable)):
        return usable
    if constants.HF_HUB_OFFLINE:
        if cached:
            require_no_adapter(cached)
        what = "is only partly" if cached else "is not"
        raise UserError(
            f"{model}: there is no such folder, and the model {what} in the Hugging Face cache; "
            f"unset HF_HUB_OFFLINE, or run this with network access: {model.download_command}"
        )
    try:
        folder = _download(model, [*_SMALL_FILES, *(_WEIGHTS if weights else ())], quiet)
    except UserError:
        if usable:
            return usable
        raise
    if not _is_loadable(folder, weights):
        require_no_adapter(folder)
        raise UserError(
            f"{model}: {folder} lacks config.json or .safetensors weights: the download failed or the repository has "
            f"none; to complete it, run: {model.download_command}; for a GGUF model, give --model the path of the file"
        )
    return folder


def find_adapter_snapshot(model: HubModel, *, quiet: bool = False) -> Path:
    """The folder with the files of an adapter on the Hub, see ``find_snapshot``.

    Raises:
        UserError: it is not cached and cannot be downloaded.
    """
    cached = _cached_snapshot(model)
    if cached and all((cached / file).exists() for file in _ADAPTER):
        return cached
    # A file that is missing there is named by whoever reads the folder.
    return _download(model, _ADAPTER, quiet)


def name_of_snapshot(folder: Path) -> str | None:
    """``ORG/NAME`` of a snapshot folder of a Hugging Face cache, None for any other folder."""
    path = folder.resolve()
    if path.parent.name != "snapshots" or not path.parts[-3].startswith("models--"):
        return None
    return path.parts[-3].removeprefix("models--").replace("--", "/", 1)


def _cache_folder(name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _cached_snapshot(model: HubModel) -> Path | None:
    """The snapshot of a branch or tag, which the cache keeps in a file of its own, or of a commit."""
    folder = _cache_folder(model.name)
    revision = model.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _is_loadable(folder: Path, weights: bool) -> bool:
    if not (folder / "config.json").exists():
        return False
    return not weights or has_weight_files(folder)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _download(model: HubModel, patterns: Sequence[str], quiet: bool) -> Path:
    # Here and not above: it takes 0.4 s, which a cached model does not need.
    from huggingface_hub import snapshot_download

    try:
        with _progress(shown=not quiet):
            folder = snapshot_download(
                model.name,
                revision=model.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_IGNORED),
            )
    # The HTTP library, the file system and the download library of large files each have errors of their own.
    except Exception as error:
        raise UserError(_reason(model, error)) from None
    return Path(folder)


def _reason(model: HubModel, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # A gated repository is, to the library, a kind of missing one.
    if isinstance(error, GatedRepoError):
        return (
            f"{model}: the model is gated: accept its terms on its Hub page and set HF_TOKEN; "
            f"to test the access, run: {model.download_command}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model}: there is no such folder, and no such model on the Hugging Face Hub; check the name; "
            f"a private model needs HF_TOKEN; to test the access, run: {model.download_command}"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{model}: the model has no revision {model.revision!r}; give a branch, a tag or a commit hash, "
            f"as for: {model.download_command}"
        )
    what = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"{model}: there is no such folder, the model is not in the Hugging Face cache, and the Hub cannot be "
            f"reached; once it can be, run: {model.download_command} ({what})"
        )
    return f"{model}: the download failed; to continue it, run: {model.download_command} ({what})"


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """Hide huggingface_hub's progress bars unless they are to be shown."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
