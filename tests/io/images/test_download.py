"""Downloads from servers on this machine: hosts that lie, never end, or lead elsewhere are errors with a name."""

import gzip
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager, suppress
from itertools import repeat

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.images.download import download
from rosebatch.io.images.policy import MediaPolicy, look_up
from rosebatch.io.images.public_address import is_public

BODY = b"a picture" * 100
LOOPBACK = "127.0.0.1"


class Server:
    """Answers each connection with what ``answers`` yields, and keeps the requests.

    The answers go on until the client closes the connection, or the test ends.
    """

    def __init__(self, listener):
        self.listener = listener
        self.port = listener.getsockname()[1]
        self.name = f"site.test:{self.port}"
        self.answers = [b""]
        self.requests = []
        self.ended = threading.Event()

    def url(self, path="/a.png", name=None, scheme="http"):
        return f"{scheme}://{name or self.name}{path}"

    def policy(self, *names, **others):
        """The rule for addresses is the real one, and lets this machine's own through."""
        fields = {
            "domains": frozenset({self.name, *(f"{name}:{self.port}" for name in names)}),
            "max_bytes": 1000,
            "resolve": lambda host, port: [LOOPBACK],
            "may_connect": lambda address: address == LOOPBACK or is_public(address),
        }
        return MediaPolicy(**{**fields, **others})

    def serve(self, wrap):
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with suppress(OSError), connection, wrap(connection) as stream:
                    request = b""
                    # What is no request is answered at once.
                    while request[:3] in (b"", b"GET") and not request.endswith(b"\r\n\r\n"):
                        piece = stream.recv(4096)
                        if not piece:
                            break
                        request += piece
                    self.requests.append(request.decode("latin-1"))
                    answers = self.answers(request) if callable(self.answers) else self.answers
                    for piece in answers:
                        if self.ended.is_set():
                            break
                        stream.sendall(piece)


@contextmanager
def running(wrap=lambda connection: connection):
    with socket.create_server((LOOPBACK, 0)) as listener:
        server = Server(listener)
        thread = threading.Thread(target=server.serve, args=(wrap,))
        thread.start()
        yield server
        server.ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def server():
    with running() as server:
        yield server


def answer(*headers, body=BODY, status="200 OK"):
    head = "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode("latin-1")
    return [head + body]


def redirect(target, status="302 Found"):
    return answer(f"Location: {target}", body=b"", status=status)


def error_of(url, policy):
    with pytest.raises(RowError) as caught:
        download(url, policy)
    return caught.value.code, caught.value.message


END = b"\r\n0\r\n\r\n"


def chunked(*chunks, end=END):
    body = b"\r\n".join(b"%x\r\n%b" % (len(chunk), chunk) for chunk in chunks) + end
    return answer("Transfer-Encoding: chunked", body=body)


@pytest.mark.parametrize(
    "answers",
    [
        answer(f"Content-Length: {len(BODY)}"),
        answer(f"Content-Length: {len(BODY)}", body=BODY + b"more"),
        answer("Content-Type: text/html", "Content-Encoding: identity"),
        chunked(BODY[:100], BODY[100:]),
        [b"HTTP/1.1 100 Continue\r\n\r\n", *answer()],
        [bytes([each]) for each in answer()[0]],
    ],
)
def test_what_is_downloaded(server, answers):
    """With a length, without one, in chunks, byte by byte."""
    server.answers = answers
    assert download(server.url(), server.policy()) == BODY
    assert server.requests[0].startswith(f"GET /a.png HTTP/1.1\r\nHost: {server.name}\r\nUser-Agent: rosebatch/")


