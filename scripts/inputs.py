"""Check the values that an operator types. A refusal says what is allowed. Pure."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from scripts.make_command import make_command
from spotrun.errors import SpotrunError

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_JOB = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_LONGEST = 7 * 86400.0  # seconds
# What each target takes besides CLUSTER and JSON.
TAKES = {
    "plan": (),
    "up": (),
    "train": ("JOB", "FAULTS"),
    "status": ("ID",),
    "follow": ("ID",),
    "logs": ("NODE", "RANK", "ID", "TAIL", "RAW"),
    "ssh": ("NODE",),
    "run": ("CMD", "NODE", "TIMEOUT"),
    "preempt": ("NODE", "NOTICE"),
    "kill": ("NODE",),
    "relaunch": ("ID",),
    "stop": ("ID",),
    "down": ("FORCE", "ALL"),
    "acceptance": ("ALL", "DRY"),
    "image": ("PUBLIC", "PRUNE"),
    "images": ("PRUNE",),
    "lint": ("STRICT",),
    "soak": ("RUNS", "SEED"),
    **dict.fromkeys(("help", "clean", "image-versions", "image-trial"), ()),
    **dict.fromkeys(("test", "test-fast", "test-clouds", "test-gpu", "test-image"), ()),
    **dict.fromkeys(("bench-recovery", "bench-footprint", "bench-synth", "bench-startup"), ()),
}
_COMMON = ("CLUSTER", "JSON")
_KNOWN = tuple(dict.fromkeys(name for names in (*TAKES.values(), _COMMON) for name in names))
_EXAMPLES = {"cluster": "clusters/local.yaml", "job": "examples/digits/job.yaml"}  # options that must not be empty


def variables(environment: Mapping[str, str]) -> None:
    """Raise `SpotrunError` for what make ignores on its command line: a variable that none of its targets takes, and
    a file that is no target.

    `make train JBO=mine.yaml` would train the default job, and `make down clusters/gcp-l4.yaml` take the local cluster
    down. Other names may be meant for the tools that a target starts, and are left alone. environment: SPOTRUN_TARGETS
    and SPOTRUN_TYPED are words from the Makefile; without them, a task was started by `fab`, which checks its options.
    """
    targets = environment.get("SPOTRUN_TARGETS", "").split()
    taken = [name for target in targets for name in TAKES.get(target, ())]
    for word in targets:
        if word not in TAKES and "/.installed" not in word:  # .venv/.installed-dev is a target, too
            raise SpotrunError(f"{word}: is not a target{_meant(word, taken)}")
    for name in environment.get("SPOTRUN_TYPED", "").split():
        if name in taken or name in _COMMON:
            continue
        allowed = list(dict.fromkeys([*taken, *_COMMON]))
        if name in _KNOWN or difflib.get_close_matches(name.upper(), _KNOWN, n=1):
            near = difflib.get_close_matches(name.upper(), allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpotrunError(f"`make {' '.join(targets)}` does not take {name}; it takes {', '.join(allowed)}{hint}")


def _meant(word: str, taken: list[str]) -> str:
    """The variable that a word on make's command line was probably meant for, as a hint."""
    if "/" in word or word.endswith((".yaml", ".yml")):
        name = "JOB" if "JOB" in taken and "cluster" not in word else "CLUSTER"
    else:
        name = next((name for name in ("JOB", "ID", "NODE") if name in taken), "")
    return f"; did you mean {name}={word}?" if name else ""


def typed(options: dict[str, Any]) -> dict[str, Any]:
    """A task's options as they were typed. The Makefile puts a space before each, so that none looks like an option."""
    found = {name: value.removeprefix(" ") if isinstance(value, str) else value for name, value in options.items()}
    for name, value in found.items():
        if isinstance(value, str) and re.search("[\ud800-\udfff\0]", value):
            raise SpotrunError(f"{name.upper()}: {_bytes(value)!r}: is not text in UTF-8")
        if name in _EXAMPLES and not str(value).strip():
            raise SpotrunError(
                f"{name.upper()}: is empty; name a {name} file, such as {name.upper()}={_EXAMPLES[name]}"
            )
    return found


def _bytes(text: str) -> bytes:
    """The bytes that were typed, from which Python made this text."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def node(text: str, file: str) -> str:
    """A node's name. file: the cluster file, for the hint. Raises `SpotrunError`."""
    if not text:
        raise SpotrunError(
            f"NODE is missing: name a node, such as NODE=spot-0; `{make_command(file, 'status')}` lists them"
        )
    if not _NODE.fullmatch(text):
        raise SpotrunError(f"NODE: {text!r}: is no node's name; `{make_command(file, 'status')}` lists them")
    return text


def job(text: str, file: str) -> str | None:
    """A job's id; None if none is given. Raises `SpotrunError`."""
    if text and not _JOB.fullmatch(text):
        raise SpotrunError(f"ID: {text!r}: is no job's id; `{make_command(file, 'status')}` names the newest jobs")
    return text or None


def number(name: str, text: str, least: int = 0) -> str | None:
    """A whole number without leading zeros; None if none is given. Raises `SpotrunError`."""
    if text and (not re.fullmatch("[0-9]{1,9}", text) or int(text) < least):
        raise SpotrunError(f"{name}: {text!r}: allowed: a whole number, at least {least}")
    return str(int(text)) if text else None


def seconds(name: str, text: str, default: float | None = None) -> float:
    """Seconds, more than zero and at most a week; `default` if none are given. Raises `SpotrunError`."""
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST:  # also NaN
        raise SpotrunError(
            f"{name}: {text!r}: allowed: seconds, a number more than 0 and at most {_LONGEST:.0f} (a week)"
        )
    return value


if __name__ == "__main__":  # from the Makefile, for a target without a task
    try:
        variables(os.environ)
    except SpotrunError as error:
        sys.exit(f"spotrun: {error}")
