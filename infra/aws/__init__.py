"""A cluster on AWS."""

from infra.aws.base import Base
from infra.aws.pools import Pools

__all__ = ["Base", "Pools"]
