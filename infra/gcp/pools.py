"""The stack of a cluster that is up: the head's machine, and a group for each pool, whose size the head sets."""

from __future__ import annotations

from typing import Any

from infra import cdk
from infra.gcp import options
from infra.gcp.base import Base
from infra.gcp.stack import GcpStack
from infra.parts import parts
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.machine_types import Placement
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, NODE, POOL, ROLE, bucket_url, group
from spotrun.store.keys import cluster_key

# A version that is known to have `preemption_notice_duration`.
BETA = {"source": "hashicorp/google-beta", "version": "7.36.0"}


class Pools(GcpStack):
    """The cluster's description for its head, the head, and the pools at size 0."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec, base: Base) -> None:
        super().__init__(app, id, cluster)
        self._base = base
        # Terraform chooses the image. Google does not choose it at each machine's start. So a replacement starts
        # from the image of its peers, even after a `make image`. The next `make up` takes the newer image.
        wanted = options.image(cluster.image, self.project)
        self._image: str = cdk.google("data_google_compute_image")(self, "image", **wanted).self_link
        cdk.google("storage_bucket_object")(
            self,
            "cluster",
            bucket=base.bucket,
            name=cluster_key(cluster.name),
            content=cluster.document(),
            content_type="application/json",
        )
        self._head()
        for pool in cluster.pools:
            self._pool(pool)

    def _head(self) -> None:
        template = self._template(
            HEAD,
            self.cluster.head.machine,
            {"provisioning_model": "STANDARD", "on_host_maintenance": "MIGRATE", "automatic_restart": True},
            disk={"disk_type": options.boot_disk(self.cluster.head.machine)},  # as large as the image
            has={},
            shielded_instance_config=_shielded(secure_boot=True),
        )
        self._group(
            HEAD,
            self.cluster.head.zone,
            template,
            target_size=1,
            # A new machine type replaces the head at the next `make up`. Training continues without a head meanwhile.
            update_policy=_updates("PROACTIVE"),
            # The head keeps its address until the group itself is deleted.
            stateful_internal_ip=[{"interface_name": "nic0", "delete_rule": "ON_PERMANENT_INSTANCE_DELETION"}],
        )

    def _pool(self, pool: PoolSpec) -> None:
        kind = options.placement(pool) if self.cluster.network.placement else None
        policy = self._place(pool, kind) if kind else None
        template = self._template(
            pool.name,
            pool.machine,
            options.scheduling(pool, placed=kind is not None),
            disk={"disk_type": options.boot_disk(pool.machine), "disk_size_gb": pool.disk},
            has=parts(pool) | options.terms(pool),
            # NVIDIA's driver is built for the running kernel, so it has no signature that Secure Boot trusts.
            shielded_instance_config=_shielded(secure_boot=not options.has_gpus(pool)),
            guest_accelerator=[pool.accelerator.model_dump()] if pool.accelerator else None,
            resource_policies=[policy.id] if policy and kind == "compact" else None,
            reservation_affinity=options.reservation(pool),
        )
        if pool.notice is not None:
            self._give_notice(template, round(pool.notice))
        self._group(
            pool.name,
            pool.zone,
            template,
            target_size=0,
            lifecycle={"ignore_changes": ["target_size"]},  # the head sets the size
            # An update ends no machine. Later machines use the new template, and between jobs there are no machines.
            update_policy=_updates("OPPORTUNISTIC"),
            instance_lifecycle_policy=options.repair(pool),
            resource_policies={"workload_policy": policy.id} if policy and kind == "workload" else None,
        )

    def _give_notice(self, template: Any, seconds: int) -> None:
        """Have Google wait between the notice of a preemption and the power button.

        This is a preview: only provider google-beta has the argument, and CDKTF's classes do not.
        """
        provider = {"project": self.project, "region": self.cluster.region, "default_labels": self.labels}
        self.add_override("terraform.required_providers.google-beta", BETA)
        self.add_override("provider.google-beta", [provider])
        template.add_override("provider", "google-beta")
        template.add_override("scheduling.preemption_notice_duration", {"seconds": seconds})

    def _place(self, pool: PoolSpec, kind: Placement) -> Any:
        """The policy that puts machines close to each other. Machines for large clusters need one on their group."""
        policy: dict[str, Any] = {"group_placement_policy": {"collocation": "COLLOCATED"}}
        if kind == "workload":
            policy = {"workload_policy": {"type": "HIGH_THROUGHPUT"}}
        name = group(self.cluster.name, pool.name)
        return cdk.google("compute_resource_policy")(self, f"{pool.name}-placement", name=name, **policy)

    def _template(
        self,
        pool: str,
        machine: str,
        schedule: dict[str, Any],
        disk: dict[str, Any],
        has: dict[str, str],
        **arguments: Any,
    ) -> Any:
        role = HEAD if pool == HEAD else NODE
        about = {CLUSTER: self.cluster.name, POOL: pool, ROLE: role}
        labels = {**self.labels, **about}
        return cdk.google("compute_region_instance_template")(
            self,
            f"{pool}-template",
            # Templates cannot change: Terraform makes a new one, then gives it to the group.
            name_prefix=f"{group(self.cluster.name, pool)[:36]}-",  # the provider adds 26 characters, of at most 63
            lifecycle={"create_before_destroy": True},
            region=self.cluster.region,
            machine_type=machine,
            scheduling=schedule,
            labels=labels,
            can_ip_forward=False,
            disk=[{"source_image": self._image, "boot": True, "auto_delete": True, "labels": labels, **disk}],
            network_interface=[{"subnetwork": self._base.subnet, "nic_type": "GVNIC"}],  # no access_config: not public
            # IAM roles limit the rights, not scopes.
            service_account={"email": self._base.email(role), "scopes": ["cloud-platform"]},
            metadata={
                **about,
                **has,
                BUCKET: bucket_url(self.cluster, self.project),
                "enable-oslogin": "TRUE",
                "block-project-ssh-keys": "TRUE",
            },
            **arguments,
        )

    def _group(self, pool: str, zone: str, template: Any, **arguments: Any) -> None:
        name = group(self.cluster.name, pool)
        cdk.google("compute_instance_group_manager")(
            self,
            f"{pool}-group",
            name=name,
            base_instance_name=name,
            zone=zone,
            version=[{"instance_template": template.self_link}],
            wait_for_instances=False,
            **arguments,
        )


def _updates(kind: str) -> dict[str, Any]:
    """Machines keep their names through updates, and no machine ever exists twice."""
    return {
        "type": kind,
        "minimal_action": "REPLACE",
        "replacement_method": "RECREATE",
        "max_surge_fixed": 0,
        "max_unavailable_fixed": 1,
    }


def _shielded(secure_boot: bool) -> dict[str, bool]:
    return {"enable_vtpm": True, "enable_integrity_monitoring": True, "enable_secure_boot": secure_boot}
