"""Downloads from listed domains. A host is looked up once and connected to at that address.

http.client reads the answer: it knows no proxies, logins or cookies, and follows no redirects.
"""

import io
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from rosebatch.core.errors import RowError
from rosebatch.core.version import __version__
from rosebatch.host.threads import DaemonPool, done_within
from rosebatch.io.images.policy import MediaPolicy

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_MAX_HEADER = 64 << 10
_PIECE = 64 << 10
# What a target may have as it is; the rest is percent-encoded.
_AS_IT_IS = "%/:=&?~+!$,;'@()*[]"


def download(url: str, policy: MediaPolicy) -> bytes:
    """What a URL leads to.

    Raises:
        RowError: ``image_not_allowed``: the URL, or one of its redirects, is not of a listed domain with a public
            address; ``image_too_large``; ``image_not_read``: a failure, or more seconds than the policy allows.
    """
    deadline = time.monotonic() + policy.seconds
    for _ in range(policy.max_redirects + 1):
        place = _Place.of(url, policy)
        try:
            found = _get(place, policy, deadline)
        except TimeoutError:
            raise RowError("image_not_read", f"{place.host} takes more than {policy.seconds:g} s") from None
        except HTTPException as error:
            # Its text is the server's.
            name = type(error).__name__
            raise RowError("image_not_read", f"the answer of {place.host} is broken: {name}") from None
        except (OSError, ValueError) as error:
            raise RowError("image_not_read", f"{place.host} cannot be read: {error}") from None
        if isinstance(found, bytes):
            return found
        try:
            url = urljoin(url, found)
        except ValueError:
            raise RowError("image_not_allowed", f"{place.host} redirects to a broken URL") from None
        if place.scheme == "https" and not url.lower().startswith("https:"):
            raise RowError("image_not_allowed", f"{place.host} redirects to another scheme than https")
    raise RowError("image_not_allowed", f"more than {policy.max_redirects} redirects")


@dataclass(frozen=True, slots=True)
class _Place:
    """A URL that the policy allows, taken apart.

    Attributes:
        scheme: http or https.
        host: its name.
        port: also where the URL has none.
        authority: host, and the port if it is not the scheme's own.
        target: path and query in ASCII.
    """

    scheme: str
    host: str
    port: int
    authority: str
    target: str

    @classmethod
    def of(cls, url: str, policy: MediaPolicy) -> "_Place":
        # Libraries do not agree what these mean, and some leave them out.
        if any(each <= " " or each in "\\\x7f" for each in url):
            raise RowError("image_not_allowed", "a URL has no white space, control characters or backslashes")
        try:
            parts: SplitResult = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise RowError("image_not_allowed", f"the URL is broken: {error}") from None
        if parts.scheme not in _PORTS:
            raise RowError("image_not_allowed", f"{parts.scheme or 'no scheme'}: only http and https are downloaded")
        if "@" in parts.netloc:
            raise RowError("image_not_allowed", "a URL with a login is not served")
        own = _PORTS[parts.scheme]
        authority = host if port in (None, own) else f"{host}:{port}"
        if authority not in policy.domains:
            told = f"{authority} is not among --media-domains (media_domains of the library)"
            raise RowError("image_not_allowed", told)
        target = quote(parts.path or "/", safe=_AS_IT_IS)
        if parts.query:
            target += "?" + quote(parts.query, safe=_AS_IT_IS)
        return cls(parts.scheme, host, own if port is None else port, authority, target)


def _get(place: _Place, policy: MediaPolicy, deadline: float) -> bytes | str:
    """The content, or where a redirect leads."""
    with closing(_connect(place, _addresses(place, policy, deadline), deadline)) as connection:
        lines = (
            f"GET {place.target} HTTP/1.1",
            f"Host: {place.authority}",
            f"User-Agent: rosebatch/{__version__}",
            "Accept: image/*, */*;q=0.5",
            "Accept-Encoding: identity",
            "Connection: close",
        )
        connection.sendall("\r\n".join((*lines, "", "")).encode("ascii"))
        received = _Received(connection, deadline)
        with closing(HTTPResponse(received, method="GET")) as response:  # type: ignore[arg-type]
            response.begin()
            if response.status in _REDIRECTS and (target := response.getheader("location")):
                return target
            if response.status != 200:
                raise OSError(f"it answers with {response.status}")
            if response.getheader("content-encoding", "identity").strip().lower() != "identity":
                raise OSError("its content is encoded, which nobody asked for")
            # Chunks have lines of their own.
            received.left = 2 * policy.max_bytes + _MAX_HEADER
            return _body(response, policy)


def _body(response: HTTPResponse, policy: MediaPolicy) -> bytes:
    told, content = response.length, bytearray()
    policy.require_size(told or 0)
    while piece := response.read(_PIECE):
        content += piece
        policy.require_size(len(content))
    if told is not None and len(content) != told:
        raise OSError(f"it sends {len(content)} bytes in place of {told}")
    if not content:
        # Perhaps the header is cut.
        raise OSError("it sends nothing")
    return bytes(content)


def _addresses(place: _Place, policy: MediaPolicy, deadline: float) -> Sequence[str]:
    """The host's addresses. The system's resolver has no time limit, so a thread asks it."""
    # Its end would cancel the call.
    pool = DaemonPool(1, "rosebatch-lookup")
    lookup = pool.submit(policy.resolve, place.host, place.port)
    if not done_within(lookup, _left(deadline)):
        raise TimeoutError
    found = lookup.result()
    if not found or not all(map(policy.may_connect, found)):
        raise RowError("image_not_allowed", f"{place.host} has an address that is not public")
    return found


def _connect(place: _Place, addresses: Sequence[str], deadline: float) -> socket.socket:
    """A connection to the first address that takes one; with https, to a host that has proved its name."""
    error: OSError | None = None
    for address in addresses:
        try:
            connection = socket.create_connection((address, place.port), _left(deadline))
        except OSError as failure:
            error = failure
            continue
        if place.scheme == "http":
            return connection
        try:
            connection.settimeout(_left(deadline))
            return ssl.create_default_context().wrap_socket(connection, server_hostname=place.host)
        except BaseException:
            connection.close()
            raise
    raise error or OSError("it has no address")


def _left(deadline: float) -> float:
    """Seconds."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


class _Received(io.RawIOBase):
    """What a connection sends until the deadline.

    Attributes:
        left: so many bytes may still come.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self.left = _MAX_HEADER

    def makefile(self, mode: str) -> io.BufferedReader:
        """As http.client asks a socket for it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        """Some bytes.

        Raises:
            RowError: too many come.
            TimeoutError: they come too late.
        """
        if self.left <= 0:
            raise RowError("image_too_large", "its server sends more than a file and a header may have")
        self._connection.settimeout(_left(self._deadline))
        count = self._connection.recv_into(memoryview(buffer)[: self.left])
        self.left -= count
        return count
