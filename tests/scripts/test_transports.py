"""The transports: a tunnel that is a command, and what the clouds' own tools are asked for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import control, ssh
from scripts.ssh import Unreachable
from scripts.transports import Iap, Ssm
from scripts.tunnel import Tunnel
from spotrun.cloud.local import procs
from spotrun.cloud.local.layout import ensure_key
from spotrun.errors import CloudError
from spotrun.store import host_key
from spotrun.wire import HostRecord
from tests.fakes.cluster import Machines
from tests.helpers import wait_for

RELAY = Path(__file__).parents[1] / "e2e" / "tools.py"
HEAD = HostRecord(node="head", address="10.0.0.2", port=22, keys=(), machine="c--head-x1y2", zone="us-central1-b")
Say = Callable[[str, str], Path]


@dataclass(frozen=True)
class Relayed:
    """A transport whose tunnel is a program of its own, as a cloud's is. A percent sign is in its words."""

    user: str
    key: Path
    table: Path
    words: tuple[str, ...] = ()

    def tunnel(self, head: HostRecord) -> list[str]:
        code = "import sys; sys.path[0:0] = sys.argv[1:2]; from pathlib import Path; from tests.e2e import tools;"
        code += f"tools.relay(Path({str(self.table)!r}), 'head', {head.port % 65536})  # 100 %h"
        return [sys.executable, "-c", code, str(RELAY.parents[2]), *self.words]

    def admit(self, machine: HostRecord) -> None:
        with self.table.with_name("admitted").open("a") as file:
            file.write(f"{machine.node}\n")


@pytest.fixture
def transport(standin: Machines, tmp_path: Path) -> Relayed:
    table = tmp_path / "table.json"
    table.write_text('{"head": "127.0.0.1"}')
    return Relayed("spotrun", standin.access.transport.key, table)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Put a program on PATH that prints something and notes how it was called; the note's file."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        (folder / name).chmod(0o755)
        return calls

    return put


def access(standin: Machines, transport: Relayed) -> ssh.Access:
    return ssh.Access("c", standin.store, transport, standin.folder)


def test_through_a_tunnel(standin: Machines, transport: Relayed) -> None:
    """The head's own command, a node behind it, and nothing left of the tunnel."""
    standin.write(status_json={"job": None})
    way = access(standin, transport)
    assert control.ask(way, "status") == {"job": None}
    outcomes: list[ssh.Outcome] = []
    assert ssh.run(way, ["head", "spot-1"], "echo here", 20, outcomes.append)
    assert [(each.node, each.output) for each in outcomes] == [("head", "here\n"), ("spot-1", "here\n")]
    assert set(transport.table.with_name("admitted").read_text().split()) == {"head", "spot-1"}
    assert not tunnels(transport)


