"""Has a process that has imported everything fork in place of this one: ``ADDRESS ARGUMENTS``. See forked_jobs.py."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

descriptors = []
for number in sorted(int(each.name) for each in Path("/dev/fd").iterdir()):
    # The one by which they were listed is closed.
    with suppress(OSError):
        os.fstat(number)
        descriptors.append(number)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    told = json.dumps([sys.argv[2:], dict(os.environ), str(Path.cwd()), descriptors]).encode()
    socket.send_fds(server, [len(told).to_bytes(8, "big")], descriptors)
    server.sendall(told)
    code = int(server.recv(8))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
