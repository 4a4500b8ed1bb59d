"""Strict SSH against real SSH servers: host keys, the shell, commands on nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest

from scripts import control, ssh
from scripts.transports import Direct
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.store import host_key
from tests.fakes.cluster import Machines
from tests.scripts.statuses import status


def test_a_known_host_key_opens(standin: Machines) -> None:
    standin.write(status_json=status())
    assert control.ask(standin.access, "status")["cluster"] == "c"


def test_a_connection_that_fails_writes_no_traceback() -> None:
    """paramiko's threads log theirs, and Python prints what no handler takes."""
    code = "import logging, scripts.ssh; logging.getLogger('paramiko.transport').error('Traceback')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stderr == ""


def test_an_unknown_host_key_is_refused(standin: Machines) -> None:
    standin.publish("head")
    with pytest.raises(ssh.Unreachable, match=r"head \(127\.0\.0\.1:\d+\): refused: its host key is unknown"):
        control.ask(standin.access, "status")


def test_a_changed_host_key_is_refused(standin: Machines) -> None:
    standin.publish("head", asyncssh.generate_private_key("ssh-ed25519"))
    with pytest.raises(ssh.Unreachable, match=r"head \(127\.0\.0\.1:\d+\): refused: its host key has changed"):
        control.ask(standin.access, "status")
    assert standin.calls() == []


def test_a_node_is_checked_behind_the_head_too(standin: Machines) -> None:
    outcomes: list[ssh.Outcome] = []
    assert ssh.run(standin.access, ["spot-1", "head"], "echo $((40 + 2))", 30, outcomes.append)
    assert [(each.node, each.output) for each in outcomes] == [("spot-1", "42\n"), ("head", "42\n")]
    standin.publish("spot-1", asyncssh.generate_private_key("ssh-ed25519"))
    outcomes.clear()
    assert not ssh.run(standin.access, ["spot-1"], "true", 30, outcomes.append)
    assert "spot-1" in outcomes[0].output
    assert "its host key has changed" in outcomes[0].output


def test_another_key_does_not_open(standin: Machines, tmp_path: Path) -> None:
    other = tmp_path / "other"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(other))
    access = ssh.Access("c", standin.store, Direct("spotrun", other), tmp_path)
    with pytest.raises(ssh.Unreachable, match="refused user spotrun with key"):
        control.ask(access, "status")


