"""The clouds. `connect` is the way in; each cloud's module is imported only when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from spotrun.cloud.base import Cloud, Instance, Left, Market, Problem, Shortfall, State
from spotrun.errors import CloudError

if TYPE_CHECKING:
    from spotrun.spec import ClusterSpec

__all__ = ["Cloud", "Instance", "Left", "Market", "Problem", "Shortfall", "State", "account", "ask", "connect"]


T = TypeVar("T")


def account(cluster: ClusterSpec) -> str:
    """Whose cluster it is: the AWS account's id, the Google Cloud project's.

    Raises `CloudError` if there are no credentials here, or not the SDK.
    """
    try:
        if cluster.cloud == "aws":
            from spotrun.cloud import aws

            return aws.account(cluster.region)
        from spotrun.cloud.gcp.api import check_credentials
    except ImportError as error:
        raise _missing(cluster, error) from None
    check_credentials(cluster.project or "")
    return cluster.project or ""


def ask(cluster: ClusterSpec, question: Callable[[Cloud], Awaitable[T]]) -> T:
    """The answer to one question, over a connection of its own. Blocking. Raises `CloudError`."""

    async def put() -> T:
        cloud = connect(cluster)
        try:
            return await question(cloud)
        finally:
            await cloud.close()

    return asyncio.run(put())


def connect(cluster: ClusterSpec) -> Cloud:
    """The cloud of a cluster, seen from its head. Raises `CloudError` if it cannot be reached from here."""
    if cluster.cloud == "local":
        from spotrun.cloud.local.cloud import LocalCloud

        return LocalCloud()
    try:
        if cluster.cloud == "gcp":
            from spotrun.cloud.gcp import GcpCloud

            return GcpCloud(cluster)
        from spotrun.cloud.aws import AwsCloud

        return AwsCloud(cluster)
    except ImportError as error:
        raise _missing(cluster, error) from None


def _missing(cluster: ClusterSpec, error: ImportError) -> CloudError:
    return CloudError(f"cloud {cluster.cloud}: {error}; pip install 'spotrun[{cluster.cloud}]'")
