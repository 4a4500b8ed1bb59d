"""The ways from an operator's machine to a cluster's SSH servers: directly, through Google's IAP, through Amazon's SSM.

What each costs and needs: docs/gcp.md and docs/aws.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spotrun.errors import CloudError
from spotrun.wire import HostRecord

TIMEOUT = 60.0  # seconds for a cloud's command line tool to answer
# How long OS Login accepts the operator's key, and the seconds after which it gets the key again.
KEY_TTL, KEY_AGAIN = "12h", 6 * 3600.0
# EC2 Instance Connect keeps a pushed key for a minute
# (https://docs.aws.amazon.com/ec2-instance-connect/latest/APIReference/API_SendSSHPublicKey.html).
PUSHED = 45.0


class Transport(Protocol):
    """One of these ways. key: the file of the private key; the public key is beside it."""

    @property
    def user(self) -> str:
        """The user to log in as."""

    @property
    def key(self) -> Path: ...

    def tunnel(self, head: HostRecord) -> list[str]:
        """A command whose input and output are a connection to the head's SSH server; empty: connect to its address."""

    def admit(self, machine: HostRecord) -> None:
        """Make a machine accept the key now. Raises `CloudError`."""


@dataclass(frozen=True)
class Direct:
    """The local cloud: every machine is on this computer and accepts the key."""

    user: str
    key: Path

    def tunnel(self, head: HostRecord) -> list[str]:
        return []

    def admit(self, machine: HostRecord) -> None:
        return None


@dataclass(frozen=True)
class Iap:
    """Google's Identity-Aware Proxy, with OS Login: IAM alone decides who may log in."""

    project: str
    key: Path
    _known: dict[str, float] = field(default_factory=dict, repr=False)  # by account: when the key was registered
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def tunnel(self, head: HostRecord) -> list[str]:
        where = ["--project", self.project, "--zone", head.zone]
        tunnel = ["start-iap-tunnel", head.machine, str(head.port), "--listen-on-stdin"]
        return [require("gcloud"), "compute", *tunnel, *where, "--verbosity", "warning"]

    @property
    def user(self) -> str:
        """The POSIX account of the gcloud login. This registers the key with OS Login, and again after some hours."""
        with self._lock:
            for name, registered in self._known.items():
                if time.monotonic() - registered < KEY_AGAIN:
                    return name
            name = self._register()
            self._known.clear()
            self._known[name] = time.monotonic()
            return name

    def _register(self) -> str:
        public = f"{self.key}.pub"
        words = ["compute", "os-login", "ssh-keys", "add", "--key-file", public, "--ttl", KEY_TTL]
        profile = _ask("gcloud", [*words, "--project", self.project, "--format", "json"])
        accounts = profile.get("loginProfile", profile).get("posixAccounts", [])
        chosen = next((each for each in accounts if each.get("primary")), accounts[0] if accounts else None)
        if chosen is None:
            raise CloudError(
                f"OS Login gives you no account in project {self.project}: you need the roles compute.osLogin"
                " and iap.tunnelResourceAccessor, see docs/gcp.md"
            )
        return str(chosen["username"])

    def admit(self, machine: HostRecord) -> None:
        return None  # OS Login asks IAM itself


@dataclass(frozen=True)
class Ssm:
    """Amazon's Session Manager, with EC2 Instance Connect: a machine accepts the key for a minute."""

    region: str
    key: Path
    user: str = "spotrun"
    _pushed: dict[str, float] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def tunnel(self, head: HostRecord) -> list[str]:
        session = ["--target", head.machine, "--document-name", "AWS-StartSSHSession"]
        require("session-manager-plugin")
        return [
            *(require("aws"), "ssm", "start-session", *session),
            *("--parameters", f"portNumber={head.port}", "--region", self.region),
        ]

    def admit(self, machine: HostRecord) -> None:
        with self._lock:
            if time.monotonic() - self._pushed.get(machine.machine, -PUSHED) < PUSHED:
                return
        words = ["send-ssh-public-key", "--instance-id", machine.machine, "--instance-os-user", self.user]
        key = ["--ssh-public-key", f"file://{self.key}.pub"]
        _ask("aws", ["ec2-instance-connect", *words, *key, "--region", self.region, "--output", "json"])
        with self._lock:
            self._pushed[machine.machine] = time.monotonic()


_INSTALL = {
    "gcloud": "install the Google Cloud CLI (cloud.google.com/sdk/docs/install), then `gcloud auth login`",
    "aws": "install the AWS CLI, version 2 (docs.aws.amazon.com/cli), then `aws sso login` or `aws configure`",
    "session-manager-plugin": "install the AWS CLI's Session Manager plugin (docs.aws.amazon.com/systems-manager)",
}


def require(name: str) -> str:
    """The program's path. If there is none, raises `CloudError` that says how to install it."""
    path = shutil.which(name)
    if path is None:
        raise CloudError(f"there is no `{name}` on this machine, and SSH to the cluster needs it: {_INSTALL[name]}")
    return path


def _ask(tool: str, words: list[str]) -> dict[str, Any]:
    """What a cloud's own command line tool answers. Raises `CloudError` with its last line."""
    command = [require(tool), *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CloudError(f"`{tool} {' '.join(words[:3])}` did not answer: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise CloudError(f"`{tool} {' '.join(words[:3])}` failed: {said}")
    try:
        answer = json.loads(done.stdout or "{}")
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CloudError(f"`{tool} {' '.join(words[:3])}` answered no JSON object: {done.stdout[:200]!r}")
    return answer
