"""References that must not be read: each is an error with a name, and nothing is opened, looked up or connected to."""

import base64
import os
import socket
import sys
from contextlib import contextmanager

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.images import local_file
from rosebatch.io.images.contents import contents
from rosebatch.io.images.load import load_image
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.images.references import ImageReference
from tests.io.images.picture_files import saved

CONTENT = saved("PNG")
TEXT = base64.b64encode(CONTENT).decode()
DATA = "data:image/png;base64,"
_watched = None


def _watch(event, arguments):
    if _watched is not None and event in ("open", "socket.connect", "socket.getaddrinfo"):
        _watched.append((event, arguments[1] if event == "socket.connect" else arguments[0]))


@contextmanager
def watched():
    """What this process opens, looks up and connects to meanwhile."""
    global _watched
    if not hasattr(sys, "_images_are_watched"):
        # Nobody can take a hook out again.
        sys.addaudithook(_watch)
        sys._images_are_watched = True
    _watched = found = []
    try:
        yield found
    finally:
        _watched = None


@pytest.fixture
def root(tmp_path):
    """A media root with all kinds of files, and secrets beside it."""
    root, outside = tmp_path / "root", tmp_path / "rootless"
    for folder in (root / "folder" / "inner", outside):
        folder.mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(CONTENT)
    (outside / "secret.png").write_bytes(CONTENT)
    for name in ("a.png", "folder/b.png", "with space#?%.png", "café.png", "a:b.png", "-", "~"):
        (root / name).write_bytes(CONTENT)
    (root / "large.png").write_bytes(bytes(5000))
    (root / "closed.png").write_bytes(CONTENT)
    links = {
        "inside": "folder/b.png",
        "folder/up": "../a.png",
        "alias": "folder",
        "out": "../secret.png",
        "absolute": str(tmp_path / "secret.png"),
        "beside": "../rootless",
        "top": "/",
        "passwd": "/etc/passwd",
        "environ": "/proc/self/environ",
        "zero": "/dev/zero",
        "own": ".",
        "dangling": "missing",
        "loop": "loop",
        "chain": "out",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "fifo")
    return root


@pytest.fixture
def policy(root):
    """Small bounds; a resolver that must not be asked."""

    def resolve(host, port):
        raise AssertionError(f"{host} was looked up")

    return MediaPolicy(root=root, domains=frozenset({"site.test"}), max_bytes=4000, resolve=resolve)


