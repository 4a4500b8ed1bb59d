"""AWS: pools are Auto Scaling groups, nodes their EC2 instances. Needs boto3, which nothing else of spotrun imports."""

from __future__ import annotations

from spotrun.cloud.aws.api import account as account
from spotrun.cloud.aws.cloud import AwsCloud as AwsCloud
