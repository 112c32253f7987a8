"""What rows may refer to."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rosebatch.core.errors import FlagError, RowError
from rosebatch.io.images.public_address import is_public


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host, by the system's resolver.

    Raises:
        OSError: it has none.
    """
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where images may come from beside the row itself, and what getting one may take.

    Attributes:
        root: files are read below this folder only; None reads none.
        root_name: what it is in messages.
        domains: http and https are served from these only: ``host``, or ``host:port`` if the port is not the scheme's
            own; in lower case.
        max_bytes: of one image's file.
        seconds: for one image, redirects included.
        max_redirects: that one image may take.
        resolve: gives the addresses of a host and port.
        may_connect: whether an address may be connected to.
    """

    root: Path | None = None
    domains: frozenset[str] = frozenset()
    root_name: str = "--media-root"
    max_bytes: int = 64 << 20
    seconds: float = 30.0
    max_redirects: int = 3
    resolve: Callable[[str, int], Sequence[str]] = look_up
    may_connect: Callable[[str], bool] = is_public

    @classmethod
    def of(
        cls, media_root: str | Path | None = None, media_domains: str | Sequence[str] | None = None
    ) -> "MediaPolicy":
        """The policy that flags or parameters say; the names of domains in a list, or with commas between them.

        Raises:
            FlagError: the root is empty, or no folder.
        """
        if media_root == "":
            # As a path, the working directory.
            raise FlagError("--media-root is empty: name a folder")
        root = None if media_root is None else Path(media_root).expanduser()
        if root is not None and not root.is_dir():
            raise FlagError(f"--media-root {media_root}: no such folder")
        domains = media_domains or ()
        named = domains.split(",") if isinstance(domains, str) else domains
        found = frozenset(filter(None, (name.strip().lower() for name in named)))
        return cls(None if root is None else root.resolve(), domains=found)

    @classmethod
    def taken_from(cls, settings: dict[str, Any]) -> "MediaPolicy":
        """The policy among other settings, which lose it; errors as of ``of``."""
        return cls.of(*(settings.pop(name, None) for name in ("media_root", "media_domains")))

    def below(self, root: Path) -> "MediaPolicy":
        """The same where the input's own images may be read, which are below a folder."""
        return replace(self, root=root, root_name="the folder of INPUT")

    def require_size(self, size: int) -> None:
        """Check how many bytes a file has.

        Raises:
            RowError: too many.
        """
        if size > self.max_bytes:
            raise RowError("image_too_large", f"its file has more than {self.max_bytes} bytes")


# Images are in the rows themselves.
NO_MEDIA = MediaPolicy()
