"""What the synthesized stacks let a node do with objects: IAM's decisions, as far as these policies need them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.infra.synthesized import Cluster

# (what is done, a key, whether there is such an object): whether that is allowed. The deeds:
# get, list, put, tag, delete, and those of uploads in parts.
Allows = Callable[[str, str, bool], bool]

AWS = {
    "get": "s3:GetObject",
    "list": "s3:ListBucket",
    "put": "s3:PutObject",
    "tag": "s3:PutObjectTagging",
    "delete": "s3:DeleteObject",
    "abort": "s3:AbortMultipartUpload",
}
# https://cloud.google.com/storage/docs/access-control/iam-roles
_READS, _LISTS = "storage.objects.get", "storage.objects.list"
_PARTS = frozenset({"storage.multipartUploads.create", "storage.multipartUploads.abort"})
_CREATES = _PARTS | {"storage.objects.create"}
GCP_ROLES: Mapping[str, frozenset[str]] = {
    "roles/storage.legacyBucketReader": frozenset({"storage.buckets.get", _LISTS}),
    "roles/storage.objectViewer": frozenset({_READS, _LISTS}),
    "roles/storage.objectCreator": _CREATES,
    "roles/storage.objectUser": _CREATES | {_READS, _LISTS, "storage.objects.delete", "storage.objects.update"},
}


def of_aws(cluster: Cluster, role: str) -> Allows:
    """What machines of that role may do."""
    document = json.loads(cluster.base.all("aws_iam_role_policy")[f"{role}-policy"]["policy"])

    def allows(deed: str, key: str, there: bool) -> bool:
        resource = "${aws_s3_bucket.bucket.arn}" + ("" if deed == "list" else f"/{key}")
        found = {
            each["Effect"]
            for each in document["Statement"]
            if AWS[deed] in each["Action"] and any(like(pattern, resource) for pattern in several(each["Resource"]))
        }
        return found == {"Allow"}

    return allows


def of_gcp(cluster: Cluster, role: str) -> Allows:
    """As `of_aws`. Who replaces an object needs the right to delete it."""
    bucket = cluster.base.one("google_storage_bucket")["name"]
    grants = [
        each
        for each in cluster.base.all("google_storage_bucket_iam_member").values()
        if each["member"] == f"${{google_service_account.{role}.member}}"
    ]

    def allows(deed: str, key: str, there: bool) -> bool:
        name = f"projects/_/buckets/{bucket}" + ("" if deed == "list" else f"/objects/{key}")
        wanted = {
            "get": {_READS},
            "list": {_LISTS},
            "put": {"storage.objects.create"} | ({"storage.objects.delete"} if there else set()),
            "tag": set(),  # there are none
            "delete": {"storage.objects.delete"},
            "abort": {"storage.multipartUploads.abort"},
        }[deed]
        held = {
            permission
            for each in grants
            if "condition" not in each or holds(each["condition"]["expression"], name)
            for permission in GCP_ROLES[each["role"]]
        }
        return wanted <= held

    return allows


def holds(expression: str, name: str) -> bool:
    """Whether a condition holds for a resource. https://cloud.google.com/iam/docs/conditions-overview#cel"""
    python = expression.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python)
    names: dict[str, Any] = {"resource": type("Resource", (), {"name": Name(name)})}
    return bool(eval(python, {"__builtins__": {}}, names))


class Name(str):
    """CEL's string, with IAM's own method."""

    __slots__ = ()
    startsWith, endsWith = str.startswith, str.endswith

    def extract(self, template: str) -> str:
        """https://cloud.google.com/iam/docs/conditions-attribute-reference#extract"""
        before, after = re.split(r"\{\w+\}", template)
        _, found, rest = self.partition(before)
        value, end, _ = rest.partition(after) if after else (rest, "x", "")
        return value if found and end else ""


def like(pattern: str, text: str) -> bool:
    """Whether IAM takes a resource or an action for one that this pattern names."""
    parts = [{"*": ".*", "?": "."}.get(part, re.escape(part)) for part in re.split(r"([*?])", pattern)]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def several(value: Any) -> list[str]:
    """What IAM takes one of, or a list."""
    return [value] if isinstance(value, str) else list(value)
