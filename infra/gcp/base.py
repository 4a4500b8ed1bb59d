"""The stack that lives as long as the cluster."""

from __future__ import annotations

from infra.gcp.stack import GcpStack


class Base(GcpStack):
    """Network, bucket, identities."""
