"""The process behind `motoserver`: moto's server, and what moto 5.2 lacks of AWS.

    placement scores            of spot machines; see `moto_scores`
    placement groups            create, describe, delete; refused while machines are in them
    the default key of disks    moto knows how to change it, but not how to tell it
    spot interruptions          FIS's aws:ec2:send-spot-instance-interruptions does nothing in moto
    scaling groups              their machines are spot if the policy says so, are in the placement group, and failed
                                launches (see `motoserver.Moto.ration`) show in DescribeScalingActivities; an update
                                changes the placement group, and keeps the policy
    EC2's quotas                moto has only those of VPCs
    machine images              know their architecture; a volume without a size is as large as its image
    security groups' rules      keep their descriptions, whatever it is that they let in
    launch templates            hold no tags of the template itself
    bucket policies             moto takes statements with conditions for unconditional: here they are passed over

Reads questions as lines of JSON on stdin, and ends with it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from moto.autoscaling.models import FakeAutoScalingGroup, autoscaling_backends
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.responses import EC2Response
from moto.ec2.responses._base_response import EC2BaseResponse
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, generic_filter
from moto.fis.models import FISBackend
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket
from moto.server import ThreadedMotoServer
from moto.servicequotas.models import ServiceQuotasBackend
from moto.servicequotas.responses import ServiceQuotasResponse

from tests.fakes import moto_scores

ACCOUNT = "123456789012"
NOTICE = 0.0  # seconds from a spot interruption's notice to its end
RATIONS: dict[str, tuple[int | None, str]] = {}  # a zone: machines at most, and why not more
NOTICES: list[dict[str, Any]] = []
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html; in vCPUs
QUOTAS: dict[str, tuple[str, float]] = {
    "L-1216C47A": ("Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", 64.0),
    "L-34B43A08": ("All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", 64.0),
    "L-DB2E81BA": ("Running On-Demand G and VT instances", 64.0),
    "L-3819A6DF": ("All G and VT Spot Instance Requests", 64.0),
    "L-417A185B": ("Running On-Demand P instances", 64.0),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", 64.0),
    "L-C4BD4855": ("All P5 Spot Instance Requests", 64.0),
}


class Placements(EC2BaseResponse):
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html and its neighbours."""

    def create_placement_group(self) -> ActionResult:
        name, groups = self._get_param("GroupName"), placement_groups(self.ec2_backend)
        self.error_on_dryrun()
        if name in groups:
            raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        group = PlacementGroup(self.ec2_backend, name, self._get_param("Strategy") or "cluster")
        groups[name] = group
        group.add_tags(self._parse_tag_specification("placement-group").get("placement-group", {}))
        return ActionResult({"PlacementGroup": group.shown})

    def describe_placement_groups(self) -> ActionResult:
        groups = placement_groups(self.ec2_backend)
        names, ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
        for name in names:
            _known(groups, name)
        found = [
            group
            for group in groups.values()
            if (not names or group.group_name in names) and (not ids or group.id in ids)
        ]
        shown = [group.shown for group in generic_filter(self._filters_from_querystring(), found)]
        return ActionResult({"PlacementGroups": shown})

    def delete_placement_group(self) -> ActionResult:
        name, groups = self._get_param("GroupName"), placement_groups(self.ec2_backend)
        self.error_on_dryrun()
        _known(groups, name)
        if any(each.placement.group_name == name and each.state != "terminated" for each in _machines(self.region)):
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
            )
        del groups[name]
        return EmptyResult()


class PlacementGroup(TaggedEC2Resource):
    def __init__(self, backend: Any, name: str, strategy: str) -> None:
        self.ec2_backend, self.group_name, self.strategy = backend, name, strategy
        self.id = f"pg-0{uuid4().hex[:16]}"

    @property
    def shown(self) -> dict[str, Any]:
        region, account = self.ec2_backend.region_name, self.ec2_backend.account_id
        return {
            "GroupName": self.group_name,
            "State": "available",
            "Strategy": self.strategy,
            "GroupId": self.id,
            "Tags": self.get_tags(),
            "GroupArn": f"arn:aws:ec2:{region}:{account}:placement-group/{self.group_name}",
        }


def placement_groups(backend: Any) -> dict[str, PlacementGroup]:
    groups: dict[str, PlacementGroup] = vars(backend).setdefault("placement_groups", {})
    return groups


def _known(groups: dict[str, PlacementGroup], name: str) -> None:
    if name not in groups:
        raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def register_image(self: Any) -> ActionResult:
    image = self.ec2_backend.register_image(self._get_param("Name"), self._get_param("Description", ""))
    image.architecture = self._get_param("Architecture") or "i386"  # AWS's default
    image.virtualization_type = self._get_param("VirtualizationType") or "hvm"
    image.root_device_name = self._get_param("RootDeviceName") or image.root_device_name
    image.root_device_type = "ebs"
    return ActionResult({"ImageId": image.id})


def get_ebs_default_kms_key_id(self: Any) -> ActionResult:
    return ActionResult({"KmsKeyId": getattr(self.ec2_backend, "default_kms_key_id", None) or "alias/aws/ebs"})


