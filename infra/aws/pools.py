"""The stack of a cluster that is up: the head's machine, and for each pool the group that the head will size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infra import cdk
from infra.aws import egress, network
from infra.aws.base import Base
from infra.aws.identity import profile
from infra.aws.interfaces import PRIMARY, Interface, with_efas
from infra.aws.stack import AwsStack
from infra.parts import parts
from spotrun.spec import ClusterSpec, PoolSpec, machine_types
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, NODE, POOL, ROLE, group
from spotrun.store.keys import cluster_key

_ENDING = "30m"  # how long a group's machines may take to end; those with 8 GPUs take their time


class Pools(AwsStack):
    """The cluster's description for its head, the head, and the pools at size 0.

    What is in `base`, which is there before this, is found by its names.
    """

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec, base: Base) -> None:
        super().__init__(app, id, cluster)
        self._images: dict[str, Any] = {}  # by architecture
        self._subnets: dict[str, Any] = {}  # by zone
        self._members = {
            what: self.find("security_group", f"{what}-members", network.label(cluster.name, what))
            for what in (network.NODES, network.HEAD)
        }
        cdk.aws("s3_object")(
            self,
            "cluster",
            bucket=self.bucket,
            key=cluster_key(cluster.name),
            content=cluster.document(),
            content_type="application/json",
            # An object takes ten tags at the most, and a cluster may have more labels.
            override_provider={"default_tags": {"tags": {}}},
        )
        self._head()
        for pool in cluster.pools:
            self._pool(pool)

    def _head(self) -> None:
        """One machine that the group makes anew when it is lost.

        Its address changes then: Auto Scaling refuses templates that fix it ("does not support Private IP addresses",
        https://github.com/terraform-aws-modules/terraform-aws-autoscaling/issues/263). Who looks for the head finds
        its address in the bucket.
        """
        tags = self._tags(HEAD)
        template = self._template(HEAD, self.cluster.head.machine, None, network.HEAD, (PRIMARY,), tags)
        self._group(
            HEAD,
            self.cluster.head.zone,
            tags,
            min_size=1,
            max_size=1,
            desired_capacity=1,
            depends_on=egress.make(self, self._subnet(self.cluster.head.zone)),
            launch_template={"id": template.id, "version": _version(template)},
            # A head of another machine type comes with the next `make up`; training goes on without one meanwhile.
            instance_refresh={
                "strategy": "Rolling",
                "preferences": {"min_healthy_percentage": 0, "max_healthy_percentage": 100},
            },
        )

    def _pool(self, pool: PoolSpec) -> None:
        spec, name = self.cluster.network, group(self.cluster.name, pool.name)
        placement = None
        if spec.placement and machine_types.aws_can_be_placed(pool.machine):
            placement = cdk.aws("placement_group")(self, f"{pool.name}-placement", name=name, strategy="cluster")
        interfaces = with_efas(pool.machine) if spec.efa else (PRIMARY,)
        tags = self._tags(pool.name) | parts(pool, sum(each.kind != "interface" for each in interfaces))
        template = self._template(pool.name, pool.machine, pool.disk, network.NODES, interfaces, tags)
        self._group(
            pool.name,
            pool.zone,
            tags,
            min_size=0,
            max_size=pool.max,
            desired_capacity=0,
            lifecycle={"ignore_changes": ["desired_capacity"]},  # how many there are now is the head's to say
            mixed_instances_policy={
                "launch_template": {
                    "launch_template_specification": {"launch_template_id": template.id, "version": _version(template)},
                    "override": [{"instance_type": pool.machine}],
                },
                "instances_distribution": distribution(pool),
            },
            placement_group=placement.name if placement else None,
            # AWS replaces machines before they are lost, and moves them between zones, as it sees fit. Whether the
            # training is worth moving is the head's to say; the notice is enough for it.
            capacity_rebalance=False,
            suspended_processes=["AZRebalance"],
            # Where a size is lowered without a word on who goes: those whose state is the youngest.
            termination_policies=["NewestInstance"],
        )

    def _template(
        self,
        pool: str,
        machine: str,
        disk: int | None,
        members: str,
        interfaces: Sequence[Interface],
        tags: dict[str, str],
    ) -> Any:
        """disk: in GB; None: as large as the image."""
        role = HEAD if pool == HEAD else NODE
        image = self._image(machine_types.aws_architecture(machine))
        volume = {"volume_type": "gp3", "volume_size": disk, "encrypted": "true", "delete_on_termination": "true"}
        return cdk.aws("launch_template")(
            self,
            f"{pool}-template",
            name=group(self.cluster.name, pool),
            update_default_version=True,
            image_id=image.id,
            instance_type=machine,
            iam_instance_profile={"name": profile(self.cluster.name, role)},
            network_interfaces=[
                _interface(each, self._members[members].id, len(interfaces) == 1) for each in interfaces
            ],
            block_device_mappings=[{"device_name": image.root_device_name, "ebs": volume}],
            metadata_options={
                "http_endpoint": "enabled",
                "http_tokens": "required",
                "http_put_response_hop_limit": 1,
                "instance_metadata_tags": "enabled",  # by them a machine knows what it is
            },
            # The group tags machines as well, but only these tags are there for sure when a machine first looks.
            tag_specifications=[
                {"resource_type": kind, "tags": tags} for kind in ("instance", "volume", "network-interface")
            ],
        )

    def _group(self, pool: str, zone: str, tags: dict[str, str], **options: Any) -> None:
        cdk.aws("autoscaling_group")(
            self,
            f"{pool}-group",
            name=group(self.cluster.name, pool),
            vpc_zone_identifier=[self._subnet(zone).id],
            health_check_type="EC2",
            wait_for_capacity_timeout="0",  # the head waits, and tells what is missing
            timeouts={
                "delete": _ENDING
            },  # of the group's machines first: what they are placed by can only go after them
            tag=[{"key": key, "value": value, "propagate_at_launch": True} for key, value in tags.items()],
            **options,
        )

    def _tags(self, pool: str) -> dict[str, str]:
        """What a machine reads about itself is among them."""
        return {
            **self.tags,
            "Name": group(self.cluster.name, pool),
            CLUSTER: self.cluster.name,
            BUCKET: f"s3://{self.bucket}",
            POOL: pool,
            ROLE: HEAD if pool == HEAD else NODE,
        }

    def _subnet(self, zone: str) -> Any:
        if zone not in self._subnets:
            name = network.label(self.cluster.name, network.PRIVATE, zone)
            self._subnets[zone] = self.find("subnet", f"subnet-{zone}", name)
        return self._subnets[zone]

    def _image(self, architecture: str) -> Any:
        """The image to start from: the cluster file's, by id or by name, or the newest of the account's `spotrun-*`."""
        if architecture not in self._images:
            name = self.cluster.image or "spotrun-*"
            wanted = {"image-id" if name.startswith("ami-") else "name": name, "architecture": architecture}
            # An id may be anyone's: whoever writes one knows whose it is.
            owners = None if name.startswith("ami-") else ["self"]
            self._images[architecture] = cdk.aws("data_aws_ami")(
                self,
                f"image-{architecture}",
                most_recent=True,
                owners=owners,
                filter=[{"name": key, "values": [value]} for key, value in wanted.items()],
            )
        return self._images[architecture]


def distribution(pool: PoolSpec) -> dict[str, Any]:
    """Which machines a group is to get: all from one market, at most at the on-demand price."""
    return {
        "on_demand_base_capacity": 0,
        "on_demand_percentage_above_base_capacity": 0 if pool.market == "spot" else 100,
        "spot_allocation_strategy": "capacity-optimized",  # the least likely to be taken away soon
    }


def _interface(interface: Interface, group: str, alone: bool) -> dict[str, Any]:
    """alone: EC2 knows the word on public addresses for machines with one interface; the subnets give none anyway."""
    return {
        "device_index": interface.device,
        "network_card_index": interface.card,
        "interface_type": interface.kind,
        "security_groups": [group],
        "delete_on_termination": "true",
        **({"associate_public_ip_address": "false"} if alone else {}),
    }


def _version(template: Any) -> str:
    return cdk.Token.as_string(template.latest_version)
