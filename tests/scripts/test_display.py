"""What an operator sees of a node that does not train yet."""

from __future__ import annotations

import io

from scripts.display import opened, text
from tests.scripts.statuses import status


def test_lines_say_what_a_node_does_when_that_changes() -> None:
    out, found = io.StringIO(), status(phase="waiting")
    (node,) = found["nodes"]
    with opened(False, out) as display:
        for doing in ("importing torch", "importing torch", "importing the script's modules", ""):
            node |= {"doing": doing, "doing_seconds": 4.2 if doing else None}
            display.show(found)
    said = [line.partition("spot-1: ")[2] for line in out.getvalue().splitlines() if "spot-1: " in line]
    assert said == ["importing torch", "importing the script's modules"]


def test_the_picture_shows_what_a_node_does_and_for_how_long() -> None:
    found = status(phase="waiting")
    found["nodes"][0] |= {"doing": "importing torch", "doing_seconds": 4.2}
    assert "importing torch, 4 s" in text(found)