class Disks:
    add = Instance.add_block_device

    @staticmethod
    def add_block_device(
        instance: Any, size: int | None, path: str, snapshot: str | None, *rest: Any, **more: Any
    ) -> None:
        """15 GB is the size of each image's snapshot in moto."""
        Disks.add(instance, size or (None if snapshot else 15), path, snapshot, *rest, **more)


class Rules:
    init = SecurityGroupRule.__init__

    @staticmethod
    def __init__(rule: Any, *arguments: Any, **options: Any) -> None:
        Rules.init(rule, *arguments, **options)
        parts = [each for each in (*arguments, *options.values()) if isinstance(each, dict)]
        rule.said = next((each["Description"] for each in parts if "Description" in each), None)


class Templates:
    create = EC2Backend.create_launch_template

    @staticmethod
    def create_launch_template(backend: Any, name: str, description: str, data: dict[str, Any], tags: Any) -> Any:
        specifications = data.pop("TagSpecifications", [])
        if kept := [each for each in specifications if each["ResourceType"] != "launch-template"]:
            data["TagSpecifications"] = kept
        return Templates.create(backend, name, description, data, tags)


def get_permission(bucket: Any, action: str, resource: str) -> Any:
    statements = json.loads(bucket.policy or "{}").get("Statement", [])
    unconditional = [each for each in statements if "Condition" not in each]
    if not unconditional:
        return PermissionResult.NEUTRAL
    return IAMPolicy(json.dumps({"Version": "2012-10-17", "Statement": unconditional})).is_action_permitted(
        action, resource
    )


class Launches:
    """What a scaling group does to get its machines."""

    launch = FakeAutoScalingGroup.replace_autoscaling_group_instances

    update = AutoScalingResponse.update_auto_scaling_group

    @staticmethod
    def replace(group: Any, wanted: int, tags: dict[str, str]) -> None:
        """As many machines as the zone has, and a note of those it has not."""
        zone = group.availability_zones[0]
        free = room(group.region, zone)
        count = wanted if free is None else min(wanted, free)
        before = set(group.instance_states)
        if count:
            Launches.launch(group, count, tags)
        for state in group.instance_states:
            if state in before:
                continue
            state.instance.lifecycle = "spot" if _is_spot(group.mixed_instances_policy) else None
            state.instance.placement.group_name = group.placement_group or ""
            _note(group, f"Launching a new EC2 instance: {state.instance.id}", "Successful")
        if count < wanted:
            why = RATIONS[zone][1]
            _note(group, f"Launching a new EC2 instance.  Status Reason: {why}", "Failed", why)

    def update_auto_scaling_group(self: Any) -> Any:
        """What a request leaves out stays: moto would forget the policy. It also ignores a new placement group.

        An empty name takes the group out of its placement group.
        """
        group = self.autoscaling_backend.autoscaling_groups[self._get_param("AutoScalingGroupName")]
        policy, placement = group.mixed_instances_policy, self._get_param("PlacementGroup")
        answer = Launches.update(self)
        group.mixed_instances_policy = group.mixed_instances_policy or policy
        group.placement_group = group.placement_group if placement is None else placement or None
        return answer

    def describe_scaling_activities(self: Any) -> ActionResult:
        """Newest first, as AWS has them; with paging."""
        name = self._get_param("AutoScalingGroupName")
        groups = self.autoscaling_backend.describe_auto_scaling_groups([name] if name else [])
        notes = [note for group in groups for note in reversed(_notes(group))]
        start, size = int(self._get_param("NextToken") or 0), self._get_int_param("MaxRecords", 100)
        more = str(start + size) if start + size < len(notes) else None
        return ActionResult({"Activities": notes[start : start + size], "NextToken": more})


def room(region: str, zone: str) -> int | None:
    """How many machines more the zone has; None: any number."""
    most = RATIONS.get(zone, (None, ""))[0]
    if most is None:
        return None
    groups = autoscaling_backends[ACCOUNT][region].autoscaling_groups.values()
    return max(0, most - sum(len(group.instance_states) for group in groups if zone in group.availability_zones))


def _is_spot(policy: Any) -> bool:
    share = (policy or {}).get("InstancesDistribution", {}).get("OnDemandPercentageAboveBaseCapacity", 100)
    return int(share) == 0


def _note(group: Any, description: str, status: str, message: str | None = None) -> None:
    now = datetime.now(UTC)
    _notes(group).append(
        {
            "ActivityId": str(uuid4()),
            "AutoScalingGroupName": group.name,
            "Description": description,
            "Cause": f"At {now:%Y-%m-%dT%H:%M:%SZ} an instance was started in response to a difference between desired"
            " and actual capacity.",
            "StartTime": now,
            "EndTime": now,
            "StatusCode": status,
            "StatusMessage": message,
            "Progress": 100,
            "AutoScalingGroupARN": group.arn,
        }
    )


def _notes(group: Any) -> list[dict[str, Any]]:
    notes: list[dict[str, Any]] = vars(group).setdefault("activities", [])
    return notes


