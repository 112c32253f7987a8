"""Hub ids: against caches that are made by hand, without any network."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from rosebatch.core.errors import UserError
from rosebatch.model.hub import HubModel, find_snapshot, name_of_snapshot, parse_hub_id
from tests.helpers.waiting import PATIENCE_SECONDS

OLD, NEW = "a" * 40, "b" * 40
SMALL = {"config.json": "{}", "tokenizer.json": "{}"}
WHOLE = {**SMALL, "model.safetensors": "weights"}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
MODEL = HubModel("org/name")


@pytest.fixture
def download(monkeypatch, add):
    """A download that puts ``files`` into the cache, or raises ``error``; what it was called with is in ``calls``."""
    fake = SimpleNamespace(files=WHOLE, error=None, calls=[], bars=[])

    def snapshot_download(name, **options):
        fake.calls.append((name, options))
        fake.bars.append(not huggingface_hub.utils.are_progress_bars_disabled())
        if fake.error is not None:
            raise fake.error
        return str(add(fake.files, name=name, commit="c" * 40))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return fake


def failed(model=MODEL, **options):
    """The message of a model that cannot be had: one line, with what to type."""
    with pytest.raises(UserError) as caught:
        find_snapshot(model, **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{model}: ")
    assert "hf download org/name" in message
    return message


# Ids


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        (f"org/name@{OLD}", "org/name", OLD),
    ],
)
def test_ids(hub, text, name, revision):
    assert (parse_hub_id(text), str(parse_hub_id(text))) == (HubModel(name, revision), text)


@pytest.mark.parametrize(
    "text",
    [
        *("/org/name", "./org/name", "../org/name", "~/name", "org/name/", "org/name/model", "org/model.gguf"),
        *("org/shapes.toml", "org/model.SAFETENSORS", "org/na me", "org/name@", "s3://org/name", ".", "", "gpt2"),
        "model.gguf",
    ],
)
def test_what_is_a_path(hub, text):
    """A mistyped path must not start a download."""
    assert parse_hub_id(text) is None


def test_a_path_that_exists_wins(hub, tmp_path, monkeypatch):
    """A user's own fine-tune in a folder of the same name must not give way to the original."""
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name@v1"):
        assert parse_hub_id(name) is not None
        Path(name).mkdir(parents=True)
        assert parse_hub_id(name) is None


def test_a_bare_name_is_an_id_if_it_is_cached(add):
    """transformers' own way to write gpt2, which has no organization."""
    snapshot = add(WHOLE, name="gpt2")
    assert parse_hub_id("gpt2") == HubModel("gpt2")
    assert parse_hub_id("gpt2@v1") == HubModel("gpt2", "v1")
    assert find_snapshot(HubModel("gpt2")) == snapshot


# The cache


def test_a_cached_model_needs_no_network(add, download):
    """No call to the library either: a job on a cluster would wait for a timeout at every start."""
    snapshot = add(WHOLE)
    assert (find_snapshot(MODEL), download.calls) == (snapshot, [])


def test_revisions(add, download):
    """A branch, a tag, a pull request and a commit hash each lead to their own snapshot."""
    old, new = add(WHOLE, commit=OLD, ref="v1"), add(WHOLE, commit=NEW)
    add({}, commit=OLD, ref="refs/pr/3")
    for revision, snapshot in (("v1", old), ("refs/pr/3", old), (OLD, old), ("main", new), (None, new), (NEW, new)):
        assert find_snapshot(HubModel("org/name", revision)) == snapshot
    assert download.calls == []


def test_a_revision_that_is_not_cached(add, download):
    """Not silently the one that is."""
    add(WHOLE)
    find_snapshot(HubModel("org/name", "v2"))
    assert [(name, options["revision"]) for name, options in download.calls] == [("org/name", "v2")]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="empty"),
        pytest.param(SMALL, id="no-weights"),
        pytest.param(
            {**SMALL, "model.safetensors.index.json": INDEX, "model-00001-of-00002.safetensors": ""}, id="missing-shard"
        ),
        pytest.param({**SMALL, "model-00001-of-00002.safetensors": ""}, id="missing-shard-and-index"),
        pytest.param({**SMALL, "model.safetensors.index.json": "{"}, id="broken-index"),
        pytest.param({**SMALL, "pytorch_model.bin": ""}, id="other-weights"),
        pytest.param({"model.safetensors": ""}, id="no-config"),
        pytest.param({"config.json": "{}", "model.safetensors": ""}, id="no-tokenizer"),
    ],
)
def test_an_incomplete_snapshot_is_downloaded(add, download, files):
    """What an interrupted download, or a program that reads only a part, left behind."""
    add(files)
    assert find_snapshot(MODEL).name == "c" * 40
    assert len(download.calls) == 1


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_to_a_blob_that_was_deleted(add, download, missing):
    """Or is still being downloaded."""
    (add(WHOLE) / missing).resolve().unlink()
    find_snapshot(MODEL)
    assert len(download.calls) == 1