@pytest.mark.parametrize(
    ("verb", "more"), [("status", ""), ("stop", "; it may have got the request, and still do what was asked")]
)
def test_a_head_that_does_not_answer_in_time(
    verb: str, more: str, standin: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that is stopped: it does later what was asked."""
    monkeypatch.setattr(control, "_command", lambda *_: "sleep 600")
    message = f"^the head does not answer in time{more}$"
    with control.open_head(standin.access) as head, pytest.raises(ssh.Unreachable, match=message):
        head.ask(verb, timeout=0.5)


def test_machines_that_are_not_there(standin: Machines) -> None:
    with pytest.raises(SpotrunError, match="spot-9: there is no such machine in cluster c"):
        ssh.read_host(standin.access, "spot-9")
    standin.store.put("clusters/c/hosts/spot-9.json", b'{"node": 3}')
    with pytest.raises(ssh.Unreachable, match=r"spot-9\.json: not a host record"):
        ssh.read_host(standin.access, "spot-9")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", "ssh-ed25519 !!!"),
        ("keys", "ssh-ed25519 AAAAC"),  # no base64 is that long
        ("keys", "ssh-ed25519 AAAA"),
        ("keys", "ssh-rsa AAAAB3NzaC1yc2E=\n* ssh-ed25519 AAAA"),
        ("address", "127.0.0.1\n*"),
    ],
)
def test_a_host_record_with_junk_is_refused(standin: Machines, field: str, value: str) -> None:
    key = host_key("c", "head")
    record = json.loads(standin.store.get(key))
    record[field] = [value] if field == "keys" else value
    standin.store.put(key, json.dumps(record).encode())
    with pytest.raises(ssh.Unreachable, match=r"head.*: "):
        control.ask(standin.access, "status")
    if "\n" in value:
        with pytest.raises(ssh.Unreachable, match=r"hosts/head\.json: not a host record"):
            ssh.shell_command(standin.access, "head")


def test_a_command_that_takes_too_long_is_ended_on_the_node(standin: Machines) -> None:
    outcomes: list[ssh.Outcome] = []
    assert not ssh.run(standin.access, ["head"], "echo began; exec sleep 600", 0.5, outcomes.append)
    assert outcomes[0].code == ssh.EXIT_TIMEOUT
    assert outcomes[0].output == "began\nended after 0.5 s; give it more time with TIMEOUT=\n"


def test_a_command_that_a_signal_ends_has_failed(standin: Machines) -> None:
    """Such as a program that crashes, or that the system kills because memory is short. The node was reached."""
    outcomes: list[ssh.Outcome] = []
    assert not ssh.run(standin.access, ["head"], "echo began; kill -9 $$", 20, outcomes.append)
    assert outcomes[0].reached
    assert outcomes[0].code == 128 + 9
    assert outcomes[0].output.startswith("began\n")


def test_a_command_that_reads_its_input_finds_the_end(standin: Machines) -> None:
    """A program that asks a question would otherwise wait for the whole TIMEOUT."""
    outcomes: list[ssh.Outcome] = []
    assert ssh.run(standin.access, ["head"], "cat; read -r answer || echo no answer", 20, outcomes.append)
    assert outcomes[0].output == "no answer\n"


def test_a_host_key_of_another_kind_is_refused(standin: Machines) -> None:
    standin.publish("head", asyncssh.generate_private_key("ecdsa-sha2-nistp256"))
    with pytest.raises(ssh.Unreachable, match="refused: its host key has changed"):
        control.ask(standin.access, "status")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_the_interactive_shell_is_as_strict(standin: Machines) -> None:
    def try_it() -> subprocess.CompletedProcess[str]:
        command = [*ssh.shell_command(standin.access, "spot-1"), "echo", "inside"]
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    good = try_it()
    assert (good.returncode, good.stdout) == (0, "inside\n"), good.stderr
    standin.publish(
        "spot-1", asyncssh.generate_private_key("ssh-ed25519")
    )  # now both keys are under the head's address
    (standin.access.scratch / "known_hosts-spot-1").unlink()
    standin.publish("head", asyncssh.generate_private_key("ssh-ed25519"))
    bad = try_it()
    assert bad.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in bad.stderr


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_the_interactive_shell_works_from_any_folder(standin: Machines, tmp_path: Path) -> None:
    layout = Layout.of(shutil.copytree(standin.home, tmp_path / "100% of Ann's $HOME/.spotrun"), "c")
    access = ssh.Access("c", standin.store, Direct("spotrun", layout.key), layout.state)
    for node in ("head", "spot-1"):
        command = [*ssh.shell_command(access, node), "echo", "inside"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr


def test_an_output_that_does_not_end_in_time_is_reported_in_a_line(
    standin: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "GRACE", 0.3)
    outcomes: list[ssh.Outcome] = []
    assert not ssh.run(standin.access, ["head"], "setsid sleep 5 & echo y", 0.2, outcomes.append)
    text = "its output did not end 0.3 s after TIMEOUT=0.2; write a large output to a file\n"
    assert outcomes == [ssh.Outcome("head", 255, text, reached=False)]


def test_an_output_is_shown_as_it_comes_and_only_its_end_is_kept(
    standin: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output may be larger than the operator's memory."""
    monkeypatch.setattr(ssh, "KEPT", 1000)
    gate = tmp_path / "gate"
    received: list[str] = []

    def take(node: str, text: str) -> None:
        received.append(text)
        gate.touch()  # the command goes on once its first line has come

    outcomes: list[ssh.Outcome] = []
    command = f"echo first; while [ ! -e {gate} ]; do sleep 0.05; done; seq 100000; printf '%s' no end >&2"
    assert ssh.run(standin.access, ["head"], command, 60, outcomes.append, take)
    whole = "first\n" + "".join(f"{number}\n" for number in range(1, 100_001)) + "no"
    assert "".join(received).startswith(whole)
    assert all(len(each) <= 2 * ssh.LINE for each in received)
    assert outcomes[0].output == "".join(received)[-1000:]
    assert outcomes[0].left_out == len("".join(received)) - 1000
