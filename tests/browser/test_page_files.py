"""The files of the page. Colours can be read, in both themes (WCAG 2: 4.5 to 1 for text, 3 to 1 for what is drawn)."""

import re
from importlib import resources

import pytest

PAGE = resources.files("concertina.server") / "page"
TEXT = [(ink, ground) for ink in ("ink", "faint", "accent", "good", "warn", "bad") for ground in ("ground", "raised")]
TEXT += [("ink", "sunken"), ("faint", "sunken"), ("accent", "accent-soft"), ("on-accent", "accent")]
TEXT += [("good", "good-soft"), ("bad", "bad-soft"), ("ground", "ink")]
DRAWN = [("edge", "ground"), ("edge", "raised"), ("accent", "sunken")]


def themes() -> dict[str, dict[str, str]]:
    """Colour by name, for each theme."""
    style = (PAGE / "tokens.css").read_text("utf-8")
    light, dark = style.split(':root[data-theme="dark"]')
    found = {"light": dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", light))}
    found["dark"] = found["light"] | dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", dark))
    return found


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_pair_of_colours_can_be_told_apart(theme: str) -> None:
    colours = themes()[theme]
    weak = {
        f"{ink} on {ground}": round(contrast(colours[ink], colours[ground]), 2)
        for pairs, least in ((TEXT, 4.5), (DRAWN, 3.0))
        for ink, ground in pairs
        if contrast(colours[ink], colours[ground]) < least
    }
    assert weak == {}


def test_no_file_of_the_page_names_another_host() -> None:
    addresses = {
        (file.name, address)
        for file in PAGE.iterdir()
        for address in re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", file.read_text("utf-8"))
    }
    assert addresses <= {("mark.svg", "http://www.w3.org/2000/svg")}  # a name, not an address


def test_the_page_asks_for_each_of_its_modules_at_once() -> None:
    index = (PAGE / "index.html").read_text("utf-8")
    there = {file.name for file in PAGE.iterdir() if file.name.endswith(".js")}
    assert set(re.findall(r'(?:src|href)="static/([a-z]+\.js)"', index)) == there
