"""Stack `pools`, which brings a cluster up: a group for the head, and one for each pool, whose size the head sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra import cdk
from infra.aws import egress, network
from infra.aws.stack import AwsStack
from infra.parts import parts
from spotrun.spec import ClusterSpec, PoolSpec, machine_types
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, NODE, POOL, ROLE, group
from spotrun.store.keys import cluster_key

# interface: IP only. efa: IP and EFA. efa-only: no IP, so no address of the subnet.
Kind = Literal["interface", "efa", "efa-only"]
_ENDING = "30m"  # the longest that a group's machines may take to end; machines with 8 GPUs are slow


@dataclass(frozen=True)
class Interface:
    """A network interface that a machine starts with."""

    card: int  # the index of its network card
    device: int  # Its index on the card. The primary interface is device 0 of card 0.
    kind: Kind  # what it is for


PRIMARY = Interface(0, 0, "interface")


class Pools(AwsStack):
    """The cluster's description for its head, the head, and the pools at size 0.

    Stack `base` exists before this stack. Its parts are found by their names.
    """

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
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
            # An object has at most ten tags, and a cluster may have more labels.
            override_provider={"default_tags": {"tags": {}}},
        )
        self._head()
        for pool in cluster.pools:
            self._pool(pool)

    def _head(self) -> None:
        """One machine. The group replaces it when it is lost.

        The new machine has another address: Auto Scaling refuses templates with a fixed one ("does not support Private
        IP addresses", https://github.com/terraform-aws-modules/terraform-aws-autoscaling/issues/263). Agents and
        operators read the head's address in the bucket.
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
            # A new machine type replaces the head at the next `make up`. Training continues without a head meanwhile.
            instance_refresh={
                "strategy": "Rolling",
                "preferences": {"min_healthy_percentage": 0, "max_healthy_percentage": 100},
            },
        )

    def _pool(self, pool: PoolSpec) -> None:
        spec, name = self.cluster.network, group(self.cluster.name, pool.name)
        placement = None
        if machine_types.aws_can_be_placed(pool.machine):
            # The group exists even if no machine goes into it. AWS deletes no group while one of its machines exists.
            # Machines with 8 GPUs take many minutes to end. Until then, network.placement could not be turned off.
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
            lifecycle={"ignore_changes": ["desired_capacity"]},  # the head sets the size
            mixed_instances_policy={
                "launch_template": {
                    "launch_template_specification": {"launch_template_id": template.id, "version": _version(template)},
                    "override": [{"instance_type": pool.machine}],
                },
                "instances_distribution": distribution(pool),
            },
            placement_group=placement.name if placement and spec.placement else None,
            depends_on=[placement] if placement else None,  # it goes last: older machines may be in it
            # By default, AWS replaces a machine that it may take soon, and moves machines between zones. Here the head
            # decides whether training moves, and the notice is early enough for that.
            capacity_rebalance=False,
            suspended_processes=["AZRebalance"],
            # If AWS chooses which machines go, it takes the youngest: they have the least state.
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
            iam_instance_profile={"name": group(self.cluster.name, role)},
            network_interfaces=[
                _interface(each, self._members[members].id, len(interfaces) == 1) for each in interfaces
            ],
            block_device_mappings=[{"device_name": image.root_device_name, "ebs": volume}],
            metadata_options={
                "http_endpoint": "enabled",
                "http_tokens": "required",
                "http_put_response_hop_limit": 1,
                "instance_metadata_tags": "enabled",  # a machine learns from its tags what it is
            },
            # The group also tags its machines, but maybe only after a machine has read its tags.
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
            wait_for_capacity_timeout="0",  # the head waits, and reports what is missing
            # Terraform waits until the machines have ended: only then can their placement group be deleted.
            timeouts={"delete": _ENDING},
            tag=[{"key": key, "value": value, "propagate_at_launch": True} for key, value in tags.items()],
            **options,
        )

    def _tags(self, pool: str) -> dict[str, str]:
        """The tags of a machine. From some of them, the machine learns what it is."""
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
        """The image to start from: the cluster file's, by id or name, or the account's newest `spotrun-*`."""
        if architecture not in self._images:
            name = self.cluster.image or "spotrun-*"
            wanted = {"image-id" if name.startswith("ami-") else "name": name, "architecture": architecture}
            # An id may name an image of any account.
            owners = None if name.startswith("ami-") else ["self"]
            self._images[architecture] = cdk.aws("data_aws_ami")(
                self,
                f"image-{architecture}",
                most_recent=True,
                owners=owners,
                filter=[{"name": key, "values": [value]} for key, value in wanted.items()],
            )
        return self._images[architecture]


def with_efas(machine: str) -> tuple[Interface, ...]:
    """The interfaces that give a machine all its EFAs, and one address. Raises KeyError if the type has no EFA.

    With one card, the primary interface is the EFA. With several cards, the primary interface has only the address, as
    AWS advises. Each card that can have an EFA gets one without an address. On card 0 it is device 1, because the
    primary interface is device 0. On the other cards it is device 0.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (several cards)
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html (one card)
    """
    found = machine_types.AWS[machine]
    if not found.cards:
        raise KeyError(machine)
    if found.cards == 1:
        return (Interface(0, 0, "efa"),)
    fabric = (Interface(card, 1 if card == 0 else 0, "efa-only") for card in range(found.first_efa, found.cards))
    return (PRIMARY, *fabric)


def distribution(pool: PoolSpec) -> dict[str, Any]:
    """Which machines a group gets: all from one market, at most at the on-demand price."""
    return {
        "on_demand_base_capacity": 0,
        "on_demand_percentage_above_base_capacity": 0 if pool.market == "spot" else 100,
        "spot_allocation_strategy": "capacity-optimized",  # the least likely to be interrupted soon
    }


def _interface(interface: Interface, group: str, alone: bool) -> dict[str, Any]:
    """alone: whether it is the only interface. If not, AWS refuses the key about public addresses.

    The subnets give no public addresses anyway.
    """
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
