"""Refuse a commit subject that is too long: `python -m scripts.commits`. Part of `make lint`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts import console

LONGEST = 72  # characters of a subject: more of them wrap in `git log` on a terminal


def too_long(repository: Path) -> list[str]:
    """The new commits of the checked-out branch whose subjects are too long: short hash and subject."""
    subjects = _git(repository, "log", "--no-merges", "--format=%h %s", *_new(repository)) or ""
    return [line for line in subjects.splitlines() if len(line.partition(" ")[2]) > LONGEST]


def _new(repository: Path) -> list[str]:
    """The commits that are not in origin/main, or in main. Only the newest one if the clone has neither of them."""
    head = _git(repository, "rev-parse", "--verify", "--quiet", "HEAD")
    if head is None:
        return ["-0"]  # no repository, or one without a commit
    shallow = _git(repository, "rev-parse", "--is-shallow-repository") == "true"
    for base in () if shallow else ("refs/remotes/origin/main", "refs/heads/main"):
        known = _git(repository, "rev-parse", "--verify", "--quiet", base)
        if known is not None and (known != head or "remotes" in base):
            return [f"{base}..HEAD"]
    return ["-1"]


def _git(repository: Path, *words: str) -> str | None:
    """What git prints. None if it fails, or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    found = too_long(Path.cwd())
    for line in found:
        console.warn(f"commit {line}: the subject is longer than {LONGEST} characters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
