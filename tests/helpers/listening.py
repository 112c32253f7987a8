"""Where processes listen for connections."""

from collections.abc import Iterable
from pathlib import Path

# As /proc/net/tcp has them: the state of a socket, and 127.0.0.1, of both versions of IP.
_LISTENS = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def addresses(pids: Iterable[int]) -> set[str]:
    """The addresses, as the kernel has them, in hexadecimal. A process may end meanwhile."""
    found = set()
    for pid in pids:
        try:
            links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        except OSError:
            continue
        own = {link[8:-1] for link in links if link.startswith("socket:[")}
        fields = [line.split() for table in tables for line in table.splitlines()[1:]]
        found |= {each[1].split(":")[0] for each in fields if each[3] == _LISTENS and each[9] in own}
    return found
