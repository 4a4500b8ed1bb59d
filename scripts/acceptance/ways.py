"""Tries the ways into a cluster's machines as an operator would."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from scripts import control, ssh
from scripts.acceptance.record import Facts
from scripts.ssh import HEAD, Access, Outcome, Unreachable
from spotrun.errors import SpotrunError
from spotrun.store import Store, host_key
from spotrun.wire import HostRecord

_WORD = "spotrun-acceptance"
_LONGEST = 60.0  # seconds for one command on a machine


def into_head(access: Access) -> Facts:
    """`make status`, `make run NODE=head`, `make ssh`. Raises `SpotrunError` if one of them fails."""
    status = control.ask(access, "status")
    return {"pools": len(status["pools"]), **_by_run(access, HEAD), **_by_openssh(access, HEAD)}


def into_node(access: Access, node: str) -> Facts:
    """`make run NODE=…`, `make ssh NODE=…`: both go through the head."""
    return {"node": node, **_by_run(access, node), **_by_openssh(access, node)}


def say(access: Access, node: str, command: str) -> str:
    """What a shell command prints on a machine. Raises `SpotrunError` if it fails."""
    found: list[Outcome] = []
    if not ssh.run(access, [node], command, _LONGEST, found.append):
        raise SpotrunError(f"`{command}` on {node}: exit status {found[0].code}: {found[0].output.strip()[-300:]}")
    return found[0].output


def refuses_another_key(access: Access) -> Facts:
    """Connect with a wrong host key in the head's record: the connection must be refused."""
    forged = dataclasses.replace(access, store=cast(Store, _Forged(access)))
    try:
        with ssh.connect(forged):
            pass
    except Unreachable as error:
        if "host key has changed" in str(error):
            return {"said": str(error).partition(";")[0]}
        raise
    raise SpotrunError("SSH accepted the head, although its host key is not the one in the bucket")


class _Forged:
    """The bucket, but its record of the head has a new host key, which no machine has."""

    def __init__(self, access: Access) -> None:
        self._store, self.url = access.store, access.store.url
        self._key = host_key(access.cluster, HEAD)

    def find(self, key: str, most: int | None = None) -> bytes | None:
        data = self._store.find(key, most)
        if key != self._key or data is None:
            return data
        record = HostRecord.model_validate_json(data)
        kinds = [line for line in record.keys if line.startswith("ssh-ed25519 ")]
        if not kinds:
            raise SpotrunError("the head's record has no ed25519 key that could be replaced")
        line = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        return record.replace(keys=(line,)).model_dump_json().encode()


def _by_run(access: Access, node: str) -> Facts:
    if _WORD not in say(access, node, f"echo {_WORD}"):
        raise SpotrunError(f"`make run` on {node} did not print the output of the command")
    return {"make run": "works"}


def _by_openssh(access: Access, node: str) -> Facts:
    if shutil.which("ssh") is None:
        return {"make ssh": "not tried: there is no ssh on this computer"}
    command = [*ssh.shell_command(access, node), f"echo {_WORD}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpotrunError(f"`make ssh` to {node}: no answer within {_LONGEST:g} s") from None
    if done.returncode or _WORD not in done.stdout:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise SpotrunError(f"`make ssh` to {node}: {said}")
    return {"make ssh": "works"}
