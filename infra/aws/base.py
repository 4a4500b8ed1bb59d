"""Stack `base`, which `make down` leaves: network, bucket, identities.

Stack `pools` finds all parts of this stack by their names, so it needs no access to the state of this stack.
"""

from __future__ import annotations

from typing import Any

from infra import cdk
from infra.aws import identity
from infra.aws.network import Network
from infra.aws.stack import AwsStack
from spotrun.spec import ClusterSpec
from spotrun.store.keys import LOG_TAG

LOG_DAYS = 90


class Base(AwsStack):
    """Network, bucket, identities."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id, cluster)
        Network(self)
        identity.make(self, self._bucket().arn)

    def _bucket(self) -> Any:
        # Without force_destroy AWS refuses to delete a bucket that is not empty.
        bucket = cdk.aws("s3_bucket")(self, "bucket", bucket=self.bucket, force_destroy=False)
        cdk.aws("s3_bucket_public_access_block")(
            self,
            "bucket-private",
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
        )
        cdk.aws("s3_bucket_ownership_controls")(
            self, "bucket-owner", bucket=bucket.id, rule={"object_ownership": "BucketOwnerEnforced"}
        )
        cdk.aws("s3_bucket_server_side_encryption_configuration")(
            self,
            "bucket-encryption",
            bucket=bucket.id,
            rule=[{"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}],
        )
        ((key, value),) = LOG_TAG.items()
        cdk.aws("s3_bucket_lifecycle_configuration")(
            self,
            "bucket-lifecycle",
            bucket=bucket.id,
            rule=[
                {
                    "id": "logs",
                    "status": "Enabled",
                    "filter": [{"tag": [{"key": key, "value": value}]}],
                    "expiration": [{"days": LOG_DAYS}],
                },
                {
                    "id": "uploads",
                    "status": "Enabled",
                    "filter": [{"prefix": ""}],
                    "abort_incomplete_multipart_upload": [{"days_after_initiation": 1}],
                },
            ],
        )
        self._refuse_plaintext(bucket)
        return bucket

    def _refuse_plaintext(self, bucket: Any) -> None:
        refusal = {
            "Sid": "OnlyTLS",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [bucket.arn, f"{bucket.arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
        cdk.aws("s3_bucket_policy")(self, "bucket-policy", bucket=bucket.id, policy=identity.document([refusal]))