def test_ssh_itself_through_a_tunnel(standin: Machines, transport: Relayed) -> None:
    """OpenSSH, to a node: a proxy command within a proxy command, each read by a shell and for percent signs."""
    way = access(standin, transport)
    for node in ("head", "spot-1"):
        command = [*ssh.shell_command(way, node), "echo $((6 * 7))"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
        assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


def test_a_tunnel_that_ends_says_why(standin: Machines, transport: Relayed) -> None:
    transport.table.write_text("{}")
    with pytest.raises(Unreachable, match="no SSH connection: ERROR: head is not connected"):
        control.ask(access(standin, transport), "status")


def test_a_wrong_host_key_through_a_tunnel(standin: Machines, transport: Relayed) -> None:
    record = HostRecord.model_validate_json(standin.store.get(host_key("c", "head")))
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIBQ0y1jD4mWwFhW0lG1ZpT3J2QYc0uZ6bqVxX2M4y1A"
    wrong = record.model_copy(update={"keys": (other,)})
    standin.store.put(host_key("c", "head"), wrong.model_dump_json().encode())
    with pytest.raises(Unreachable, match="refused: its host key has changed"):
        control.ask(access(standin, transport), "status")
    assert not tunnels(transport)


def test_the_end_of_a_tunnel_takes_all_that_it_started(tmp_path: Path) -> None:
    mark = f"sleep 98{os.getpid()}"
    tunnel = Tunnel(["sh", "-c", f"trap '' TERM; {mark} & echo started; wait; wait"])
    assert tunnel.sock.recv(7) == b"started"
    (child,) = wait_for(lambda: running(f"^{mark}"), what="the child")  # it may not be `sleep` yet
    tunnel.close()
    wait_for(lambda: procs.status(child)[0] in "ZX", what="the end of the tunnel's own child")
    tunnel.sock.close()


def test_iap(say: Say, tmp_path: Path) -> None:
    ensure_key(tmp_path / "key")
    profile = {"loginProfile": {"posixAccounts": [{"username": "other"}, {"username": "me_org", "primary": True}]}}
    calls = say("gcloud", f"echo {shlex.quote(json.dumps(profile))}")
    transport = Iap("my-project", tmp_path / "key")
    assert transport.user == transport.user == "me_org"
    assert calls.read_text().splitlines() == [
        f"compute os-login ssh-keys add --key-file {tmp_path}/key.pub --ttl 12h --project my-project --format json"
    ], "asked once"
    program, *words = transport.tunnel(HEAD)
    assert program.endswith("/gcloud")
    assert " ".join(words) == (
        "compute start-iap-tunnel c--head-x1y2 22 --listen-on-stdin --project my-project --zone us-central1-b"
        " --verbosity warning"
    )


def test_ssm(say: Say, tmp_path: Path) -> None:
    say("session-manager-plugin", "")
    calls = say("aws", "echo '{\"Success\": true}'")
    transport = Ssm("us-east-1", tmp_path / "key")
    head = HEAD.model_copy(update={"machine": "i-0123"})
    program, *words = transport.tunnel(head)
    assert program.endswith("/aws")
    assert " ".join(words) == (
        "ssm start-session --target i-0123 --document-name AWS-StartSSHSession --parameters portNumber=22"
        " --region us-east-1"
    )
    transport.admit(head)
    transport.admit(head)
    transport.admit(head.model_copy(update={"machine": "i-4567"}))
    assert [line.split()[3] for line in calls.read_text().splitlines()] == ["i-0123", "i-4567"], (
        "the machine still accepts the key"
    )


@pytest.mark.parametrize(
    ("program", "script", "said"),
    [
        (
            "gcloud",
            None,
            "there is no `gcloud` on this machine, and SSH to the cluster needs it: install the Google Cloud CLI",
        ),
        (
            "gcloud",
            "echo hm; echo 'ERROR: log in' >&2; exit 1",
            "`gcloud compute os-login ssh-keys` failed: ERROR: log in",
        ),
        ("gcloud", "echo '[]'", "`gcloud compute os-login ssh-keys` answered no JSON object: "),
        ("gcloud", "echo '{}'", "OS Login gives you no account in project p: you need the roles compute.osLogin and"),
        ("aws", None, "there is no `aws` on this machine, and SSH to the cluster needs it: install the AWS CLI"),
        ("aws", "echo 'Token has expired' >&2; exit 255", "` failed: Token has expired"),
    ],
)
def test_why_a_cloud_gives_no_access(program: str, script: str | None, said: str, say: Say, tmp_path: Path) -> None:
    if script is not None:
        say(program, script)
    iap, ssm = Iap("p", tmp_path / "key"), Ssm("us-east-1", tmp_path / "key")
    ask: Callable[[], object] = (lambda: iap.user) if program == "gcloud" else (lambda: ssm.admit(HEAD))
    with pytest.raises(CloudError) as caught:
        ask()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_session_manager_plugin(say: Say, tmp_path: Path) -> None:
    say("aws", "")
    with pytest.raises(CloudError, match="no `session-manager-plugin` on this machine"):
        Ssm("us-east-1", tmp_path / "key").tunnel(HEAD)


def tunnels(transport: Relayed) -> list[int]:
    return running(str(transport.table))


def running(text: str) -> list[int]:
    """Processes, but for this one, with a text in their command line."""
    found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, text=True).stdout.split()
    return [pid for pid in map(int, found) if procs.status(pid)[0] not in "ZX" and pid != os.getpid()]
