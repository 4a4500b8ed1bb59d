"""Stack `base`, which `make down` leaves: network, bucket, identities.

All names of its parts are known in advance, and stack `pools` uses these names. So `pools` can be planned before this
stack exists, and needs no access to the state of this stack.
"""

from __future__ import annotations

from typing import Any

from infra import cdk, objects
from infra.gcp.stack import GcpStack
from spotrun.spec import ClusterSpec
from spotrun.spec.names import HEAD, HEAD_PORT, NODE, bucket, group
from spotrun.store import keys

IAP = "35.235.240.0/20"  # the addresses of IAP's tunnels: https://cloud.google.com/iap/docs/using-tcp-forwarding
LOG_DAYS = 90
MTU = 8896  # the most bytes of a packet; without it 1460: https://cloud.google.com/vpc/docs/mtu

BUCKET_ROLE = "roles/storage.objectUser"  # the role of the head, for all objects of the bucket
# What the head may do in addition: what it calls in `spotrun.cloud.gcp`. Only operators ask about quotas. IAM cannot
# narrow lists. It cannot narrow groups either: conditions do not know an instance group manager's name, and in
# Compute's v1 API it cannot have a tag (https://cloud.google.com/iam/docs/conditions-resource-attributes). So the head
# could resize every group of the project, but it cannot change their templates. A separate project for the cluster
# protects other groups.
HEAD_PERMISSIONS = (
    "compute.instanceGroupManagers.get",  # sizes, members, errors
    "compute.instanceGroupManagers.list",  # resize requests
    "compute.instanceGroupManagers.update",  # resize, request, delete and recreate members
    "compute.instances.list",
    "compute.zoneOperations.get",
)
# It reads all of Compute Engine, and it has the permissions for advice about the market. This advice is a preview. If
# Google refused such a permission in a custom role, `make up` would stop, although the head works without the advice.
HEAD_VIEWER = "roles/compute.viewer"
# The head may use these only on this cluster's machines: conditions do know the names of machines.
HEAD_MACHINE_PERMISSIONS = ("compute.instances.delete", "compute.instances.simulateMaintenanceEvent")


