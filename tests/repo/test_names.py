"""One thing has one name, so that whoever looks for it finds all of it."""

from tests.helpers.checkout import ROOT


def names(folder):
    return {path.stem for path in (ROOT / folder).iterdir() if path.stem != "__init__"}


def test_a_kind_of_mixer_has_one_name():
    """Softmax attention was softmax among mixers, attention among operators and paged_attention among kernels."""
    kinds = {path.parent.name for path in (ROOT / "rosebatch/model/mixers").glob("*/mixer.py")}
    assert len(kinds) >= 4
    assert kinds <= names("rosebatch/ops")
    assert kinds <= names("kernels/rosebatch_kernels")


def test_no_file_is_the_plural_of_its_neighbour():
    """Of block_group.py and block_groups.py nobody knew which has what."""
    files = {path.with_suffix("").as_posix() for path in (ROOT / "rosebatch").rglob("*.py")}
    files |= {path.with_suffix("").as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    assert len(files) > 100
    assert [name for name in files if f"{name}s" in files] == []
