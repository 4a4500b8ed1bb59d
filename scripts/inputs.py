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
from spotrun.spec.fields import INTERVAL, PRIORITY, parse_duration

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_JOB = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_GROUP = re.compile(r"[a-z][a-z0-9-]{0,39}")
_LONGEST = 7 * 86400.0  # seconds
# What each target takes besides CLUSTER and JSON.
TAKES = {
    "plan": (),
    "up": (),
    "train": ("JOB", "FAULTS"),
    "jobs": (),
    "status": ("ID",),
    "cost": ("ID", "MONTH", "GROUP"),
    "advise": ("JOB", "MEASURE", "RATE", "OUT"),
    "follow": ("ID", "GROUP"),
    "dashboard": ("PORT",),
    "logs": ("NODE", "RANK", "ID", "TAIL", "RAW", "GREP", "SINCE", "GEN", "FOLLOW"),
    "stacks": ("ID", "NODE"),
    "profile": ("ID", "STEPS", "RANK", "NODE"),
    "runs": ("WHERE", "SORT"),
    **dict.fromkeys(("show", "rerun"), ("ID",)),
    "diff": ("A", "B"),
    "tag": ("ID", "TAG"),
    "note": ("ID", "TEXT"),
    "rm": ("ID", "FORCE"),
    "export": ("ID", "TO", "OUT"),
    "tensorboard": ("ID", "GROUP", "PORT"),
    "ssh": ("NODE",),
    "run": ("CMD", "NODE", "TIMEOUT"),
    "preempt": ("NODE", "NOTICE"),
    "kill": ("NODE",),
    "relaunch": ("ID",),
    "stop": ("ID", "GROUP"),
    **dict.fromkeys(("pause", "resume"), ("ID",)),
    **dict.fromkeys(("priority", "budget"), ("ID", "TO")),
    "simulate": ("JOB", "TRACES", "POLARITY", "RUNS", "SEED"),
    "down": ("FORCE", "ALL"),
    "acceptance": ("ALL", "DRY"),
    "image": ("PUBLIC", "PRUNE"),
    "images": ("PRUNE",),
    "lint": ("STRICT",),
    "soak": ("RUNS", "SEED"),
    **dict.fromkeys(("help", "clean", "image-versions", "image-trial"), ()),
    **dict.fromkeys(("test", "test-fast", "test-clouds", "test-gpu", "test-image"), ()),
    **dict.fromkeys(("bench-recovery", "bench-overhead", "bench-footprint", "bench-synth", "bench-startup"), ()),
    **dict.fromkeys(
        ("bench-snapshots", "bench-transfer", "bench-jobs", "bench-scale", "bench-capacity", "bench-metrics"), ()
    ),
    **dict.fromkeys(("bench-dashboard", "bench-gpu"), ()),
}
_COMMON = ("CLUSTER", "JSON")
_KNOWN = tuple(dict.fromkeys(name for names in (*TAKES.values(), _COMMON) for name in names))
# Without ID and GROUP, these change the only job.
_CHANGES = ("stop", "pause", "resume", "priority", "budget", "relaunch")
_EXAMPLES = {"cluster": "clusters/local.yaml", "job": "examples/digits/job.yaml"}  # options that must not be empty