class Interruptions:
    """https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions"""

    start = FISBackend.start_experiment

    def start_experiment(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        shown: dict[str, Any] = Interruptions.start(self, *arguments, **options)
        experiment = self.experiments[shown["id"]]
        for action in experiment.actions.values():
            if action["actionId"] != "aws:ec2:send-spot-instance-interruptions":
                continue
            target = experiment.targets[action["targets"]["SpotInstances"]]
            found = [each for each in _machines(self.region_name) if _is_target(each, target)]
            if not found:
                experiment.status = "failed"
            for instance in found:
                NOTICES.append({"instance": instance.id, "at": time.time() + NOTICE})
                threading.Timer(NOTICE, _take, [self.region_name, instance]).start()
        return experiment.to_dict(tags=shown.get("tags"))  # type: ignore[no-any-return]


def _is_target(instance: Any, target: dict[str, Any]) -> bool:
    """By address or by tags, as a template has either; running spot machines only."""
    tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
    arns = target.get("resourceArns")
    named = any(arn.endswith(f"/{instance.id}") for arn in arns or [])
    tagged = not arns and target.get("resourceTags", {}).items() <= tags.items()
    return instance.lifecycle == "spot" and instance.state == "running" and (named or tagged)


def _take(region: str, instance: Any) -> None:
    """The end of a spot machine; its group replaces it."""
    if instance.state == "terminated":
        return
    instance.terminate()
    reason = "Server.SpotInstanceTermination"
    instance.state_reason = StateReason(f"{reason}: Spot instance termination", reason)
    autoscaling_backends[ACCOUNT][region].notify_terminate_instances([instance.id])


def _machines(region: str) -> list[Any]:
    return list(ec2_backends[ACCOUNT][region].all_instances())


class Quotas:
    get = ServiceQuotasBackend.get_service_quota

    def get_service_quota(self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
        if service_code == "ec2" and quota_code in QUOTAS:
            return _quota(self.region_name, quota_code)
        return Quotas.get(self, service_code, quota_code)

    def list_service_quotas(self: Any) -> str:
        service, start = json.loads(self.body).get("ServiceCode"), int(json.loads(self.body).get("NextToken") or 0)
        codes = sorted(QUOTAS)[start : start + 3] if service == "ec2" else []  # three at a time, so that pages are met
        more = {"NextToken": str(start + 3)} if service == "ec2" and start + 3 < len(QUOTAS) else {}
        return json.dumps({"Quotas": [_quota(self.region, code) for code in codes], **more})


def _quota(region: str, code: str) -> dict[str, Any]:
    name, value = QUOTAS[code]
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:ec2/{code}",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": value,
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


def extend() -> None:
    EC2_RESOURCE_TO_PREFIX["placement-group"] = "pg"
    EC2_PREFIX_TO_RESOURCE["pg"] = "placement-group"
    for name in ("create", "describe", "delete"):
        action = f"{name}_placement_group" + ("s" if name == "describe" else "")
        setattr(EC2Response, action, getattr(Placements, action))
    _set(
        EC2Response,
        get_ebs_default_kms_key_id=get_ebs_default_kms_key_id,
        register_image=register_image,
        get_spot_placement_scores=moto_scores.Scores.get_spot_placement_scores,
    )
    _set(Instance, add_block_device=Disks.add_block_device)
    _set(EC2Backend, create_launch_template=Templates.create_launch_template)
    _set(SecurityGroupRule, __init__=Rules.__init__, description=property(lambda rule: rule.said))
    _set(FakeBucket, get_permission=get_permission)
    _set(FakeAutoScalingGroup, replace_autoscaling_group_instances=Launches.replace)
    _set(
        AutoScalingResponse,
        describe_scaling_activities=Launches.describe_scaling_activities,
        update_auto_scaling_group=Launches.update_auto_scaling_group,
    )
    _set(FISBackend, start_experiment=Interruptions.start_experiment)
    _set(ServiceQuotasBackend, get_service_quota=Quotas.get_service_quota)
    _set(ServiceQuotasResponse, list_service_quotas=Quotas.list_service_quotas)


def _set(owner: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def answer(region: str, question: dict[str, Any]) -> object:
    if "notices" in question:
        return NOTICES
    if "scores" in question:
        moto_scores.SCORES.update(question["scores"])
    if "configurations" in question:
        moto_scores.LIMIT["new"] = question["configurations"]
    if "address" in question:
        name, address = question["address"]
        for machine in (each for each in _machines(region) if each.id == name):
            machine.nics[0].private_ip_address = address
    if "quota" in question:
        code, value = question["quota"]
        QUOTAS[code] = (QUOTAS[code][0], value)
    if "ration" in question:
        zone, machines, message = question["ration"]
        RATIONS[zone] = (machines, message)
        for group in autoscaling_backends[ACCOUNT][region].autoscaling_groups.values():
            group.set_desired_capacity(group.desired_capacity)  # groups try again
    return None


def main(region: str, notice: float) -> None:
    global NOTICE
    NOTICE = notice
    extend()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(region, json.loads(line))), flush=True)
    server.stop()
