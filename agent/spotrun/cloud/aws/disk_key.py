"""The key with which an account encrypts disks. Operators ask before `make up`; a head never does.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetEbsDefaultKmsKeyId.html
"""

from __future__ import annotations

from contextlib import closing

from spotrun.cloud.aws.api import Clients, call

AWS_OWN = "alias/aws/ebs"  # All services of the account may use this key.


def default(region: str) -> str:
    """The alias or ARN of the key that encrypts a disk if nobody names one. Blocking. Raises `CloudError`."""
    with closing(Clients(region)) as clients:
        return call(lambda: clients.ec2.get_ebs_default_kms_key_id())["KmsKeyId"]
