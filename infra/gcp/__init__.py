"""A cluster in Google Cloud."""

from infra.gcp.base import Base
from infra.gcp.options import check
from infra.gcp.pools import Pools

__all__ = ["Base", "Pools", "check"]
