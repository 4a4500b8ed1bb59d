"""Cluster files of clouds, the operator's site of them, and a program in the place of Terraform."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import site as sites
from spotrun.spec import ClusterSpec
from spotrun.spec.names import bucket_url
from spotrun.store import Store
from tests.fakes import moto_server

AWS = """
name: c
cloud: aws
region: us-east-1
pools:
- {name: spot, zone: us-east-1a, machine: g5.2xlarge, max: 4}
- {name: steady, zone: us-east-1b, machine: g5.2xlarge, market: on-demand, max: 1}
"""
GCP = """
name: c
cloud: gcp
project: my-project
region: us-central1
pools:
- {name: spot, zone: us-central1-a, machine: g2-standard-8, max: 4}
"""
# A program instead of Terraform, which only notes what it is asked to do.
TERRAFORM = """
[ "$1" = version ] && echo "Terraform v1.11.4" || echo "$(basename "$PWD") $*" >> "$CALLS"
[ "$1 $REFUSE" = "$REFUSE $1" ] && { echo "no way" >&2; exit 1; }
[ "$1" = state ] && [ -n "$STATE" ] && echo "$STATE"
[ "$1" = plan ] && exit "${PLAN:-0}"
exit 0
"""
# What Terraform knows once stack base has been begun.
VPC = '{"resources": [{"mode": "managed", "type": "aws_vpc", "name": "x", "instances": [{"attributes": {}}]}]}'
Say = Callable[..., None]


def file(folder: Path, text: str = AWS) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    return str(path)


def spec(folder: Path, text: str = AWS) -> ClusterSpec:
    return sites.load(file(folder, text))


def at(folder: Path, text: str = AWS) -> sites.Site:
    return sites.of_file(file(folder, text))


def bucket(folder: Path) -> Store:
    return Store(bucket_url(spec(folder), moto_server.ACCOUNT), "us-east-1")


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def known(type: str, **attributes: str) -> str:
    """A state as `terraform state pull` prints it."""
    read = {"mode": "data", "type": "aws_caller_identity", "name": "account", "instances": [{"attributes": {}}]}
    made = {"mode": "managed", "type": type, "name": "x", "instances": [{"attributes": attributes}]}
    return json.dumps({"version": 4, "resources": [read, made]}, indent=2)


def images(architecture: str = "x86_64", name: str = "spotrun-*", **more: Any) -> dict[str, Any]:
    """The part of AWS's stack pools that is about images."""
    wanted = {"image-id" if name.startswith("ami-") else "name": [name], "architecture": [architecture]}
    filters = [{"name": key, "values": values} for key, values in wanted.items()]
    return {"data": {"aws_ami": {"image": {"filter": filters, **more}}}}
