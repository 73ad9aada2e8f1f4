"""What README, CONTRIBUTING and docs/ speak of is there: files, headings, commands with their options, and modules."""

import re
from pathlib import Path

import pytest
import typer

from concertina.cli import app

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


def calls(page: Path) -> list[list[str]]:
    """What stands behind `concertina` in code, up to the script; what follows may be the script's own."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line.partition("#")[0] for block in CODE.findall(text) for line in block.splitlines()]
    code = [*lines, *re.findall(r"`([^`\n]+)`", CODE.sub("", text))]
    found = [re.match(r"\s*(?:\$ )?concertina ([a-z].*)", line) for line in code]
    return [match[1].partition(".py")[0].split() for match in found if match]


def wrong_options(call: list[str]) -> list[str]:
    command, words = typer.main.get_command(app), list(call)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    options = [word.strip("[]").partition("=")[0] for word in words if re.match(r"\[?--?[a-z]", word)]
    return [option for option in options if option not in known | {"--help"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_of_a_command_in_a_page_exists(page: Path) -> None:
    assert [(call, wrong) for call in calls(page) if (wrong := wrong_options(call))] == []


@pytest.mark.parametrize("folder", ["runtime", "master", "cluster"])
def test_the_architecture_has_every_module_of_a_folder_in_a_table(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for first in firsts for name in re.findall(r"`(\w+\.py)`", first)}
    there = {path.name for path in (ROOT / "src" / "concertina" / folder).glob("*.py")}
    assert there - named == {"__init__.py"}
    assert named <= {path.name for path in (ROOT / "src" / "concertina").rglob("*.py")}
