"""What reaches a terminal has no escape sequences and no control characters; and JSON has no NaN."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invoke.context import Context
from rich.console import Console

import fabfile
from scripts import console, display, report
from spotrun import cli, text
from spotrun.errors import SpotrunError
from spotrun.head.server import ctl
from spotrun.store import log_key
from tests.fakes.cluster import machines
from tests.scripts.statuses import FAILURE, status

ROOT = Path(__file__).parents[2]
# Clears the screen, sets the title, forges a line, writes backwards, and what looks like rich's markup.
EVIL = "\x1b[2J\x1b]0;title\x07a\x9b31mb\x1bPq\x1b\\c\u202ed\x00\x7f[red]e[/red]\r\n05:00:00 job f"
PLAIN = "abcd[red]e[/red]"
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_sequences_go_as_a_whole() -> None:
    assert text.clean(EVIL) == f"{PLAIN}\n05:00:00 job f"
    assert text.line(EVIL) == f"{PLAIN} 05:00:00 job f"
    assert text.clean("a\tb\nc\rd\r\ne") == "a\tb\nc\nd\ne"
    assert text.clean("\x1b]8;;never closed") == "8;;never closed"
    assert text.clean("\x1b(B\x1b=x\x1b") == "x"
    assert text.clean("x\ud800y") == "x\ufffdy"
    assert text.clean("naïve 漢字 🎉") == "naïve 漢字 🎉"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b\x9b[]0;m\x07\\\r\n\u202e")))
def test_nothing_else_is_left(given: str) -> None:
    found = text.clean(given)
    assert not BAD.search(found)
    assert not {unicodedata.bidirectional(each) for each in found} & {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI"}
    assert text.clean(found) == found
    assert "\n" not in text.line(given)
    found.encode()


def test_a_long_text_of_openings_takes_no_time() -> None:
    """Not the square of its length: a log may be made for that."""
    for opening in ("\x1b[", "\x1b]", "\x1b[1", "\x9d", "\x1b   "):
        assert len(text.clean(opening * 500_000)) <= 500_000 * len(opening)


def evil_status() -> dict[str, object]:
    document = status(
        phase="failed", reason=EVIL, name=EVIL, members=[EVIL], metrics={EVIL: 1.0}, ended=120.0,
        failure={**FAILURE, "message": EVIL, "node": EVIL, "traceback": f"Traceback\n  {EVIL}\n", "stacks": EVIL},
        interruptions=[{"kind": EVIL, "node": EVIL, "seconds": 0.1, "steps_lost": 0, "at": 1.0, "generation": 1}],
    )  # fmt: skip
    document["cluster"] = EVIL
    document["events"] = [{"at": 100.0, "kind": "node", "text": EVIL}]
    document["pools"][0] |= {"name": EVIL, "problem": EVIL}
    document["nodes"][0] |= dict.fromkeys(("name", "pool", "zone", "address", "state", "phase"), EVIL)
    return document


def test_what_machines_say_is_clean_wherever_it_is_shown() -> None:
    document = evil_status()
    plain = io.StringIO()
    with display.opened(False, plain) as view:
        view.show(document)
        view.say(EVIL)
    jobs = [{"job": EVIL, "phase": EVIL}, {"id": EVIL, "phase": EVIL, "group": EVIL, "reason": EVIL}]
    shown = display.text({**document, "jobs": jobs}, jobs)
    told = report.report(document["job"])  # type: ignore[arg-type]
    for out in (plain.getvalue(), shown, told):
        assert not BAD.search(out)
        assert "[red]e[/red]" in out, "what looks like markup is text"
    assert f"rank 1 on {PLAIN} 05:00:00 job f: {PLAIN} 05:00:00 job f\n" in told
    assert len([line for line in plain.getvalue().splitlines() if line.startswith("05:00:00 job f")]) == 1, "say's own"


def test_the_live_display_draws_itself_only() -> None:
    out = io.StringIO()
    view = display.Terminal(Console(file=out, force_terminal=True, width=120, markup=False, emoji=False))
    with view.live:
        view.show(evil_status())
        view.say(EVIL)
    for bad in ("\x1b[2J", "\x1b]0;", "\x9b", "\x1bP", "\u202e", "\x07"):
        assert bad not in out.getvalue()
    assert "[red]e[/red]" in out.getvalue()


def test_the_console_cleans(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(EVIL)
    console.warn(EVIL)
    out, err = capsys.readouterr()
    assert out == err == f"{PLAIN}\n05:00:00 job f\n"
    console.say(EVIL, raw=True)
    assert capsys.readouterr().out == EVIL + "\n"
    latin = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console.say("naïve", latin)
    latin.seek(0)
    assert latin.read() == "na?ve\n"


def test_the_command_on_machines_cleans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise SpotrunError(EVIL)

    monkeypatch.setattr(ctl, "control_path", refuse)
    assert cli.main(["ctl", "status"]) == 2
    assert not BAD.search(capsys.readouterr().err)


def test_there_is_one_door() -> None:
    """Only scripts.console prints; and stacks, of itself."""
    for path in [*ROOT.glob("scripts/*.py"), ROOT / "fabfile.py"]:
        if path.name not in ("console.py", "stacks.py"):
            assert not re.search(r"(?<!paper\.)(?<!console\.)\bprint\(", path.read_text()), path


JSON = st.recursive(
    st.none() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(JSON)
def test_json_is_json(value: object) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = text.to_json(value)
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)


def test_a_log_is_clean_unless_it_is_wanted_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with machines(tmp_path) as standin:
        monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
        standin.store.put(log_key("toy-1", 1, "spot-1", 0), EVIL.encode())
        logs = fabfile.logs.body
        logs(Context(), cluster=str(standin.cluster), id="toy-1")
        assert capsys.readouterr().out == f"generation 1, spot-1, rank 0:\n{PLAIN}\n05:00:00 job f\n"
        logs(Context(), cluster=str(standin.cluster), id="toy-1", raw=True)
        assert capsys.readouterr().out == f"generation 1, spot-1, rank 0:\n{EVIL}\n"
        logs(Context(), cluster=str(standin.cluster), id="toy-1", json=True)
        assert json.loads(capsys.readouterr().out)["text"] == EVIL
