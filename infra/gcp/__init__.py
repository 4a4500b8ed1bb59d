"""A cluster in Google Cloud."""

from infra.gcp.base import Base as Base
from infra.gcp.options import check as check
from infra.gcp.pools import Pools as Pools
