"""What README, CONTRIBUTING and docs/ point at is there: files, headings, and every module in its table."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Its headings, as links name them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    found = []
    for link in (first or second for first, second in LINK.findall(CODE.sub("", page.read_text()))):
        where, _, anchor = link.partition("#")
        target = page.parent / where if where else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("folder", ["runtime", "master", "cluster"])
def test_the_architecture_has_every_module_of_a_folder_in_a_table(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for first in firsts for name in re.findall(r"`(\w+\.py)`", first)}
    there = {path.name for path in (ROOT / "src" / "concertina" / folder).glob("*.py")}
    assert there - named == {"__init__.py"}
    assert named <= {path.name for path in (ROOT / "src" / "concertina").rglob("*.py")}
