"""Where a report's figures come from, without secrets."""

import os
import subprocess
import sys

import rosebatch.job.report.provenance as provenance_module
from rosebatch.job.report.provenance import git_revision, provenance
from tests.helpers.checkout import ROOT


def test_names_and_command_without_secrets(monkeypatch):
    """A report is sent to others: logins and signatures of URLs must not be in it."""
    monkeypatch.setattr(sys, "argv", ["rosebatch", "generate", "s3://me:hunter2@b/in.jsonl", "-o", "a b.jsonl"])
    found = provenance("s3://me:hunter2@b/in.jsonl", "https://b/out.jsonl?signature=hunter2")
    assert "hunter2" not in str(found)
    assert found["command"] == "rosebatch generate s3://b/in.jsonl -o 'a b.jsonl'"
    assert (found["input"], found["output"]) == ("s3://b/in.jsonl", "https://b/out.jsonl?…")
    assert {"rosebatch", "python", "torch", "transformers"} <= found["versions"].keys()
    assert found["date"].endswith("+00:00")


def test_the_commit_of_a_checkout(tmp_path):
    """An installed package has none; a checkout with changes says so: its figures cannot be repeated.

    Reports looked for it in the package's folder once the file had moved, and named none. Looking wrote the index: a
    job that was killed meanwhile left ``index.lock``, which ended the user's next commit.
    """
    assert provenance_module._ROOT == ROOT
    assert git_revision(tmp_path) is None

    def git(*args):
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", tmp_path, *names, *args], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    index = (tmp_path / ".git" / "index").read_bytes()
    os.utime(tmp_path / "file", (1, 1))
    assert git_revision(tmp_path) == commit
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == f"{commit}-dirty"
    (tmp_path / os.fsdecode(b"\xff")).touch()
    git("config", "core.quotePath", "false")
    git("add", ".")
    assert git_revision(tmp_path) == f"{commit}-dirty"
    (tmp_path / ".git" / "index").write_bytes(b"damaged")
    assert git_revision(tmp_path) is None


def test_without_git(tmp_path, monkeypatch):
    """A report needs no git."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None
