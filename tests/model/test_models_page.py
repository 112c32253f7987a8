"""docs/models.md has a row for each architecture, and says of it what the registry says."""

from pathlib import Path

from rosebatch.model.registry import ARCHITECTURES
from rosebatch.model.text_parts import WHOLES
from rosebatch.model.vision.registry import OF_FALLBACK, VISIONS
from tests.helpers.families import ENCODERS, FAMILIES, MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_YES = {True: "yes", False: "no"}
_TESTED = "against transformers"
# HP1 has no other implementation.
_OWN = "against a plain one"


def test_the_table_of_families_is_the_registrys():
    """A family that the page leaves out is not found; one that it promises too much of is an error in a run."""
    rows = [
        f"| `{name}` | {a.models} | yes | {_YES[a.fallback]} | {_YES[a.window]} | {_YES[a.experts]} | "
        f"{', '.join(f'`{name}`' for name in sorted({form.architecture for form in a.gguf})) or 'no'} | "
        f"{_OWN if a.model_type == 'hp1' else _TESTED} |"
        for name, a in ARCHITECTURES.items()
    ]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("| `") and line.split("`")[1] in ARCHITECTURES]
    assert sorted(found) == sorted(rows)


def test_every_architecture_is_compared_with_transformers():
    """What the last column says: a family without such a test may give wrong tokens."""
    import transformers

    kinds = {kind for kind, _ in (*MODELS.values(), *FAMILIES.values(), *ENCODERS.values())} - {"HP1"}
    # Alibaba-NLP's form of GTE is in test_encoders.py.
    tested = {"hp1", "new", *(getattr(transformers, kind).model_type for kind in kinds)}
    assert tested == {a.model_type for a in ARCHITECTURES.values()}


def test_the_table_of_models_with_a_text_part():
    """As above, of the models whose text part alone is served."""
    rows = [f"| `{name}` | {whole.models} | `{whole.text_type}` |" for name, whole in WHOLES.items()]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `") and line.split("`")[1] in WHOLES] == rows


def test_the_table_of_models_that_see():
    """As above, of those whose images are served. Of some classes not all models are, so the page has its own words."""
    lines = PAGE.with_name("images.md").read_text(encoding="utf-8").splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(name for name in named if name in WHOLES | OF_FALLBACK) == sorted({*VISIONS, *OF_FALLBACK})
