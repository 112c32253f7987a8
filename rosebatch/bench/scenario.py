"""Scenarios: the work of a bench run, and the TOML files in ``configs/bench`` that describe it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rosebatch.config.byte_sizes import parse_size
from rosebatch.config.toml_file import convert, load_toml
from rosebatch.core.errors import FlagError
from rosebatch.core.sampling_params import SamplingParams


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lengths drawn uniformly, both ends included."""

    low: int
    high: int


# One length for all prompts, lengths taken in turn, or lengths drawn at random.
Length = int | tuple[int, ...] | Range


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen. Fields and defaults are those of ``rosebatch.core.sampling_params.SamplingParams``."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Random token ids in, a fixed number of tokens out.

    Attributes:
        about: one line for people.
        model: a name in ``configs/models``, run with random weights; None takes ``--model``.
        dtype: of weights and KV cache; ``auto`` takes the model's.
        input_len: prompt tokens, without the shared prefix.
        output_len: tokens generated, never fewer: end tokens are ignored.
        shared_prefix_len: tokens at the beginning of all prompts.
        max_num_seqs: most sequences in a step.
        prefix_cache: whether blocks are reused.
        kv_cache_memory: such as ``2GiB``, to force preemptions; None takes what fits.
        seed: of lengths and token ids.
    """

    about: str = ""
    model: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    num_prompts: int
    input_len: Length
    output_len: Length
    shared_prefix_len: int = 0
    sampling: Sampling = Sampling()
    max_num_seqs: int = 256
    prefix_cache: bool = False
    kv_cache_memory: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require_min("num_prompts", self.num_prompts, 1)
        _check_length("input_len", self.input_len)
        _check_length("output_len", self.output_len)
        _require_min("shared_prefix_len", self.shared_prefix_len, 0)
        if not isinstance(self.max_num_seqs, int):
            raise ValueError("max_num_seqs must be a number in a bench: all engines get the same")
        _require_min("max_num_seqs", self.max_num_seqs, 1)
        SamplingParams(**msgspec.structs.asdict(self.sampling))
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Several scenarios by name, run one after the other.

    Attributes:
        about: one line for people.
        models: names in ``configs/models``. Each scenario runs with all of them in turn, instead of its own.
        attribution: whether to find out where the time of each run on a GPU goes.
    """

    about: str = ""
    scenarios: tuple[str, ...]
    models: tuple[str, ...] = ()
    attribution: bool = False

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ValueError("scenarios is empty: name at least one")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A scenario to run, its name, and what its suite says about it."""

    name: str
    scenario: Scenario
    attribution: bool = False


def configs_dir() -> Path:
    """The folder ``configs``: inside the package if installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_scenarios(names: Sequence[str]) -> list[Chosen]:
    """Scenarios by name. A suite stands for its scenarios.

    Args:
        names: of files in ``configs/bench``, or paths of TOML files.

    Raises:
        FlagError: there is no such file.
        UserError: a file is broken.
    """
    chosen: list[Chosen] = []
    for name in names:
        path = _find(name)
        values = load_toml(path, dict[str, Any])
        if "scenarios" in values:
            chosen += _members(convert(values, Suite, str(path)))
        else:
            chosen.append(Chosen(path.stem, convert(values, Scenario, str(path))))
    return chosen


def adapt(scenario: Scenario, given: Mapping[str, Any]) -> Scenario:
    """The scenario with some fields replaced, those of its sampling included.

    Raises:
        ValueError: an impossible value.
    """
    sampling = {name: value for name, value in given.items() if name in Sampling.__struct_fields__}
    own = {name: value for name, value in given.items() if name not in sampling}
    return msgspec.structs.replace(scenario, sampling=msgspec.structs.replace(scenario.sampling, **sampling), **own)


def _members(suite: Suite) -> Iterator[Chosen]:
    for path in map(_find, suite.scenarios):
        scenario = load_toml(path, Scenario)
        for model in suite.models or (scenario.model,):
            yield Chosen(path.stem, msgspec.structs.replace(scenario, model=model), suite.attribution)


def _find(name: str) -> Path:
    folder = configs_dir() / "bench"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.toml")))
        raise FlagError(f"--scenario {name}: no such scenario or suite; give a .toml file or one of {known}")
    return path


def _check_length(name: str, length: Length) -> None:
    if isinstance(length, Range):
        _require_min(f"{name}.low", length.low, 1)
        _require_min(f"{name}.high", length.high, length.low)
        return
    lengths = (length,) if isinstance(length, int) else length
    if not lengths:
        raise ValueError(f"{name} is empty: give at least one length")
    for each in lengths:
        _require_min(name, each, 1)


def _require_min(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
