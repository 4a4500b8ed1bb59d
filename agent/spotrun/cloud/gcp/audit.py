"""What an operator may do in a project, and what exists of a cluster there. For `make acceptance` only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial

import google.auth
from google.auth.transport.requests import AuthorizedSession
from google.cloud import compute_v1

from spotrun.cloud import prices
from spotrun.cloud.base import Left
from spotrun.cloud.gcp import errors
from spotrun.cloud.gcp.api import OPTIONS, Api, Clients, credentials
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import CLUSTER, POOL

ENDPOINT = "GOOGLE_RESOURCE_MANAGER_CUSTOM_ENDPOINT"  # the variable of Terraform's google provider
_SERVER = "https://cloudresourcemanager.googleapis.com/v1/"
_LONGEST = 20.0  # seconds for an answer
_MONTH = 730  # hours
_GB, _ADDRESS = 0.10 / _MONTH, 0.005  # USD an hour for a GB of disk and for an address, as in docs/gcp.md
# One permission for each kind of thing that the stacks make, and those that SSH needs.
WANTED = (
    "compute.firewalls.create",
    "compute.instanceGroupManagers.create",
    "compute.instanceTemplates.create",
    "compute.instances.create",
    "compute.networks.create",
    "compute.resourcePolicies.create",
    "compute.routers.create",
    "compute.subnetworks.create",
    "iam.roles.create",
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.create",
    "resourcemanager.projects.setIamPolicy",
    "storage.buckets.create",
    "compute.instances.osLogin",
    "iap.tunnelInstances.accessViaIAP",
)


def permissions(cluster: ClusterSpec) -> tuple[list[str], list[str]]:
    """Those of `WANTED` that the project gives you, and those that it refuses. Blocking. Raises `CloudError`."""
    project = cluster.project or ""
    session = AuthorizedSession(credentials())  # type: ignore[no-untyped-call]
    try:
        allowed = _ask(session, project, WANTED)
        if allowed is None:  # one of them does not exist for projects, and spoils the whole request
            each = {name: _ask(session, project, (name,)) for name in WANTED}
            known = [name for name in WANTED if each[name] is not None]
            return [name for name in known if each[name]], [name for name in known if not each[name]]
    except (google.auth.exceptions.GoogleAuthError, OSError) as error:
        raise errors.explain(error, "asking what you may do", project) from error
    finally:
        session.close()  # type: ignore[no-untyped-call]
    return [name for name in WANTED if name in allowed], [name for name in WANTED if name not in allowed]


def left(cluster: ClusterSpec) -> list[Left]:
    """All machines, disks and addresses with the cluster's label. Blocking. Raises `CloudError`."""
    return asyncio.run(_left(cluster))


def models(cluster: ClusterSpec) -> list[tuple[str, str]]:
    """The pool and the provisioning model of each template of the cluster. Blocking. Raises `CloudError`."""
    return asyncio.run(_models(cluster))


def _ask(session: AuthorizedSession, project: str, wanted: Sequence[str]) -> list[str] | None:
    """The allowed ones; None if one of `wanted` is not a permission of projects.

    https://cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions
    """
    url = f"{os.environ.get(ENDPOINT, _SERVER).rstrip('/')}/projects/{project}:testIamPermissions"
    answer = session.post(url, json={"permissions": list(wanted)}, timeout=_LONGEST)
    if answer.status_code == 400:
        return None
    if answer.status_code != 200:
        raise CloudError(f"project {project}: your permissions are unknown: {answer.status_code}: {answer.text[:300]}")
    return list(answer.json().get("permissions", []))


async def _models(cluster: ClusterSpec) -> list[tuple[str, str]]:
    def call(clients: Clients) -> list[tuple[str, str]]:
        request = compute_v1.AggregatedListInstanceTemplatesRequest(project=cluster.project or "")
        scopes = clients.templates.aggregated_list(request, **OPTIONS)
        made = (each.properties for _, scope in scopes for each in scope.instance_templates)
        ours = [each for each in made if each.labels.get(CLUSTER) == cluster.name]
        return sorted((each.labels.get(POOL, ""), each.scheduling.provisioning_model) for each in ours)

    api = Api(cluster.project or "")
    try:
        return await api.ask("templates of the pools", call)
    finally:
        await api.close()


async def _left(cluster: ClusterSpec) -> list[Left]:
    ours = f"labels.{CLUSTER} = {cluster.name}"
    zones = sorted({cluster.head.zone, *(pool.zone for pool in cluster.pools)})
    project = cluster.project or ""
    found: list[Left] = []

    def machines(zone: str, clients: Clients) -> list[Left]:
        request = compute_v1.ListInstancesRequest(project=project, zone=zone, filter=ours)
        listed = [each for each in clients.instances.list(request, **OPTIONS) if each.status != "TERMINATED"]
        kinds = {each.name: each.machine_type.rpartition("/")[2] for each in listed}
        return [Left("machine", name, prices.on_demand("gcp", zone, kind)) for name, kind in kinds.items()]

    def disks(zone: str, clients: Clients) -> list[Left]:
        request = compute_v1.ListDisksRequest(project=project, zone=zone, filter=ours)
        return [Left("disk", each.name, each.size_gb * _GB) for each in clients.disks.list(request, **OPTIONS)]

    def addresses(clients: Clients) -> list[Left]:
        request = compute_v1.ListAddressesRequest(project=project, region=cluster.region, filter=ours)
        return [Left("address", each.name, _ADDRESS) for each in clients.addresses.list(request, **OPTIONS)]

    api = Api(project)
    try:
        for zone in zones:
            found += await api.ask(f"machines in {zone}", partial(machines, zone))
            found += await api.ask(f"disks in {zone}", partial(disks, zone))
        found += await api.ask(f"addresses in {cluster.region}", addresses)
    finally:
        await api.close()
    return found
