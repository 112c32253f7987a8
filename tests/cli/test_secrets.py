"""Passwords and signatures of URLs stay out of messages, reports, manifests and results."""

import fsspec
import pytest

SECRET = "hunter2"


@pytest.fixture
def root(tmp_path):
    """A folder in memory whose URL has a password."""
    return f"memory://user:{SECRET}@{tmp_path.name}"


def test_urls_with_secrets(toy, root, tmp_path):
    """The signature of a presigned URL stood in the terminal and in logs of a CI."""
    for name in "ab":
        with fsspec.open(f"{root}/data/{name}.jsonl", "w") as file:
            file.write('{"prompt":""}\n{"prompt_token_ids":[1],"max_tokens":1}\n')
    query = f"?X-Amz-Signature={SECRET}"
    for args in (
        [f"{root}/none.jsonl{query}"],
        [f"{root}/data", "-o", f"{root}/data/out.jsonl"],
        [f"{root}/data/a.jsonl", "-o", f"{root}/data/a.jsonl"],
        [f"{root}/data", "-o", f"nosuchsystem://user:{SECRET}@host/a{query}"],
    ):
        result = toy(*args)
        assert result.code in (1, 2)
        assert SECRET not in result.out + result.err
    (tmp_path / "out.jsonl.part").touch()
    result = toy(f"{root}/data", "-o", "out.jsonl", "--report", "r.json", "--report", "r.html")
    assert result.code == 3
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "data/a.jsonl line 1: " in written
    assert SECRET not in written + result.out + result.err


def test_the_manifest_of_a_url(toy, root, tmp_path, monkeypatch):
    """The part file outlives a killed run."""
    with fsspec.open(f"{root}/in.jsonl", "w") as file:
        file.write('{"prompt_token_ids":[1],"max_tokens":1}\n')
    monkeypatch.setattr("rosebatch.job.open_output.upload", lambda path, url: 1 / 0)
    assert toy(f"{root}/in.jsonl", "-o", f"{root}/out.jsonl").code == 1
    (part,) = tmp_path.glob("*.part")
    assert SECRET not in part.read_text()


def test_check(cli, root, toy_toml):
    """It prints the input's name."""
    with fsspec.open(f"{root}/in.jsonl", "w") as file:
        file.write('{"prompt":"\\u001b[31m"}\n')
    result = cli("check", f"{root}/in.jsonl", "--model", toy_toml, "--load-format", "dummy")
    assert result.code == 3
    assert SECRET not in result.out + result.err
    assert "\x1b" not in result.out