@pytest.mark.parametrize(
    "files",
    [
        WHOLE,
        {**SMALL, "model.safetensors.index.json": INDEX}
        | dict.fromkeys(["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], ""),
        {"config.json": "{}", "vocab.json": "{}", "model.safetensors": ""},
        {"config.json": "{}", "tokenizer.model": "", "model.safetensors": ""},
    ],
    ids=["one-file", "shards", "older-tokenizer", "sentencepiece"],
)
def test_complete_snapshots(add, download, files):
    """Each must do without a network."""
    snapshot = add(files)
    assert (find_snapshot(MODEL), download.calls) == (snapshot, [])


def test_random_weights_need_no_weights(add, download):
    """A bench with --load-format dummy must not download gigabytes."""
    snapshot = add(SMALL)
    assert find_snapshot(MODEL, weights=False) == snapshot
    download.files = SMALL
    find_snapshot(HubModel("org/other"), weights=False)
    ((_, options),) = download.calls
    assert not any("safetensors" in pattern for pattern in options["allow_patterns"])


# Offline


def test_offline(add, download, monkeypatch):
    """A cached model is used, even one without a tokenizer: token ids can still be worked on."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = add({"config.json": "{}", "model.safetensors": ""})
    assert (find_snapshot(MODEL), download.calls) == (snapshot, [])


def test_offline_and_not_cached(hub, download, monkeypatch):
    """With the way out, for this revision."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = failed(HubModel("org/name", "v1"))
    assert "is not in the Hugging Face cache" in message and "HF_HUB_OFFLINE" in message
    assert message.endswith("hf download org/name --revision v1")
    assert download.calls == []


def test_offline_and_incomplete(add, download, monkeypatch):
    """A user who sees the folder in the cache must not look for the mistake elsewhere."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    add(SMALL)
    assert "is only partly in the Hugging Face cache" in failed()


def test_the_environment(tmp_path):
    """The variables of the library, in a process of its own: they are read once."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / OLD
    snapshot.mkdir(parents=True)
    for file, content in WHOLE.items():
        (snapshot / file).write_text(content)
    code = (
        "from rosebatch.model.hub import *\n"
        f"print(find_snapshot(HubModel('org/name', '{OLD}')))\n"
        "find_snapshot(HubModel('org/name'))\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    env.pop("HF_HUB_CACHE", None)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert ended.stdout == f"{snapshot}\n"
    assert "org/name: there is no such folder, and the model is not in the Hugging Face cache" in ended.stderr


# Downloads


@pytest.fixture
def kept():
    """The files of a repository that would be downloaded, by the library's own rules."""
    from huggingface_hub.utils import filter_repo_objects

    def call(files, options):
        patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
        return list(filter_repo_objects(files, **patterns))

    return call


def test_what_is_downloaded(hub, download, kept):
    """Not the same weights twice or three times: a Llama repository would take three times its size."""
    find_snapshot(MODEL)
    ((name, options),) = download.calls
    assert (name, options["revision"]) == ("org/name", None)
    wanted = [
        *("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt", "vocab.json"),
        *("chat_template.jinja", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    ]
    unwanted = [
        *("original/consolidated.00.pth", "original/params.json", "original/tokenizer.model"),
        *("consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "unet/diffusion.safetensors"),
        *("pytorch_model.bin", "model-q4.gguf", "model.pt", "README.md", "tf_model.h5"),
    ]
    assert kept(wanted + unwanted, options) == wanted


@pytest.fixture
def progress_bars():
    """As a process begins: other tests of this one may have switched them off."""
    disabled = huggingface_hub.utils.are_progress_bars_disabled()
    huggingface_hub.utils.enable_progress_bars()
    yield
    if disabled:
        huggingface_hub.utils.disable_progress_bars()


@pytest.mark.usefixtures("progress_bars")
@pytest.mark.parametrize("quiet", [False, True])
def test_progress(hub, download, quiet):
    """huggingface_hub's own bars, none for --quiet, and as they were afterwards."""
    find_snapshot(MODEL, quiet=quiet)
    assert download.bars == [not quiet]
    download.error = OSError("no space")
    failed(HubModel("org/name", "v1"), quiet=quiet)
    assert not huggingface_hub.utils.are_progress_bars_disabled()


def http_error(kind):
    """An error of the library, which keeps the answer of the server."""
    # Its version decides which HTTP library that is.
    http = import_module(errors.HTTPError.__module__.partition(".")[0])
    request = http.Request("GET", "https://hub.invalid/api")
    return kind("Client Error.\n\nSee the page", response=http.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (errors.RepositoryNotFoundError, ["no such model on the Hugging Face Hub", "HF_TOKEN"]),
        (errors.GatedRepoError, ["is gated", "accept its terms", "HF_TOKEN"]),
        (errors.RevisionNotFoundError, ["has no revision 'v9'"]),
        (errors.HfHubHTTPError, ["the download failed", "Client Error. See the page"]),
    ],
    ids=["missing", "gated", "revision", "server"],
)
def test_what_the_hub_refuses(hub, download, error, parts):
    """Each with the way out that fits."""
    download.error = http_error(error)
    message = failed(HubModel("org/name", "v9"))
    assert [part for part in parts if part not in message] == []
    assert "hf download org/name --revision v9" in message


def test_a_full_disk(hub, download):
    """And whatever else ends a download."""
    download.error = OSError(28, "No space left on device")
    assert "No space left on device" in failed()


def test_no_network(hub):
    """The library itself, up to the socket."""
    message = failed()
    assert "cannot be reached" in message and "the network is down" in message


def test_no_network_and_an_incomplete_snapshot(add):
    """The library gives back what there is, which would fail later as a folder without weights."""
    add(SMALL)
    assert "lacks config.json or .safetensors weights" in failed()


def test_no_network_and_no_tokenizer(add):
    """As offline: weights are enough for token ids."""
    snapshot = add({"config.json": "{}", "model.safetensors": ""})
    assert find_snapshot(MODEL) == snapshot


def test_a_refused_download_beside_a_usable_snapshot(add, download):
    """A token that has expired must not end a job whose model is there."""
    snapshot = add({"config.json": "{}", "model.safetensors": ""})
    download.error = http_error(errors.GatedRepoError)
    assert find_snapshot(MODEL) == snapshot


@pytest.mark.parametrize("files", [SMALL, {"tokenizer.json": "{}", "model.safetensors": ""}])
def test_a_repository_without_weights_that_can_be_read(hub, download, files):
    """Of GGUF files or of pickled weights, say."""
    download.files = files
    message = failed()
    assert "lacks config.json or .safetensors weights" in message and "GGUF" in message


# Names


def test_the_name_of_a_snapshot(add, tmp_path, monkeypatch):
    """A commit hash tells nobody which model a report is of."""
    snapshot = add(WHOLE, name="org/my-name_2.0")
    assert name_of_snapshot(snapshot) == "org/my-name_2.0"
    assert name_of_snapshot(add(WHOLE, name="gpt2")) == "gpt2"
    (tmp_path / "link").symlink_to(snapshot)
    assert name_of_snapshot(tmp_path / "link") == "org/my-name_2.0"
    monkeypatch.chdir(snapshot)
    assert name_of_snapshot(Path()) == "org/my-name_2.0"


def test_the_name_of_another_folder(tmp_path):
    """Such as a folder of snapshots of a training run."""
    for folder in ("snapshots/last", "models--org--name/snapshots", "models--org--name/other/last"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        assert name_of_snapshot(tmp_path / folder) is None
    assert name_of_snapshot(Path("/")) is None


@pytest.mark.parametrize("cached", [True, False])
def test_an_adapter_on_the_hub_is_named(add, download, monkeypatch, cached):
    """It was an incomplete download, to be completed by the same command."""
    files = {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": ""}
    if cached:
        add(files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    download.files = files
    with pytest.raises(UserError, match=r"the folder holds an adapter alone: .*'org/base'"):
        find_snapshot(MODEL)
    assert len(download.calls) == (not cached)
