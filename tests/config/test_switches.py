"""Switches: defaults by device, and what a device cannot serve."""

import dataclasses

import pytest

from rosebatch.config.switches import Switches, hidden_by, hiding, is_on, missing, without_effect
from rosebatch.core.errors import FlagError, UserError

FIELDS = dataclasses.fields(Switches)
NAMES = [field.name for field in FIELDS]


def served(field, device):
    return device in field.metadata["devices"]


@pytest.mark.parametrize("field", FIELDS, ids=NAMES)
def test_every_switch_is_described_and_on_by_default(field):
    assert field.type in (bool, "bool")
    # On a GPU, these are not measured yet.
    off = {"cuda"} if field.name in ("swap", "batch_invariant") else set()
    assert set(field.metadata["on"]) == set(field.metadata["devices"]) - off
    assert field.default is bool(field.metadata["on"])
    assert field.metadata["help"].endswith(".")
    assert set(field.metadata["devices"]) <= {"cpu", "cuda"}
    assert field.metadata["devices"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("requested", [{}, dict.fromkeys(NAMES)])
def test_defaults_are_on_where_the_device_serves_them(device, requested):
    switches = Switches.resolve(requested, device)
    assert dataclasses.asdict(switches) == {field.name: is_on(field, device) for field in FIELDS}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_off_is_always_possible_and_touches_no_other(device, name):
    switches = dataclasses.asdict(Switches.resolve({name: False}, device))
    assert switches == {field.name: is_on(field, device) and field.name != name for field in FIELDS}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("field", FIELDS, ids=NAMES)
def test_on_by_name_is_an_error_where_it_has_no_meaning(device, field):
    """Silence would let an A/B run compare a thing with itself."""
    if served(field, device):
        assert getattr(Switches.resolve({field.name: True}, device), field.name) is True
        return
    with pytest.raises(FlagError, match=f"^--{field.name.replace('_', '-')} has no meaning on {device}"):
        Switches.resolve({field.name: True}, device)


def test_some_switch_is_not_served_everywhere():
    """Else the error above is never tried."""
    assert any(len(field.metadata["devices"]) == 1 for field in FIELDS)
    assert issubclass(FlagError, UserError)


@pytest.mark.parametrize("field", FIELDS, ids=NAMES)
def test_what_hides_a_switch_is_another_one(field):
    """A misspelt name would hide nothing, and a comparison would time the same code twice."""
    for device in ("cpu", "cuda"):
        hiding = hidden_by(field.name, device)
        assert field.name not in hiding
        assert all(getattr(Switches.resolve({name: True}, device), name) for name in hiding)
    assert set(field.metadata["hidden_by"]) <= set(NAMES)


def test_hidden_switches():
    """Only by switches that the device has."""
    assert hidden_by("batched_sampling", "cuda") == ["fused_sampler"]
    assert hidden_by("batched_sampling", "cpu") == []
    assert hidden_by("prefix_cache", "cuda") == []


def test_what_a_switch_needs_is_another_one():
    """Without cycles, or ``missing`` would never end; a device that has the switch has what it needs."""
    for field in FIELDS:
        assert set(field.metadata["needs"]) <= set(NAMES[: NAMES.index(field.name)])
        for device in field.metadata["devices"]:
            assert missing(field.name, Switches.resolve({}, device)) == ""


@pytest.mark.parametrize(
    ("requested", "sentences"),
    [
        ({}, []),
        ({"fused_sampler": False, "prefix_cache": True, "fused_rotary": None}, []),
        ({"batched_sampling": False}, ["--no-batched-sampling has no effect while --fused-sampler is on"]),
        ({"batched_sampling": True}, ["--batched-sampling has no effect while --fused-sampler is on"]),
        ({"batched_sampling": False, "fused_sampler": False}, []),
        ({"batched_sampling": False, "paged_attention": False}, []),
        ({"batched_kv_append": False}, ["--no-batched-kv-append has no effect while --fused-rotary is on"]),
        (
            {"batched_kv_append": False, "fused_rotary": False},
            ["--no-batched-kv-append has no effect in decode steps while --fused-kv-append is on"],
        ),
        ({"batched_kv_append": False, "fused_rotary": False, "fused_kv_append": False}, []),
        ({"fused_qk_norm": False, "fused_rotary": False}, ["--no-fused-qk-norm has no effect with --no-fused-rotary"]),
        (
            {"paged_attention": False, "fused_qk_norm": False, "cuda_graph": True},
            [
                "--cuda-graph has no effect with --no-paged-attention",
                "--no-fused-qk-norm has no effect with --no-paged-attention",
            ],
        ),
    ],
)
def test_a_switch_without_effect_is_named(requested, sentences):
    """``--no-batched-sampling`` changed nothing on a GPU, and nobody was told."""
    assert without_effect(requested, Switches.resolve(requested, "cuda"), "cuda") == sentences


def test_on_a_cpu_no_switch_hides_another():
    """Switches that it does not have are off, which is no reason for anything."""
    requested = dict.fromkeys(NAMES, False)
    assert without_effect(requested, Switches.resolve(requested, "cpu"), "cpu") == []
    assert hiding("batched_sampling", Switches.resolve({}, "cpu")) == {}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Switches().prefix_cache = False
