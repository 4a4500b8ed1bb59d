"""The one door by which text reaches an operator's terminal: what came from machines has no control characters then."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from spotrun.text import clean, to_json


def say(text: str, out: TextIO | None = None, raw: bool = False, end: str = "\n") -> None:
    """Print text for a person. A terminal that lacks a character shows a `?` for it.

    out: stdout unless it is given. raw: leave control characters in, as the person asked.
    """
    out = out or sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    fit = text if raw else clean(text)
    print(fit.encode(encoding, "replace").decode(encoding), file=out, flush=True, end=end)


def warn(text: str) -> None:
    """Tell a person something beside the answer: on stderr."""
    say(text, sys.stderr)


def answer(value: Any, out: TextIO | None = None) -> None:
    """Print a line of JSON for a program."""
    print(to_json(value), file=out or sys.stdout, flush=True)
