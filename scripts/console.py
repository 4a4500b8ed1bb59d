"""All text for an operator's terminal is printed here. Control characters in it are removed."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO

from spotrun.text import clean, to_json


def say(text: str, out: TextIO | None = None, raw: bool = False, end: str = "\n") -> None:
    """Print text for a person. A character that the terminal cannot show becomes a `?`.

    out: stdout by default. raw: keep control characters, because the person asked for them.
    """
    out = out or sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    fit = text if raw else clean(text)
    print(fit.encode(encoding, "replace").decode(encoding), file=out, flush=True, end=end)


def warn(text: str) -> None:
    """Print text for a person on stderr: it is not part of the answer. So nothing fails if it cannot be printed."""
    with contextlib.suppress(OSError):  # the terminal is gone, or Ctrl-C has ended `tee` too
        say(text, sys.stderr)


def answer(value: Any, out: TextIO | None = None) -> None:
    """Print a line of JSON for a program."""
    print(to_json(value), file=out or sys.stdout, flush=True)
