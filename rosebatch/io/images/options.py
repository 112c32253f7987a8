"""What a job lets its rows do with images."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rosebatch.core.errors import FlagError
from rosebatch.io.images.policy import MediaPolicy

# Of a row. Each may take seconds, and as much memory as the model lets it have.
DEFAULT_LIMIT = 32
_NAMES = ("media_root", "media_domains", "limit_images", "max_pixels")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """See the module; sent to worker processes.

    Attributes:
        policy: where images may come from.
        limit: most images of a row.
        max_pixels: of an image that is resized for the model; None for the model's own.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    limit: int = DEFAULT_LIMIT
    max_pixels: int | None = None

    @classmethod
    def of(
        cls,
        media_root: str | Path | None = None,
        media_domains: str | Sequence[str] | None = None,
        limit_images: int | None = None,
        max_pixels: int | None = None,
    ) -> "ImageOptions":
        """The options that flags or parameters say; the names of domains in a list, or with commas between them.

        Raises:
            FlagError: the root is no folder.
        """
        root = None if media_root is None else Path(media_root).expanduser()
        if root is not None and not root.is_dir():
            raise FlagError(f"--media-root {media_root}: no such folder")
        domains = media_domains or ()
        named = domains.split(",") if isinstance(domains, str) else domains
        found = frozenset(filter(None, (name.strip().lower() for name in named)))
        policy = MediaPolicy(None if root is None else root.resolve(), found)
        return cls(policy, DEFAULT_LIMIT if limit_images is None else limit_images, max_pixels)

    @classmethod
    def taken_from(cls, settings: dict[str, Any]) -> "ImageOptions":
        """The options among other settings, which lose them; errors as of ``of``."""
        return cls.of(*(settings.pop(name, None) for name in _NAMES))

    def below(self, root: Path) -> "ImageOptions":
        """The same where images may be read below a folder."""
        return replace(self, policy=replace(self.policy, root=root))


NO_MEDIA = ImageOptions()
