"""The clouds' own command line tools, as far as an operator's tasks call them, for machines of a `mirror`.

    install(folder, "aws", table)      # puts `aws` and `session-manager-plugin` into a folder for PATH

They take exactly the words that the real ones would take for the same thing; anything else is an error. A connection
goes to the address that the mirror's table has for the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from tests.infra.terraform import Tools, adapt, configure

ROOT = Path(__file__).parent.parent.parent
TOOLS = {"aws": ("aws", "session-manager-plugin"), "gcp": ("gcloud",)}
# Whom OS Login makes of an operator, in its own form: no account of any image.
OPERATOR: dict[str, Any] = {
    "name": "117000000000000000001",
    "posixAccounts": [
        {
            "primary": True,
            "username": "alice_example_com",
            "uid": "1337001",
            "gid": "1337001",
            "homeDirectory": "/home/alice_example_com",
            "shell": "/bin/bash",
        }
    ],
}


def install(folder: Path, cloud: str, table: Path) -> None:
    """Each is this module, called by the name that it stands in for."""
    folder.mkdir(exist_ok=True)
    for name in TOOLS[cloud]:
        words = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.e2e.tools", str(table), name])
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)


def install_terraform(folder: Path, url: str) -> None:
    """A `terraform` that passes the stack on to the program that plays the cloud at `url`."""
    words = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.e2e.tools", url, "terraform"])
    (folder / "terraform").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "terraform").chmod(0o755)


def install_real_terraform(folder: Path, tools: Tools) -> dict[str, str]:
    """The `terraform` of this machine, with the provider of this machine; what else it needs in its environment."""
    folder.mkdir(exist_ok=True)
    words = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.e2e.tools", tools.version, "real-terraform"]
    (folder / "terraform").write_text(f'#!/bin/sh\nexec {shlex.join([*words, tools.terraform])} "$@"\n')
    (folder / "terraform").chmod(0o755)
    return {"TF_CLI_CONFIG_FILE": str(configure(folder, tools))}


def real_terraform(version: str, words: list[str]) -> None:
    if words[1] == "init":
        adapt(Path.cwd(), version, emulated=True)
    os.execv(words[0], words)


def terraform(url: str, words: list[str]) -> None:
    if words[0] == "version":
        print("Terraform v1.11.4")
        return
    body = json.dumps({"words": words, "stack": json.loads(Path("cdk.tf.json").read_text())}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def aws(table: Path, words: list[str]) -> None:
    parser = argparse.ArgumentParser("aws", allow_abbrev=False)
    services = parser.add_subparsers(required=True)
    ssm = services.add_parser("ssm").add_subparsers(required=True).add_parser("start-session", allow_abbrev=False)
    for option in ("--target", "--document-name", "--parameters", "--region"):
        ssm.add_argument(option, required=True)
    ssm.set_defaults(run=_session)
    connect = services.add_parser("ec2-instance-connect").add_subparsers(required=True)
    push = connect.add_parser("send-ssh-public-key", allow_abbrev=False)
    for option in ("--instance-id", "--instance-os-user", "--ssh-public-key", "--region", "--output"):
        push.add_argument(option, required=True)
    push.set_defaults(run=_push)
    options = parser.parse_args(words)
    options.run(table, options)


def gcloud(table: Path, words: list[str]) -> None:
    parser = argparse.ArgumentParser("gcloud", allow_abbrev=False)
    compute = parser.add_subparsers(required=True).add_parser("compute").add_subparsers(required=True)
    tunnel = compute.add_parser("start-iap-tunnel", allow_abbrev=False)
    tunnel.add_argument("instance")
    tunnel.add_argument("port", type=int)
    tunnel.add_argument("--listen-on-stdin", action="store_true", required=True)
    for option in ("--project", "--zone", "--verbosity"):
        tunnel.add_argument(option, required=True)
    tunnel.set_defaults(run=lambda found, options: relay(found, options.instance, options.port))
    keys = compute.add_parser("os-login").add_subparsers(required=True).add_parser("ssh-keys")
    add = keys.add_subparsers(required=True).add_parser("add", allow_abbrev=False)
    for option in ("--key-file", "--ttl", "--project", "--format"):
        add.add_argument(option, required=True)
    add.set_defaults(run=_register)
    options = parser.parse_args(words)
    options.run(table, options)


def relay(table: Path, machine: str, port: int) -> None:
    """Standard input and output, to and from a port of a machine."""
    address = json.loads(table.read_text()).get(machine)
    if address is None:
        sys.exit(f"ERROR: {machine} is not connected")
    try:
        connection = socket.create_connection((address, port), timeout=10)
    except OSError as error:
        sys.exit(f"ERROR: {machine}: {error}")
    connection.settimeout(None)

    def send() -> None:
        while block := os.read(0, 65536):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while block := connection.recv(65536):
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()


def _session(table: Path, options: argparse.Namespace) -> None:
    name, _, port = options.parameters.partition("=")
    if options.document_name != "AWS-StartSSHSession" or name != "portNumber":
        sys.exit(f"InvalidDocument: {options.document_name} {options.parameters}")
    relay(table, options.target, int(port))


def _push(_: Path, options: argparse.Namespace) -> None:
    import boto3

    key = Path(options.ssh_public_key.removeprefix("file://")).read_text()
    client = boto3.client("ec2-instance-connect", region_name=options.region)
    answer = client.send_ssh_public_key(
        InstanceId=options.instance_id, InstanceOSUser=options.instance_os_user, SSHPublicKey=key
    )
    print(json.dumps({"RequestId": answer["RequestId"], "Success": answer["Success"]}))


def _register(_: Path, options: argparse.Namespace) -> None:
    if not Path(options.key_file).read_text().startswith("ssh-ed25519 "):
        sys.exit(f"ERROR: (gcloud.compute.os-login.ssh-keys.add) {options.key_file} is no public key")
    print(json.dumps({"loginProfile": OPERATOR}))


def main(argv: list[str]) -> None:
    table, name, *words = argv
    if name == "terraform":
        terraform(table, words)
    elif name == "real-terraform":
        real_terraform(table, words)
    elif name != "session-manager-plugin":
        {"aws": aws, "gcloud": gcloud}[name](Path(table), words)


if __name__ == "__main__":
    main(sys.argv[1:])