def test_nothing_of_this_machine_is_sent(server, monkeypatch, tmp_path):
    """Logins of the user's, proxies of the environment, and where the row is from."""
    (tmp_path / ".netrc").write_text("machine site.test login me password secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answers = answer()
    assert download(server.url("/ä b?c=ö#d".replace(" ", "%20")), server.policy()) == BODY
    lines = server.requests[0].split("\r\n")
    assert lines[0] == "GET /%C3%A4%20b?c=%C3%B6 HTTP/1.1"
    names = [line.split(":")[0] for line in lines[1:] if line]
    assert names == ["Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"]


LENGTH = f"Content-Length: {len(BODY)}"
TOO_MUCH = b"x" * 1001
LYING = {
    "nothing": [b""],
    "no http": [b"220 ftp\r\n"],
    "old http": [b"<html>" + BODY],
    "status is no number": [b"HTTP/1.1 OK\r\n\r\n" + BODY],
    "half a header": [b"HTTP/1.1 200 OK\r\nContent-Le"],
    "many headers": answer(*(f"A{n}: b" for n in range(200))),
    "not found": answer(LENGTH, status="404 Not Found"),
    "forbidden": answer(LENGTH, status="403 Forbidden"),
    "a failure": answer(LENGTH, status="500 Oops"),
    "a part": answer(LENGTH, status="206 Partial Content"),
    "no content": answer(status="204 No Content", body=b""),
    "not modified": answer(status="304 Not Modified", body=b""),
    "a redirect without a target": answer(status="302 Found"),
    "switched protocols": answer(status="101 Switching Protocols"),
    "less than its length": answer(LENGTH, body=BODY[:-1]),
    "nothing of its length": answer(LENGTH, body=b""),
    "gzip": answer("Content-Encoding: gzip", body=gzip.compress(BODY)),
    "a gzip bomb": answer("Content-Encoding: gzip", body=gzip.compress(bytes(100_000))),
    "deflate": answer("Content-Encoding: deflate"),
    "two encodings": answer("Content-Encoding: identity, gzip"),
    "brotli": answer("Content-Encoding: br"),
    "a chunk without an end": chunked(BODY, end=b""),
    "a chunk that is cut": answer("Transfer-Encoding: chunked", body=b"ff\r\nabc"),
    "a chunk of no size": answer("Transfer-Encoding: chunked", body=b"zz\r\nabc\r\n0\r\n\r\n"),
    "a chunk of a giant size": answer("Transfer-Encoding: chunked", body=b"7fffffffffffffff\r\nabc"),
    "a chunk beyond all sizes": answer("Transfer-Encoding: chunked", body=b"f" * 100 + b"\r\nabc"),
    "a long line of a chunk": answer("Transfer-Encoding: chunked", body=b"1;" + b"a" * 70_000 + b"\r\nx\r\n0\r\n\r\n"),
}
LARGE = {
    "a long header": answer("A: " + "b" * 70_000),
    "many long headers": answer(*(f"A{n}: {'b' * 1000}" for n in range(99))),
    "many continues": [b"HTTP/1.1 100 Continue\r\n\r\n"] * 10_000,
    "a length beyond the bound": answer("Content-Length: 1001", body=TOO_MUCH),
    "a giant length": answer("Content-Length: 99999999999999999999"),
    "more without a length": answer(body=TOO_MUCH),
    "more than the bound in chunks": chunked(TOO_MUCH[:600], TOO_MUCH[600:]),
    "endless": [*answer(), *repeat(b"x" * 1000, 100_000)],
    "endless chunks": [*answer("Transfer-Encoding: chunked", body=b""), *repeat(b"8\r\n12345678\r\n", 100_000)],
    "a negative length and more": answer("Content-Length: -1", body=TOO_MUCH),
    "a chunk with a length": answer(
        "Content-Length: 3", "Transfer-Encoding: chunked", body=b"3e9\r\n" + TOO_MUCH + END
    ),
}


@pytest.mark.parametrize(
    ("code", "table"), [("image_not_read", LYING), ("image_too_large", LARGE)], ids=["lying", "large"]
)
def test_hostile_answers(server, code, table):
    """Each is an error, at once: no more is read, nor unpacked, than the bounds allow."""
    for name, answers in table.items():
        server.answers = answers
        assert error_of(server.url(), server.policy())[0] == code, name


def test_lines_of_chunks_are_bounded(server):
    """Each may be 64 KiB long, before a single byte of the file."""
    chunk = b"1;" + b"a" * 60_000 + b"\r\nx\r\n"
    server.answers = [*answer("Transfer-Encoding: chunked", body=b""), *repeat(chunk, 99)]
    assert error_of(server.url(), server.policy())[0] == "image_too_large"


def slowly(*pieces):
    """Bytes at intervals that no time limit of one read would notice."""
    pause = threading.Event()
    for piece in pieces:
        for each in piece:
            pause.wait(0.01)
            yield bytes([each])
    while True:
        pause.wait(0.01)
        yield b"x"


@pytest.mark.parametrize(
    "pieces",
    [[], [b"HTTP/1.1 200 OK\r\nA: "], answer("Content-Length: 1000", body=b""), answer(body=b"")],
    ids=["no header", "endless header", "body", "body without a length"],
)
def test_a_slow_answer(server, pieces):
    """A byte now and then held a thread for hours."""
    server.answers = lambda request: slowly(*pieces)
    code, message = error_of(server.url(), server.policy(seconds=0.3))
    assert (code, message) == ("image_not_read", "site.test takes more than 0.3 s")


def test_a_server_that_says_nothing(server):
    """It accepts connections, and no more."""
    with socket.create_server((LOOPBACK, 0)) as silent:
        name = f"site.test:{silent.getsockname()[1]}"
        policy = server.policy(domains=frozenset({name}), seconds=0.2)
        assert error_of(f"http://{name}/", policy)[1].endswith("takes more than 0.2 s")
        assert error_of(f"https://{name}/", policy)[1].endswith("takes more than 0.2 s")


def test_a_slow_resolver(server):
    """The system's own has no time limit."""
    go = threading.Event()
    policy = server.policy(seconds=0.2, resolve=lambda host, port: go.wait() and [LOOPBACK])
    assert error_of(server.url(), policy)[1].endswith("takes more than 0.2 s")
    go.set()


def test_the_time_is_of_all_redirects_together(server):
    """Each redirect began a new one."""

    def answers(request):
        threading.Event().wait(0.15)
        return redirect("/next")

    server.answers = answers
    assert error_of(server.url(), server.policy(seconds=0.4, max_redirects=1000))[1].endswith("takes more than 0.4 s")


PRIVATE = """
10.0.0.1 192.168.1.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 ::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 fe80::1 fd00::1
"""


@pytest.mark.parametrize("address", [*PRIVATE.split(), "site.test", ""])
def test_names_of_private_addresses(server, address):
    """A listed domain may have any address in the DNS. One private among public ones is enough."""
    for addresses in ([address], ["8.8.8.8", address], [address, "8.8.8.8"]):
        policy = server.policy(resolve=lambda host, port, found=addresses: found)
        assert error_of(server.url(), policy) == ("image_not_allowed", "site.test has an address that is not public")
    assert server.requests == []


def test_this_machine_is_private(server):
    """The same server, by the policy as it is; and by the system's resolver."""
    assert look_up(LOOPBACK, server.port) == [LOOPBACK]
    policy = MediaPolicy(domains=frozenset({f"{LOOPBACK}:{server.port}", f"localhost:{server.port}"}))
    for name in (LOOPBACK, "localhost"):
        assert error_of(server.url(name=f"{name}:{server.port}"), policy)[0] == "image_not_allowed"
    assert server.requests == []


def test_a_name_is_looked_up_once(server):
    """The second answer of a resolver was another address than the one that was checked."""
    asked = []

    def resolve(host, port):
        asked.append((host, port))
        return [LOOPBACK] if len(asked) == 1 else ["10.0.0.1"]

    server.answers = answer()
    assert download(server.url(), server.policy(resolve=resolve)) == BODY
    assert asked == [("site.test", server.port)]


def test_the_next_address_is_tried(server):
    """A machine without IPv6 has no way to the first one."""
    server.answers = answer()
    policy = server.policy(resolve=lambda host, port: ["127.0.0.2", LOOPBACK], may_connect=lambda address: True)
    assert download(server.url(), policy) == BODY


def test_no_address(server):
    """Neither in the DNS, nor one that answers."""

    def resolve(host, port):
        raise socket.gaierror("Name or service not known")

    assert error_of(server.url(), server.policy(resolve=resolve))[0] == "image_not_read"
    assert error_of(server.url(), server.policy(resolve=lambda host, port: []))[0] == "image_not_allowed"
    with socket.create_server((LOOPBACK, 0)) as closed:
        name = f"site.test:{closed.getsockname()[1]}"
    assert error_of(f"http://{name}/", server.policy(domains=frozenset({name})))[0] == "image_not_read"


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects(server, status):
    """Relative ones, and those to another listed domain."""
    targets = {"/a.png": "b/c.png?d", "/b/c.png?d": f"//other.test:{server.port}/e", "/e": "e2"}

    def answers(request):
        path = request.split()[1].decode()
        return redirect(targets[path], status) if path in targets else answer()

    server.answers = answers
    assert download(server.url(), server.policy("other.test")) == BODY
    hosts = [request.split("\r\n")[1].removeprefix("Host: ").partition(":")[0] for request in server.requests]
    assert hosts == ["site.test", "site.test", "other.test", "other.test"]


FORBIDDEN_TARGETS = """
http://127.0.0.1/ http://localhost/ http://169.254.169.254/latest/meta-data/ http://[::1]/ http://evil.test/ //a.test/
http://site.test/ https://site.test/ file:///etc/passwd ftp://site.test/ data:image/png;base64,AAAA javascript:alert(1)
http://user@site.test/ http://[::1 \\\\evil.test\\a //site.test@evil.test/ http:\\\\evil.test gopher://127.0.0.1:6379/_PING
http://inner.test:{port}/ //inner.test:{port}/a
"""


def test_redirects_are_checked_anew(server):
    """A listed server leads to others: by another name, scheme or address."""
    policy = server.policy(
        "inner.test", resolve=lambda host, port: ["10.0.0.1"] if host == "inner.test" else [LOOPBACK]
    )
    for target in FORBIDDEN_TARGETS.split():
        server.answers = redirect(target.replace("{port}", str(server.port)))
        server.requests.clear()
        assert error_of(server.url(), policy)[0] == "image_not_allowed", target
        assert len(server.requests) == 1, target


def test_redirects_are_counted(server):
    """A circle has no end."""
    server.answers = redirect("/a.png")
    assert error_of(server.url(), server.policy()) == ("image_not_allowed", "more than 3 redirects")
    assert len(server.requests) == 4


def test_errors_have_no_text_of_the_server(server):
    """A result would show what only this machine can read."""
    for answers in ([b"secret\r\n" + BODY], answer(status="500 secret"), answer("Content-Encoding: secret")):
        server.answers = answers
        assert "secret" not in error_of(server.url("/?token=secret"), server.policy())[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key, and a certificate of site.test that signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, own = folder / "key.pem", folder / "own.pem"
    assert shutil.which("openssl"), "the tests of TLS need the command openssl"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", own, "-days", "9", "-subj", "/CN=site.test"]
    extensions = ("subjectAltName=DNS:site.test", "basicConstraints=critical,CA:TRUE")
    for each in (*extensions, "keyUsage=critical,digitalSignature,keyCertSign"):
        command += ["-addext", each]
    subprocess.run(command, check=True, capture_output=True)
    return key, own


@pytest.fixture
def tls_server(certificate):
    key, own = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own, key)
    with running(lambda connection: context.wrap_socket(connection, server_side=True)) as server:
        server.answers = answer()
        yield server


def test_tls(tls_server, certificate, monkeypatch):
    """Whose certificate nobody vouches for, or who has another name, is not asked for anything."""
    url = tls_server.url(scheme="https")
    code, message = error_of(url, tls_server.policy())
    assert code == "image_not_read"
    assert "certificate verify failed" in message
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    other = tls_server.url(scheme="https", name=f"other.test:{tls_server.port}")
    assert "other.test" in error_of(other, tls_server.policy("other.test"))[1]
    assert tls_server.requests == []
    assert download(url, tls_server.policy()) == BODY
    assert len(tls_server.requests) == 1


def test_https_leads_to_https_only(tls_server, server, certificate, monkeypatch):
    """A redirect to http is read by everyone on the way."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    tls_server.answers = redirect(server.url())
    policy = tls_server.policy(domains=frozenset({tls_server.name, server.name}))
    assert error_of(tls_server.url(scheme="https"), policy)[0] == "image_not_allowed"
    assert server.requests == []


def test_a_server_without_tls(server):
    """It answers in plain text."""
    server.answers = answer()
    assert error_of(server.url(scheme="https"), server.policy())[0] == "image_not_read"
