"""What the pages point to is there: a file that moved left its readers in a place that was gone."""

import re

import pytest

from tests.helpers.checkout import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for name in ("rosebatch", "kernels", "benchmarks", "tests") for path in (ROOT / name).rglob("*")]
PLACES = [f"/{path.relative_to(ROOT).as_posix()}" for path in SOURCES]


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        if "://" not in target and not (other.exists() and (not anchor or anchor in anchors(other))):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_code_have_the_names_of_the_pages(page):
    """``a.py``, ``b/a.py``, and in the pages for developers folders such as ``b/c/``."""
    ends = r"(?:\.py|/)" if page.name in ("architecture.md", "CONTRIBUTING.md") else r"\.py"
    named = set(re.findall(rf"`([\w./]+{ends})`", page.read_text(encoding="utf-8")))
    missing = {name for name in named if not any(place.endswith(f"/{name.rstrip('/')}") for place in PLACES)}
    assert [name for name in sorted(missing) if not (ROOT / name).exists()] == []
