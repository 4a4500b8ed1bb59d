"""A cluster on AWS."""

from infra.aws.base import Base as Base
from infra.aws.pools import Pools as Pools