class Base(GcpStack):
    """Network, bucket, identities."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id, cluster)
        self.bucket = bucket(cluster, self.project)
        self.subnet = f"projects/{self.project}/regions/{cluster.region}/subnetworks/{cluster.name}-subnet"
        node, head = self._identity(NODE), self._identity(HEAD)
        self._bucket((node, head))
        self._allow_head(head)
        self._firewall(self._network(), node.email, head.email)

    def email(self, role: str) -> str:
        """The service account of a `node` or the `head`."""
        domain, _, project = self.project.rpartition(":")  # a project may be <domain>:<project>
        return f"{self.cluster.name}-{role}@{'.'.join(filter(None, (project, domain)))}.iam.gserviceaccount.com"

    def _identity(self, role: str) -> Any:
        name = f"{self.cluster.name}-{role}"
        return cdk.google("service_account")(
            self, role, account_id=name, display_name=f"spotrun cluster {self.cluster.name}: {role}"
        )

    def _bucket(self, accounts: tuple[Any, ...]) -> None:
        made = cdk.google("storage_bucket")(
            self,
            "bucket",
            name=self.bucket,
            location=self.cluster.region,
            labels=self.labels,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            force_destroy=False,  # Google refuses to delete a bucket that is not empty
            # Off: the shortest retention is 7 days, and every replaced checkpoint would cost for that long.
            soft_delete_policy={"retention_duration_seconds": 0},
            versioning={"enabled": False},
            lifecycle_rule=[
                {
                    "action": {"type": "Delete"},
                    "condition": {"age": LOG_DAYS, "matches_prefix": [keys.JOBS], "matches_suffix": [".log"]},
                },
                {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}},
            ],
        )
        node, head = accounts
        self._grant("head-bucket", made, head, BUCKET_ROLE)
        # Conditions cannot limit lists: they see only the bucket's name. A list shows only the names of objects.
        self._grant("node-list", made, node, "roles/storage.legacyBucketReader")
        for what, (role, expression) in node_rights(self.bucket, self.cluster.name).items():
            condition = {
                "title": f"{self.cluster.name}-node-{what}",
                "description": f"What nodes of spotrun cluster {self.cluster.name} may do: {what}",
                "expression": expression,
            }
            self._grant(f"node-{what}", made, node, role, condition)

    def _grant(self, id: str, bucket: Any, account: Any, role: str, only: dict[str, str] | None = None) -> None:
        cdk.google("storage_bucket_iam_member")(
            self, id, bucket=bucket.name, role=role, member=account.member, condition=only
        )

    def _allow_head(self, head: Any) -> None:
        name = self.cluster.name
        condition = {
            "title": f"{name}-machines",
            "description": f"Only machines of spotrun cluster {name}",
            "expression": 'resource.type == "compute.googleapis.com/Instance" && '
            f'resource.name.extract("/instances/{{name}}").startsWith("{group(name, "")}")',
        }
        for what, permissions, only in (
            ("groups", HEAD_PERMISSIONS, None),
            ("machines", HEAD_MACHINE_PERMISSIONS, condition),
        ):
            role = cdk.google("project_iam_custom_role")(
                self,
                f"head-{what}-role",
                role_id=f"spotrun.{name.replace('-', '_')}.head.{what}",
                title=f"spotrun cluster {name}: head, {what}",
                permissions=list(permissions),
            )
            cdk.google("project_iam_member")(
                self, f"head-{what}", project=self.project, role=role.name, member=head.member, condition=only
            )
        cdk.google("project_iam_member")(
            self, "head-viewer", project=self.project, role=HEAD_VIEWER, member=head.member
        )

    def _network(self) -> Any:
        name = self.cluster.name
        network = cdk.google("compute_network")(
            self, "network", name=f"{name}-network", auto_create_subnetworks=False, mtu=MTU
        )
        subnet = cdk.google("compute_subnetwork")(
            self,
            "subnet",
            name=f"{name}-subnet",
            network=network.id,
            ip_cidr_range=self.cluster.network.cidr,
            private_ip_google_access=True,  # the bucket and Google's other APIs, with no public address and no NAT
        )
        if not self.cluster.network.nat:
            return network
        router = cdk.google("compute_router")(self, "router", name=f"{name}-router", network=network.id)
        cdk.google("compute_router_nat")(
            self,
            "nat",
            name=f"{name}-nat",
            router=router.name,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetwork=[{"name": subnet.id, "source_ip_ranges_to_nat": ["ALL_IP_RANGES"]}],
            # Without this, a machine has 64 ports: Google drops what goes over more connections to one address. Readers
            # of data on a machine with 8 GPUs may need more. https://cloud.google.com/nat/docs/ports-and-addresses
            enable_dynamic_port_allocation=True,
            enable_endpoint_independent_mapping=False,  # Google does not combine this with dynamic ports
            min_ports_per_vm=64,
            log_config={"enable": True, "filter": "ERRORS_ONLY"},
        )
        return network

    def _firewall(self, network: Any, node: str, head: str) -> None:
        """All traffic that may come in. The rules use service accounts, which no machine can choose for itself."""
        ssh = [{"protocol": "tcp", "ports": ["22"]}]
        agents = [{"protocol": "tcp", "ports": [str(HEAD_PORT)]}]
        self._rule(network, "iap-to-head", head, ssh, source_ranges=[IAP])
        self._rule(network, "head-to-nodes", node, ssh, source_service_accounts=[head])
        self._rule(network, "nodes-to-head", head, agents, source_service_accounts=[node])
        self._rule(network, "node-to-node", node, [{"protocol": "all"}], source_service_accounts=[node])

    def _rule(self, network: Any, name: str, target: str, allow: list[dict[str, Any]], **source: list[str]) -> None:
        cdk.google("compute_firewall")(
            self,
            name,
            name=f"{self.cluster.name}-{name}",
            network=network.id,
            direction="INGRESS",
            allow=allow,
            target_service_accounts=[target],
            **source,
        )


def node_rights(bucket: str, cluster: str) -> dict[str, tuple[str, str]]:
    """What a node may do with the bucket's objects. For each kind: a role, and its condition.

    Replacing an object needs the right to delete it, so nodes can create checkpoints but not replace them. The machines
    of a cluster share a service account: a node can write another node's records, but not the head's.
    https://cloud.google.com/iam/docs/conditions-attribute-reference#extract
    """
    mine, root = objects.Cluster(cluster, group(cluster, "")), f"projects/_/buckets/{bucket}/objects/"

    def begins(key: str) -> str:
        return f'resource.name.startsWith("{root}{key}")'

    def job(*kinds: str) -> str:
        found = [f'resource.name.extract("/objects/{keys.JOBS}{{job}}/{kind}/") != ""' for kind in kinds]
        return f"{begins(keys.JOBS)} && ({' || '.join(found)})"

    checkpoints, kept, head = job(keys.CHECKPOINTS), job(keys.KEPT), f'resource.name == "{root}{mine.head}"'
    read = [begins(keys.CODE), begins(keys.DATA), head, f"({checkpoints})", f"({kept})"]
    records = [f"({job(*objects.GROWING)})", *(begins(mine.records(kind)) for kind in objects.RECORDS)]
    return {
        "read": ("roles/storage.objectViewer", " || ".join(read)),
        "checkpoints": ("roles/storage.objectCreator", f'{checkpoints} && !resource.name.endsWith("/manifest.json")'),
        "kept": ("roles/storage.objectCreator", kept),
        "records": ("roles/storage.objectUser", " || ".join(records)),
    }
