"""What the interpreter accepts, the compiler may refuse: names that change type, numbers that become constants."""

from importlib import import_module
from pkgutil import walk_packages

import pytest

import rosebatch_kernels
from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY, Device
from tests.kernels import compile_record
from tests.kernels.compile_tasks import ALIKE, CONSUMER_BLACKWELL, TASKS, kernels_of

pytest.importorskip("triton")

# Products of many rows on Hopper's own instruction, which Triton leaves for others without a word.
WGMMA = {
    "_attend_fresh", "_attend_prefix", "_attend_shared", "_bidirectional_attend", "_channel_walk",
    "_decode_latents_hopper", "_delta_solve", "_delta_walk", "_expert_product", "_fp8_product", "_gated_attend_shared",
    "_gated_prefill", "_gated_product", "_int4_product", "_logits", "_prefill", "_prefill_hopper", "_prefill_shared",
    "_product",
}  # fmt: skip


# A few kernels are compiled in each run, for each architecture.
SAMPLE = [
    (86, "attention", "_prefill"),
    (89, "experts_of_fp8", "_quantize"),
    (HOPPER, "layers", "_logits"),
    (100, "layers", "_logits"),
    (103, "fp8", "_quantize"),
    (CONSUMER_BLACKWELL, "attention", "_prefill"),
]


@pytest.fixture(scope="module")
def recorded():
    return compile_record.read()


@pytest.fixture(scope="module")
def compiler_for():
    with compile_record.compilers() as compiler_for:
        yield compiler_for


def of_task(kernels, arch, group, version):
    return [each for each in kernels if (each.arch, each.group, each.triton) == (arch, group, version)]


@pytest.mark.whole
@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "group"), TASKS)
def test_kernels_compile_and_fit(compiler_for, recorded, arch, group):
    """On a card with less shared memory a launch failed; below Hopper there is no start before the predecessor ends.

    A form of each kernel in bf16 is compiled to the end, and for Hopper one of each dtype, but systems of the delta
    rule in fp32. The rest goes through Triton's own passes, in 16 bits for Hopper and for 86, or until the shared
    memory is known. A failure behind these points which another form of the kernel alone would bring out is not seen.
    For 120, a form is taken for each set of dtypes: see ``OTHERS``.

    Kernels of the record were compiled before: see ``compile_record.py``.
    """
    kernels = compiler_for(arch).kernels(arch, group, recorded)
    names = kernels_of(arch, group)
    assert {each.name for each in kernels} == names
    assert max(each.shared for each in kernels) <= SHARED_MEMORY[arch]
    if arch == HOPPER:
        assert {each.name for each in kernels if each.wgmma} >= WGMMA & names
        if group == "experts_of_fp8":
            assert all(each.wgmma == each.forms for each in kernels if each.name == "_expert_product")
    # All are there, or none is: by another Triton than CI has.
    before = of_task(recorded, arch, group, kernels[0].triton)
    assert before in ([], kernels), "'make compiled' brings the record up to date"


@pytest.mark.whole
@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "group", "name"), SAMPLE)
def test_the_compiler_finds_what_is_recorded(compiler_for, recorded, arch, group, name):
    """Of a record that is wrong, or a compiler that compiles nothing, no other test would tell."""
    rest = [each for each in recorded if each.name != name]
    (again,) = [each for each in compiler_for(arch).kernels(arch, group, rest) if each.name == name]
    before = of_task(recorded, arch, group, again.triton)
    assert not before or again in before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("group", "name"),
    [("prompts_on_hopper", "_prefill_hopper"), ("latents_on_hopper", "_decode_latents_hopper")],
)
def test_gluon_of_the_installed_triton(compiler_for, recorded, group, name):
    """Names and arguments of Gluon, which is experimental, change from version to version."""
    kernels = compiler_for(None).kernels(HOPPER, group, recorded)
    (own,) = [each for each in kernels if each.name == name]
    assert own.wgmma == own.forms
    assert max(each.shared for each in kernels) <= SHARED_MEMORY[HOPPER]
    assert of_task(recorded, HOPPER, group, own.triton) in ([], kernels)


@pytest.mark.whole
@pytest.mark.parametrize(("arch", "other"), [*ALIKE.items(), (CONSUMER_BLACKWELL, 86)])
def test_architectures_that_are_alike(arch, other):
    """Sizes or launches of its own were compiled for nobody. Triton's passes go by the generation.

    For 120, the launches are compiled once for each set of dtypes.
    """
    one, two = (Device.of_arch(each, 100) for each in (arch, other))
    # FlashInfer's module needs its package, and has no sizes.
    for name in (each.name for each in walk_packages(rosebatch_kernels.__path__, "rosebatch_kernels.")):
        table = None if name.endswith(".flashinfer") else getattr(import_module(name), "SIZES", None)
        assert table is None or table.of(one) == table.of(two), name
    assert one.shared_memory >= two.shared_memory
    if arch != CONSUMER_BLACKWELL:
        assert arch // 10 == other // 10
        assert (one.pdl, one.tma) == (two.pdl, two.tma)