def variables(environment: Mapping[str, str]) -> None:
    """Raise `SpotrunError` for words that make itself would ignore: a misspelt variable, a file that is not a target.

    Otherwise `make train JBO=mine.yaml` would train the default job, and `make down clusters/gcp-l4.yaml` would take
    the local cluster down. A name that resembles none of ours passes: it may be meant for a tool that a target starts.
    environment: the Makefile puts the words into SPOTRUN_TARGETS and SPOTRUN_TYPED. Without them, `fab` started the
    task and has checked its options.
    """
    targets = environment.get("SPOTRUN_TARGETS", "").split()
    taken = [name for target in targets for name in TAKES.get(target, ())]
    for word in targets:
        if word not in TAKES and "/.installed" not in word:  # .venv/.installed-dev is a target, too
            raise SpotrunError(f"{word}: is not a target{_meant(word, taken)}")
    for name in environment.get("SPOTRUN_TYPED", "").split():
        if name in taken or name in _COMMON:
            _full(name, targets, environment)
            continue
        allowed = list(dict.fromkeys([*taken, *_COMMON]))
        if name in _KNOWN or difflib.get_close_matches(name.upper(), _KNOWN, n=1):
            near = difflib.get_close_matches(name.upper(), allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpotrunError(f"`make {' '.join(targets)}` does not take {name}; it takes {', '.join(allowed)}{hint}")


def _full(name: str, targets: list[str], environment: Mapping[str, str]) -> None:
    """Raise `SpotrunError` for an empty ID or GROUP: `make stop ID=$UNSET` would stop the only job."""
    if name in ("ID", "GROUP") and not environment.get(name, "").strip() and not {*_CHANGES}.isdisjoint(targets):
        what = "job" if name == "ID" else "group"
        raise SpotrunError(
            f"{name} is empty; name a {what}, or leave {name} out: then the only job that has not ended is meant"
        )


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
        raise SpotrunError(f"NODE: {text!r}: is not a node's name; `{make_command(file, 'status')}` lists them")
    return text


def job(text: str, file: str) -> str | None:
    """A job's id; None if none is given. Raises `SpotrunError`."""
    if text and not _JOB.fullmatch(text):
        raise SpotrunError(f"ID: {text!r}: is not a job's id; `{make_command(file, 'status')}` names the newest jobs")
    return text or None


def run(name: str, text: str, file: str) -> str:
    """A run's id, which must be given. name: the variable. Raises `SpotrunError`."""
    if not text:
        raise SpotrunError(f"{name} is missing: name a run; `{make_command(file, 'runs')}` lists them")
    if not _JOB.fullmatch(text):
        raise SpotrunError(f"{name}: {text!r}: is not a run's id; `{make_command(file, 'runs')}` lists them")
    return text


def several(name: str, text: str, file: str) -> list[str]:
    """The ids of runs, with commas or spaces between them. Raises `SpotrunError`."""
    return [run(name, each, file) for each in re.split(r"[,\s]+", text.strip()) if each]


def group(text: str, job: str, file: str) -> str | None:
    """A group's name; None if none is given. job: the ID that is given. Raises `SpotrunError`."""
    if text and job:
        raise SpotrunError(f"GROUP and ID: give one of them: a group of jobs ({text}), or one job ({job})")
    if text and not _GROUP.fullmatch(text):
        raise SpotrunError(f"GROUP: {text!r}: is not a group's name; `{make_command(file, 'jobs')}` lists the groups")
    return text or None


def interval(name: str, text: str) -> float | None:
    """As `seconds`; None if none are given. Raises `SpotrunError`."""
    return seconds(name, text) if text else None


def rate(text: str) -> float | None:
    """Samples per second; None if none are given. Raises `SpotrunError`."""
    if text and not (re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) and float(text) > 0):
        raise SpotrunError(f"RATE: {text!r}: allowed: samples per second of one machine, a number more than zero")
    return float(text) if text else None


def month(text: str) -> str:
    """A month; empty if none is given. Raises `SpotrunError`."""
    if text and not re.fullmatch("[0-9]{4}-(0[1-9]|1[0-2])", text):
        raise SpotrunError(f"MONTH: {text!r}: is not a month; allowed: a year and a month, such as 2026-11")
    return text


def priority(text: str) -> int:
    """A job's priority. Raises `SpotrunError`."""
    allowed = f"a whole number from {-PRIORITY} to {PRIORITY}"
    if not text:
        raise SpotrunError(f"TO is missing: give the job's new priority, such as TO=10; allowed: {allowed}")
    if not re.fullmatch("-?[0-9]{1,9}", text) or abs(int(text)) > PRIORITY:
        raise SpotrunError(f"TO: {text!r}: allowed: {allowed}")
    return int(text)


def budget(text: str) -> float:
    """What a job may cost, in USD. Raises `SpotrunError`."""
    allowed = "dollars, a number more than zero"
    if not text:
        raise SpotrunError(f"TO is missing: give what the job may cost in all, such as TO=250; allowed: {allowed}")
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text) > 0:
        raise SpotrunError(f"TO: {text!r}: allowed: {allowed}")
    return float(text)


def number(name: str, text: str, least: int = 0, most: int = 10**9) -> str | None:
    """A whole number without leading zeros; None if none is given. Raises `SpotrunError`."""
    if text and (not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most):
        allowed = f", at least {least}" if most == 10**9 else f" from {least} to {most}"
        raise SpotrunError(f"{name}: {text!r}: allowed: a whole number{allowed}")
    return str(int(text)) if text else None


def seconds(name: str, text: str, default: float | None = None) -> float:
    """Seconds, also as 90s or 2m, at most a week; `default` if none are given. Raises `SpotrunError`."""
    if not text and default is not None:
        return default
    try:
        value = parse_duration(text if text[-1:].isalpha() else float(text))
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST:  # also NaN
        raise SpotrunError(f"{name}: {text!r}: allowed: {INTERVAL} and at most a week")
    return value


if __name__ == "__main__":  # from the Makefile, for a target without a task
    try:
        variables(os.environ)
    except SpotrunError as error:
        sys.exit(f"spotrun: {error}")
