"""Other engines: what a peer process gets, and what its answer becomes. The peer here generates nothing."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rosebatch.bench.against import PEERS, Peer, _cause, choose_peers, other_form, require_installed, run_peer
from rosebatch.bench.peers import transformers
from rosebatch.bench.scenario import Range, Sampling
from rosebatch.core.errors import FlagError
from rosebatch.model.hf.folder import write_config
from rosebatch.model.quantization.chosen import PLAIN, choose_quantization
from tests.helpers.json_lines import read_lines

HERE = Path(__file__).parent


@pytest.fixture
def fake(tmp_path):
    """Makes a peer for run_peer. ``processes`` gives what its processes wrote down."""
    log = tmp_path / "processes"

    def make(**args):
        return Peer("fake", module="fake_peer", package="json", path=str(HERE), args={"log": str(log), **args})

    make.processes = lambda: read_lines(log)
    return make


def take_log(error):
    """The text of the log that an error names; the file is removed."""
    path = Path(str(error).split("its log is ")[1].split(": ")[0])
    text = path.read_text()
    path.unlink()
    return text


def error_of(timed):
    """The error of the one case."""
    (entry,) = timed.values()
    return entry["error"]


def test_what_a_peer_is_told(fake, make_case):
    """A peer must get the same ids as our engine in every run, and its own output must not spoil the answer."""
    case = make_case(sampling=Sampling(temperature=1.0, top_p=0.9), output_len=Range(low=1, high=9), max_num_seqs=2)
    timed = run_peer(fake(), [case], repeats=2)
    assert timed.keys() == {"small"}
    assert timed["small"]["version"] == "1.2"
    assert len(timed["small"]["seconds"]) == 2
    assert list(timed["small"]["startup_s"]) == ["load", "warm-up"]
    (process,) = fake.processes()
    spec = process["spec"]
    assert spec.pop("args") == fake().args
    assert not Path(spec.pop("model")).exists(), "a temporary folder"
    workload = {"prompts": [case.workload(run).prompts for run in range(3)], "output_lens": case.workload().output_lens}
    workload["sampling"] = {"temperature": 1.0, "top_p": 0.9}
    expected = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "max_num_seqs": 2}
    expected |= {"quantization": None, "kv_cache_dtype": "auto"}
    assert spec == {**expected, "prefix_cache": False, "repeats": 2, "workloads": [workload]}
    assert process["config"]["architectures"] == ["LlamaForCausalLM"]


def test_one_process_for_all_cases_of_an_engine(fake, make_case):
    """Start-up takes a minute, so cases share a process unless they need another engine."""
    cases = [make_case("a"), make_case("b", max_num_seqs=7), make_case("c", input_len=9)]
    timed = run_peer(fake(), cases, repeats=1)
    assert timed.keys() == {"a", "b", "c"}
    told = [[len(w["prompts"][0][0]) for w in process["spec"]["workloads"]] for process in fake.processes()]
    assert told == [[6, 9], [6]]


@pytest.fixture
def rounded(make_case):
    """A case whose weights, K and V are in fp8."""
    case = make_case("rounded")
    config = msgspec.structs.replace(case.source.config, kv_cache_dtype="fp8")
    return replace(case, source=replace(case.source, config=config, quantization=choose_quantization("fp8", None)))


def test_a_peer_is_told_our_form(fake, make_case, rounded):
    """A peer in 16 bits was compared with our fp8. Other forms need other engines."""
    timed = run_peer(fake(), [rounded, make_case("plain")], repeats=1)
    assert all("seconds" in each for each in timed.values()), timed
    told = [(each["spec"]["quantization"], each["spec"]["kv_cache_dtype"]) for each in fake.processes()]
    assert told == [("fp8", "fp8"), (None, "auto")]


def test_a_peer_that_runs_another_form(make_case, rounded):
    """A ratio between two forms, without a word."""
    alone = replace(rounded.source, quantization=PLAIN)
    assert other_form(PEERS["vllm"], rounded.source) is None
    assert other_form(PEERS["transformers"], make_case().source) is None
    said = "--against transformers: its weights and K and V are not in fp8"
    assert other_form(PEERS["transformers"], rounded.source) == said
    assert other_form(PEERS["transformers"], alone) == "--against transformers: its K and V are not in fp8"
    decoded = replace(alone, quantization=choose_quantization("none", {"quant_method": "fp8"}))
    said = "--against vllm: it keeps fp8, a scale a matrix, which --quantization none decodes for us"
    assert other_form(PEERS["vllm"], decoded) == said


def test_only_our_package_is_lent(fake, make_case, monkeypatch):
    """A peer in another environment must not find our torch beside our package."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    run_peer(fake(), [make_case()], repeats=1)
    first, *others = fake.processes()[0]["path"].split(":")
    assert first.endswith("import")
    assert others == [str(HERE), "/somewhere"]


