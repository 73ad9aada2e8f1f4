"""Every event that can be in `--events` is explained in docs/report-and-events.md, and nothing else is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAID = [
    (("runtime",), r"(?:\bemit|\bgeneration)\(\s*(?:event=)?\"([a-z_]+)\""),
    (("master",), r"TellStory\(\s*event=\"([a-z_]+)\""),
    (("runner.py", "cluster"), r"\"event\": \"([a-z_]+)\""),
    (("cluster",), r"self\._say\(\s*\"([a-z_]+)\""),
    (("runtime/nursery.py",), r"\"([a-z]+_(?:started|exited))\""),
]


def said() -> set[str]:
    found: set[str] = set()
    for places, pattern in SAID:
        for place in places:
            path = ROOT / "src" / "concertina" / place
            for file in [path] if path.is_file() else sorted(path.glob("*.py")):
                found |= set(re.findall(pattern, file.read_text()))
    return found


def explained() -> set[str]:
    page = (ROOT / "docs" / "report-and-events.md").read_text().partition("## Events")[2]
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {name for first in firsts for name in re.findall(r"`([a-z_]+)`", first)}


def test_the_page_explains_every_event_and_no_other() -> None:
    assert explained() == said()
    assert len(said()) > 30
