"""Debian's archives in this machine's apt sources, and fresh package lists.

The machine's own lists may be old, or may lack an archive that did not answer at the last `apt-get update`. This module
neither reads nor changes them.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUITE = "bookworm"
PATIENCE = 300.0  # seconds for all archives to answer
RETRIES = 5
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def archives() -> list[tuple[str, str]]:
    """(URL, suite) of Debian 12's archives in this machine's apt sources, the release itself first.

    Raises OSError if there is no apt.
    """
    said = _run(["apt-get", "update", "--print-uris"])
    found = re.findall(rf"^'(\S+)/dists/({SUITE}(?:-\w+)*)/InRelease'", said, re.MULTILINE)
    return sorted(set(found), key=lambda each: (len(each[1]), each[1]))


@contextlib.contextmanager
def fresh_lists() -> Iterator[list[str]]:
    """Fetch lists of Debian 12, and remove them at the end. Yields the options that make apt read these lists.

    Raises OSError if this machine's apt does not have Debian 12, or if one of its archives does not answer.
    """
    found = archives()
    if not found:
        raise OSError(f"this machine's apt has no Debian {SUITE}")
    with tempfile.TemporaryDirectory(prefix="apt-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt downloads as a user without rights
        signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
        lines = [f"deb {signed}{url} {suite} main\n" for url, suite in found]
        (folder / "sources.list").write_text("".join(lines))
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        settings = {
            "Dir::Etc::sourcelist": f"{folder}/sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": f"{folder}/lists",
            "Dir::Cache": f"{folder}/cache",
            "APT::Sandbox::User": "",
            "Acquire::Retries": str(RETRIES),
        }
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        _run(["apt-get", *options, "--error-on=any", "-q", "update"])
        yield options


def _run(command: list[str]) -> str:
    """A command's output. Raises OSError with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"`apt-get update` took longer than {PATIENCE:.0f} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(f"`apt-get update` failed: {lines[-1]}")
    return done.stdout