@pytest.mark.parametrize(
    "source",
    [
        *("a.png", "./a.png", "folder/b.png", "folder/../a.png", "folder/inner/../../a.png", "inside", "folder/up"),
        *("alias/b.png", "own/own/a.png", "{root}/a.png", "{root}/alias/up", "./a:b.png", "-", "~", "café.png"),
        *("file://{root}/a.png", "file://localhost{root}/a.png", "FILE:{root}/folder/%62.png", "file:{root}/a:b.png"),
        *("file://{root}/with%20space%23%3F%25.png", "with space#?%.png", "file://{root}/caf%C3%A9.png"),
        *(DATA + TEXT, "DATA:;BASE64," + TEXT, "data:text/html;x=y;base64," + TEXT, TEXT, TEXT + "\n"),
        *("\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)), DATA + TEXT[:76] + "\r\n" + TEXT[76:]),
    ],
)
def test_what_is_read(root, policy, source):
    """All forms of a reference; links are followed below the root."""
    assert contents(source.replace("{root}", str(root)), policy) == CONTENT


def test_base64_of_each_format_is_no_path(policy):
    """A JPEG's begins with a slash."""
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert contents(base64.b64encode(saved(kind)).decode(), policy) == saved(kind)


_PATHS = """
../secret.png ../../etc/passwd folder/../../secret.png ./../secret.png alias/../../secret.png
folder/inner/../../../secret.png ../rootless/secret.png {root}less/secret.png {root}/../secret.png {root}/.. / // /.
/etc/passwd //etc/passwd ///etc/passwd /etc/../etc/passwd /proc/self/environ /proc/self/mem /proc/self/maps
/proc/self/cmdline /proc/1/environ /proc/self/cwd/a.png /proc/self/root/etc/passwd /proc/self/fd/0 /proc/kcore
/proc/kmsg /dev/zero /dev/random /dev/stdin /dev/fd/0 /dev/tty /dev/mem /dev/null /dev/shm /sys/kernel/notes
/root/.ssh/id_rsa /var/run/docker.sock /9j/../etc/passwd out absolute beside/secret.png top/etc/passwd passwd environ
zero chain own/out alias/../out own/../../secret.png .. ../ folder/../.. ../root/../secret.png file:///etc/passwd
file:/etc/passwd FILE:///etc/passwd file:////etc/passwd file://localhost/etc/passwd file:../secret.png
file:%2e%2e/secret.png file:///%65tc/passwd file://{root}/../secret.png file://{root}/%2e%2e/secret.png
file:///proc/self/environ file://{root}/..%2fsecret.png file:///dev/zero file://{root}/out
file:///{root}/..//secret.png file://LOCALHOST:/etc/passwd file://{root}/folder/..%2F..%2fsecret.png
file://localhost:80/etc/passwd file://127.0.0.1/etc/passwd file://evil.test/share/a.png
file://user@localhost/etc/passwd file://site.test/a.png
"""
_URLS = """
http://127.0.0.1/a.png http://localhost/a.png http://[::1]/a.png http://[::ffff:127.0.0.1]/ http://0/
http://0.0.0.0/a.png http://2130706433/ http://0x7f000001/ http://0177.0.0.1/ http://127.1/
http://169.254.169.254/latest/meta-data/ http://10.0.0.1/ http://metadata.google.internal/ http://evil.test/a.png
https://evil.test/a.png http://site.test.evil.test/ http://evilsite.test/ http://evil.test/site.test
http://evil.test?site.test http://evil.test#site.test http://evil.test;site.test/ http://site.test./
http://www.site.test/ http://site/ http://test/ http:///a.png http://:80/ http:/a.png http:a.png http:// http: https:
http://site.test@evil.test/ http://evil.test@site.test/ http://user:password@site.test/ http://@site.test/
http://site.test:8080/ http://site.test:22/ https://site.test:80/ http://site.test:443/ http://site.test:0/
http://site.test:99999/ http://site.test:a/ http://site.test:-80/ http://site.test%00.evil.test/
http://site.test%2f@evil.test/ http://site.test%40evil.test/ http://s%69te.test/ http://evil.test\\@site.test/
http://site.test\\.evil.test/ http:\\\\site.test\\a.png http://[site.test]/ http://[::1/ http://site.test]/
http://[fe80::1%25eth0]/ http://\uff53ite.test/ http://site\u3002test/ http://site.test\u2100/ http://s\u0131te.test/
http://xn--site.test/ ftp://site.test/a.png ftp://evil.test/ sftp://site.test/ gopher://127.0.0.1:6379/_PING
dict://127.0.0.1/ ldap://site.test/ tftp://a/ jar:http://site.test!/a.png javascript:alert(1) vbscript:x
blob:http://site.test/1 about:blank view-source:http://site.test/ ws://site.test/ s3://bucket/a.png gs://bucket/a.png
hf://datasets/a.png smb://site.test/a netdoc:///etc/passwd php://filter/a unix:/var/run/docker.sock cid:part1 urn:a
C:\\a.png c:/a.png httpx://site.test/ https+unix://a/ url:file:///etc/passwd
"""
FORBIDDEN_PATHS = _PATHS.split()
FORBIDDEN_URLS = [
    *_URLS.split(),
    *("http://site.test/a b.png", "http://site.test/\r\nHost: evil.test", "http://site\t.test/", "http://site.test\n/"),
    *("http://site.test/\x7f", "http://site.test/a\0"),
]
BROKEN = [
    *("a\0.png", "\0", "../a\0", "file:///%00", "file://{root}/a.png%00", "\ud800.png", "file://{root}/a.png?x=1"),
    *("file://{root}/a.png#x", "file://[/a.png", "data:", "data:,", "data:image/png", "data:image/png,abc"),
    *("data:image/png;base64", "data:image/png;base65,AAAA", "data:image/png;base64 ,AAAA", "data:text/html,<b>hi</b>"),
    *(DATA + bad for bad in ("A", "AA", "AAA", "====", "AAA=A", "A===", "AA=A", "AA-_", "AA%41", "ÄÖÜ=", "AA A")),
    *(
        DATA + TEXT[:-1],
        DATA + TEXT + ",",
        DATA + " " + TEXT,
        TEXT[:-3],
        DATA + "\ud800AAA",
        DATA + "AA\0=",
    ),
]
# Some took minutes: the time grew with the square of the length.
LONG = [
    *("x/" * 500_000, "{root}" + "/." * 500_000, "../" * 500_000, "file:" + "/.." * 100_000, "a" * 5_000_000),
    *("/9j/" + "\n" * 500_000 + "!", "/9j/" + "\r\n=" * 200_000, "http://site.test/" + "a" * 100_000),
    "a" * 5_000_000 + ":",
]
MISSING = [
    *("missing.png", "folder/missing.png", "dangling", "loop", "loop/a.png", "a.png/b.png", "a.png/../nothing"),
    *("x" * 300, "x/" * 4000, "fifo/a.png", "file://{root}/missing.png", "%2e%2e/secret.png", "..\\secret.png"),
    *(" a.png", " http://site.test/", "root/a.png", "a.png\n", "~/a.png", "$HOME/a.png", "*.png"),
]
NO_FILES = ["", "fifo", ".", "folder", "own", "alias", "folder/", "{root}", "{root}/", "file://{root}", "folder/.."]
LARGE = ["large.png", DATA + "A" * 8000, TEXT + "A" * 8000, DATA + "A" * 5336]


def error_of(source, policy):
    with pytest.raises(RowError) as caught:
        contents(source, policy)
    assert len(caught.value.message) < 600
    assert "secret" not in caught.value.message
    assert "password" not in caught.value.message
    return caught.value.code


@pytest.mark.parametrize(
    ("code", "sources"),
    [
        ("image_not_allowed", FORBIDDEN_PATHS),
        ("image_not_allowed", FORBIDDEN_URLS),
        ("invalid_image", BROKEN),
        ("invalid_image", LONG),
        ("image_not_read", MISSING),
        ("image_not_allowed", NO_FILES),
        ("image_too_large", LARGE),
    ],
    ids=["paths", "urls", "broken", "long", "missing", "no-files", "large"],
)
def test_hostile_references(root, policy, code, sources):
    """Nothing outside of the root is opened, whatever it is, and no host is looked up."""
    for source in sources:
        with watched() as opened:
            assert error_of(source.replace("{root}", str(root)), policy) == code, source[:99]
        # Below the root, folders and files are opened by their own names.
        assert {what for what, _ in opened} <= {"open"}, source
        absolute = {path for _, path in opened if str(path).startswith("/")}
        assert absolute <= {str(root)}, source
        if sources in (FORBIDDEN_PATHS, FORBIDDEN_URLS):
            assert opened == [], source


def test_there_are_many_of_them():
    """A table that lost its rows passed."""
    assert sum(map(len, (FORBIDDEN_PATHS, FORBIDDEN_URLS, BROKEN, LONG, MISSING, NO_FILES, LARGE))) > 200


def test_without_a_policy_only_data_is_read(root):
    """Files and domains are for who asked for them."""
    for source in ("a.png", f"{root}/a.png", f"file://{root}/a.png", "http://site.test/", "https://site.test/"):
        assert error_of(source, MediaPolicy()) == "image_not_allowed"
    assert contents(DATA + TEXT, MediaPolicy()) == CONTENT


def test_sockets_are_no_files(root, policy, monkeypatch):
    """Nor is what a device has."""
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert error_of("socket", policy) == "image_not_read"


def test_a_root_that_is_a_link(root, policy, tmp_path):
    """Both names of the root are its own."""
    (tmp_path / "link").symlink_to(root)
    linked = MediaPolicy(root=tmp_path / "link")
    for source in ("a.png", f"{tmp_path}/link/a.png", f"{root}/a.png"):
        assert contents(source, linked) == CONTENT


@pytest.mark.parametrize(("place", "target"), [("a.png", "../secret.png"), ("folder", "../rootless")])
def test_a_link_that_appears_after_the_path_was_resolved(root, policy, monkeypatch, place, target):
    """Between the check and the opening a file became a link to a secret."""
    resolve = os.path.realpath

    def then_swap(path):
        found = resolve(path)
        if not (root / place).is_symlink() and found != str(root):
            (root / place).rename(root / "moved")
            (root / place).symlink_to(target)
        return found

    monkeypatch.setattr(local_file.os.path, "realpath", then_swap)
    source = "a.png" if place == "a.png" else "folder/b.png"
    (root / "../rootless/b.png").write_bytes(b"secret")
    assert error_of(source, policy) == "image_not_read"
    assert (root / place).is_symlink()


def test_the_bound_of_bytes_is_exact(root):
    """A file as large as the bound is read, in all forms."""
    for size, code in ((len(CONTENT), None), (len(CONTENT) - 1, "image_too_large")):
        policy = MediaPolicy(root=root, max_bytes=size)
        for source in ("a.png", DATA + TEXT, TEXT):
            assert contents(source, policy) == CONTENT if code is None else error_of(source, policy) == code


def test_an_error_says_which_image(policy):
    """A row may have many."""
    pixels = load_image(ImageReference("messages[0].content[0]", "a.png"), policy).rgb
    assert pixels.shape == (7, 9, 3)
    for source in ("missing.png", DATA + "AAAA"):
        with pytest.raises(RowError, match=r"^messages\[2\]\.content\[1\]: "):
            load_image(ImageReference("messages[2].content[1]", source), policy)