def test_a_peer_that_crashes(fake, make_case):
    """The error shows the line of the log that names an error, and where the log is."""
    error = error_of(run_peer(fake(crash=True), [make_case()], repeats=1))
    assert re.match(r"^fake ended with exit code 1; its log is .*: RuntimeError: no GPU$", error)
    text = take_log(error)
    assert "Traceback" in text
    for noise in ("Python", "C", "a process"):
        assert f"noise of {noise}\n" in text


def test_the_cause_of_a_crash_is_told():
    """An engine's own error was hidden behind those of the processes that waited for it."""
    log = """INFO loading
    (EngineCore pid=7) ValueError: Free memory on device is less than desired
    Traceback (most recent call last):
    RuntimeError: Engine core initialization failed. See root cause above.
    WARNING engine core exited unexpectedly
    """
    assert _cause(log) == "(EngineCore pid=7) ValueError: Free memory on device is less than desired"
    assert _cause("INFO loading\nkilled\n\n") == "killed"
    assert _cause("\n") == "it wrote nothing"


def test_a_peer_that_stops_early(fake, make_case):
    """Fewer tokens would look like more speed."""
    error = error_of(run_peer(fake(short_by=1), [make_case()], repeats=1))
    assert "a completion does not have the requested length" in error
    assert "AssertionError" in take_log(error)


def test_a_workload_that_does_not_fit_the_model(fake, make_case):
    """Found before a process is started. What another engine of this peer has timed stays."""
    good, bad = make_case(), replace(make_case(input_len=500, output_len=16), name="long")
    bad = replace(bad, scenario=msgspec.structs.replace(bad.scenario, max_num_seqs=good.scenario.max_num_seqs + 1))
    timed = run_peer(fake(), [good, bad], repeats=1)
    assert "516 tokens, but the engine holds at most 512" in timed["long"]["error"]
    assert timed[good.name]["seconds"]
    assert len(fake.processes()) == 1


def test_a_missing_peer(fake):
    """The peer's own interpreter is asked; the error says how to install the peer or name another Python."""
    peer = Peer("vllm", module="none", package="no_such_package_here")
    with pytest.raises(FlagError, match=r"^--against vllm: .* pip install no_such_package_here, .*--peer-python vllm="):
        require_installed(peer)
    require_installed(fake())
    require_installed(replace(peer, package="fake_peer", path=str(HERE)))


def test_a_missing_interpreter(tmp_path):
    """One line, not a traceback."""
    with pytest.raises(FlagError, match=r"^--peer-python .*none: No such file"):
        require_installed(replace(PEERS["vllm"], python=str(tmp_path / "none")))


def test_choose_peers(monkeypatch, tmp_path):
    """A value is for all peers or for one, the last one counts, and paths are relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(sys.executable)
    vllm, sglang = choose_peers(
        ["vllm", "sglang", "vllm"],
        ['vllm={"a": 1, "b": "x=y"}', 'sglang={"c": 2}'],
        ["./link", "sglang=/opt/python"],
        ["one", "vllm=two:/three", "sglang=x=y"],
    )
    own = {"args": {"a": 1, "b": "x=y"}, "python": str(tmp_path / "link"), "path": f"{tmp_path / 'two'}:/three"}
    assert vllm == replace(PEERS["vllm"], **own)
    assert sglang == replace(PEERS["sglang"], args={"c": 2}, python="/opt/python", path=str(tmp_path / "x=y"))
    assert choose_peers(["sglang"], [], ["python3"], []) == [replace(PEERS["sglang"], python="python3")]
    assert choose_peers(["transformers"], [], [], []) == [PEERS["transformers"]]


@pytest.mark.parametrize(
    ("name", "args", "part"),
    [
        ("llama.cpp", "", "--against llama.cpp: no such engine; choose from vllm, sglang, lmdeploy, transformers"),
        ("vllm", "{cut", "--peer-args is not valid JSON: "),
        ("vllm", "[1]", "--peer-args must be a JSON object, got [1]"),
    ],
)
def test_impossible_peers(name, args, part):
    """Found before anything runs."""
    with pytest.raises(FlagError) as error:
        choose_peers([name], [args], [], [])
    assert part in str(error.value)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}])
def test_transformers(make_case, tmp_path, sampling):
    """Batches of prompts and outputs with different lengths: every output has its requested length."""
    write_config(make_case().source.config, tmp_path)
    spec = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "dtype": "float32", "max_num_seqs": 2}
    loaded = transformers.load({**spec, "args": {}})
    assert loaded.prepare([[1, 2, 3], [4], [5, 6]], [4, 2, 7], sampling)() == [4, 2, 7]
