"""AWS on this machine: moto's server on a free port of the loopback interface, in a process of its own.

    with motoserver.running() as aws:
        aws.client("ec2").describe_vpcs()           # or aws.endpoint, or a process with aws.environment

The process ends with the `with` block, and with the process that started it. What moto lacks is in `motoextra`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

# Each session would parse the descriptions of the services that it is asked for again: 0.3 s for EC2's.
botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)

REGION = "us-east-1"
ACCOUNT = "123456789012"
# What an activity of a scaling group says when the zone has no spot machines, and no on-demand ones.
NO_SPOT = (
    "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available that matches"
    " your request. Launching EC2 instance failed."
)
NO_MACHINES = (
    "We currently do not have sufficient g5.2xlarge capacity in the Availability Zone you requested (us-east-1a). Our"
    " system will be working on provisioning additional capacity. Launching EC2 instance failed."
)
NO_SPOT_QUOTA = (
    "Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded. Launching EC2"
    " instance failed."
)
_ROOT = Path(__file__).parents[2]


class Moto:
    """An AWS account of no one's. endpoint: its URL. environment: what programs need in theirs to talk to it."""

    def __init__(self, process: subprocess.Popen[str], region: str) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self.region = region
        self.endpoint = f"http://127.0.0.1:{self._answer()}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """A boto3 client of this account."""
        if service not in self._clients:
            self._clients[service] = boto3.session.Session().client(
                cast(Any, service),  # its type has a literal for each service
                region_name=self.region,
                endpoint_url=self.endpoint,
                aws_access_key_id="testing",
                aws_secret_access_key="testing",
                config=Config(s3={"addressing_style": "path"}),
            )
        return self._clients[service]

    def image(self, name: str = "spotrun-test", architecture: str = "x86_64") -> str:
        """The id of a new machine image of this account."""
        made = self.client("ec2").register_image(Name=name, Architecture=architecture, RootDeviceName="/dev/sda1")
        return str(made["ImageId"])

    def ration(self, zone: str, machines: int | None, message: str = NO_SPOT) -> None:
        """How many machines of scaling groups a zone has; None: any number. message: why there are not more.

        As AWS does, groups take what they can get, note the failure in their activities, and try again: here, at the
        next call of this.
        """
        self._ask({"ration": [zone, machines, message]})

    def score(self, zone: str, score: int) -> None:
        """Set the placement score of a zone, from 1 to 10. Each is 5 at the start."""
        self._ask({"scores": {zone: score}})

    def allow_configurations(self, most: int) -> None:
        """How many new configurations the account may ask the placement scores of. It is 10 at the start."""
        self._ask({"configurations": most})

    def quota(self, code: str, value: float) -> None:
        """Set one of EC2's quotas, such as L-3819A6DF. Each is 64 at the start."""
        self._ask({"quota": [code, value]})

    def assign_address(self, machine: str, address: str) -> None:
        """The private address of a machine, for one that is really somewhere."""
        self._ask({"address": [machine, address]})

    def notices(self) -> list[dict[str, Any]]:
        """Spot interruptions that were sent: `instance`, and `at`, epoch seconds of its end."""
        found: list[dict[str, Any]] = self._ask({"notices": []})
        return found

    def _ask(self, question: object) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"moto's server ended with status {self._process.wait()}"
        return json.loads(line)


@contextlib.contextmanager
def running(region: str = REGION, notice: float = 0.0) -> Iterator[Moto]:
    """An account without anything in it. notice: seconds from a spot interruption's notice to its end, 120 on AWS."""
    # Not -m: moto wants a dotted module name.
    start = f"from tests.fakes.moto_extra import main; main({region!r}, {notice!r})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # its end closes the pipe, which is what ends the server
        try:
            yield Moto(process, region)
        finally:
            process.terminate()
