"""AWS: pools are Auto Scaling groups, nodes their EC2 instances. Needs boto3, which nothing else of spotrun imports."""

from __future__ import annotations

from spotrun.cloud.aws.client import AwsCloud
from spotrun.cloud.aws.sdk import account

__all__ = ["AwsCloud", "account"]
