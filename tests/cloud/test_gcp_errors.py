"""Google Cloud's module when the cloud is busy, slow, out of reach, or says no: what the head or operator is told."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from spotrun.cloud.gcp import GcpCloud, api
from spotrun.errors import CloudError, CredentialsError, GoneError, QuotaError, StockoutError
from tests.fakes import gce as fakegce
from tests.fakes.gce import Event, FakeGce
from tests.fakes.on_gcp import CLUSTER, pool_of, running, successor
from tests.fakes.serving import DIRECT, serve

pytestmark = pytest.mark.clouds

LIST = "instances.list"


@pytest.mark.parametrize(
    ("status", "reason"), [(429, "rateLimitExceeded"), (403, "rateLimitExceeded"), (503, "backendError"), (500, "x")]
)
async def test_a_busy_cloud_is_asked_again(cloud: GcpCloud, gce: FakeGce, status: int, reason: str) -> None:
    gce.fail(status, status, reason=reason, only=LIST)
    assert [node.pool for node in await cloud.nodes()] == ["head"]
    assert gce.calls.count(LIST) == 4


async def test_what_is_asked_again_is_done_once(cloud: GcpCloud, gce: FakeGce) -> None:
    """The answer is lost on its way; the second request carries the id of the first."""
    node = (await pool_of(cloud, "steady", 1))[0]
    gce.fail(503, only="instances.delete", done=True)
    events: queue.Queue[Event] = queue.Queue()
    gce.watch(events.put)
    await cloud.kill(node.name)
    await successor(cloud, node)
    assert gce.calls.count("instances.delete") == 2
    assert [e.kind for e in events.queue if e.machine.name == node.name].count("gone") == 1


@pytest.mark.parametrize(
    ("status", "reason", "said", "kind", "says"),
    [
        (
            403,
            "accessNotConfigured",
            "Compute Engine API has not been used in project 1234 before or it is disabled.",
            CloudError,
            "my-project has not enabled the Compute Engine API: `gcloud services enable compute.googleapis.com",
        ),
        (
            403,
            "forbidden",
            "Required 'compute.instances.list' permission for 'projects/my-project'",
            CredentialsError,
            "it needs a role with compute.instances.list in project my-project",
        ),
        (401, "authError", "Invalid Credentials", CredentialsError, "sign in with `gcloud auth application-default"),
        (403, "quotaExceeded", "Quota exceeded for resource.", QuotaError, "Quota exceeded for resource"),
        (503, "ZONE_RESOURCE_POOL_EXHAUSTED", "Try\n a different zone.", CloudError, "Try a different zone"),
        (400, "ZONE_RESOURCE_POOL_EXHAUSTED", "Try a different zone.", StockoutError, "Try a different zone"),
        (404, "notFound", "The resource 'x' was not found", GoneError, "`make up` makes it"),
        (400, "invalid", "Invalid value", CloudError, "400: Invalid value"),
        (429, "rateLimitExceeded", "Too many", CloudError, "is busy, try again in a moment"),
    ],
)
async def test_refusals(
    cloud: GcpCloud,
    gce: FakeGce,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    reason: str,
    said: str,
    kind: type[CloudError],
    says: str,
) -> None:
    monkeypatch.setitem(api.OPTIONS, "retry", api.OPTIONS["retry"].with_timeout(0.1))
    gce.fail(*[status] * 9, reason=reason, message=said, only=LIST)
    with pytest.raises(CloudError) as caught:
        await cloud.nodes()
    assert type(caught.value) is kind
    assert str(caught.value).startswith("machines in us-central1-")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", StockoutError),
        (fakegce.STOCKOUT, StockoutError),
        ("QUOTA_EXCEEDED", QuotaError),
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", CloudError),
    ],
)
async def test_an_operation_that_fails(cloud: GcpCloud, gce: FakeGce, code: str, kind: type[CloudError]) -> None:
    gce.fail_operation("instance_group_managers.resize", code, "It does not go.")
    with pytest.raises(CloudError, match=f"pool spot-a: resize to 1: {code}: It does not go$") as caught:
        await cloud.resize("spot-a", 1)
    assert type(caught.value) is kind


async def test_a_long_operation_is_not_waited_for(
    cloud: GcpCloud, gce: FakeGce, monkeypatch: pytest.MonkeyPatch
) -> None:
    gce.times.operation = 600.0
    monkeypatch.setattr(api, "_SETTLE", 0.2)
    await cloud.resize("spot-a", 1)
    await running(cloud, "spot-a", 1)
    assert "zone_operations.wait" in gce.calls


async def test_a_pool_that_terraform_has_not_made(gce: FakeGce) -> None:
    """It has a problem, and the head sees all the others."""
    cloud = GcpCloud(CLUSTER.model_copy(update={"name": "other"}))
    assert await cloud.sizes() == {}
    assert await cloud.nodes() == []
    problems = await cloud.problems()
    assert [problem.pool for problem in problems] == [pool.name for pool in CLUSTER.pools]
    assert all("there is no such thing in project my-project" in problem.message for problem in problems)
    assert await cloud.problems() == problems, "since when it is so is kept"
    await cloud.close()


async def test_a_cloud_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def build() -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hang)
        return app

    monkeypatch.setattr(api, "_CALL_SECONDS", 0.3)
    with serve(build) as (_, url):
        monkeypatch.setenv(api.ENDPOINT, url)
        cloud = GcpCloud(CLUSTER)
        for _ in range(8):  # more often than there are threads: the next ask would never be answered
            with pytest.raises(CloudError, match="Google does not answer"):
                await cloud.sizes()
        await cloud.close()


async def test_a_cloud_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv(api.ENDPOINT, f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setitem(api.OPTIONS, "retry", api.OPTIONS["retry"].with_timeout(0.1))
    cloud = GcpCloud(CLUSTER)
    with pytest.raises(CloudError, match=r"Google does not answer \(.*refused.*check whether this machine"):
        await cloud.nodes()
    await cloud.close()


def told(**environment: str) -> str:
    """What a process says in which no one has signed in; one of its own, for Google's library looks around once."""
    code = (
        "import asyncio, tests.fakes.on_gcp, spotrun.cloud, spotrun.errors\n"
        "try: asyncio.run(spotrun.cloud.connect(tests.fakes.on_gcp.CLUSTER).nodes())\n"
        "except spotrun.errors.CredentialsError as error: print(error)"
    )
    ours = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**ours, **environment}, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""  # nothing of the libraries beneath
    assert result.stdout.count("\n") == 1
    return re.sub("central1-[ab]", "central1-x", result.stdout.strip())


def test_no_credentials(tmp_path: Path) -> None:
    assert told(CLOUDSDK_CONFIG=str(tmp_path), NO_GCE_CHECK="true") == (
        "machines in us-central1-x: there are no Google Cloud credentials here; sign in with "
        "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
    )


def test_credentials_that_are_refused(tmp_path: Path) -> None:
    """A machine whose service account has been deleted."""

    async def refuse(request: web.Request) -> web.Response:
        status = 200 if request.path == "/" else 404
        return web.Response(status=status, text="no service account", headers={"Metadata-Flavor": "Google"})

    async def build() -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", refuse)
        return app

    with serve(build) as (_, url):
        host = url.removeprefix("http://")
        said = told(CLOUDSDK_CONFIG=str(tmp_path), GCE_METADATA_HOST=host, GCE_METADATA_IP=host, **DIRECT)
    assert "the Google Cloud credentials found here are refused (" in said
    assert "404" in said
    assert said.endswith("set GOOGLE_APPLICATION_CREDENTIALS")
