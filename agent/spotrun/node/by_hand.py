"""A file for a shell, with which a person runs a job's script as a worker did."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

# The script runs alone: the other workers have ended. Port 0 is any free port.
_ALONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
# Variables of the agent and its service, and of the person's own shell (systemd.exec(5), sd_notify(3)).
# The file leaves them out.
_OTHERS = re.compile(
    "SPOTRUN_(?!RESTARTS$).*|NOTIFY_SOCKET|WATCHDOG_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|LISTEN_.*"
    "|(STATE|RUNTIME|CACHE|LOGS|CONFIGURATION|CREDENTIALS)_DIRECTORY|MEMORY_PRESSURE_.*"
    "|USER|LOGNAME|SHELL|TERM|PWD|OLDPWD|SHLVL|_|SSH_.*"
)
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def write(path: Path, env: Mapping[str, str]) -> None:
    """Write the file, which only this user can read. env: the environment of a worker. Raises OSError."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text(env, Path(sys.executable).parent))
    new.replace(path)


def text(env: Mapping[str, str], programs: Path) -> str:
    """The content of the file. programs: the folder of the workers' `python`."""
    known = {name: value for name, value in env.items() if _NAME.fullmatch(name) and not _OTHERS.fullmatch(name)}
    found = {**known, **_ALONE, "PATH": os.pathsep.join([str(programs), env.get("PATH", os.defpath)])}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(found.items())]
    return "\n".join(["# The environment of this job's workers, for a script that runs alone.", *lines, ""])
