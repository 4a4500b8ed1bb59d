"""The clouds. Start with `connect`. Each cloud's module is imported only when it is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from spotrun.cloud.base import Cloud, Instance, Left, Problem, Shortfall
from spotrun.errors import CloudError

if TYPE_CHECKING:
    from spotrun.spec import ClusterSpec

__all__ = ["Ask", "Cloud", "Instance", "Left", "Problem", "Shortfall", "account", "asking", "connect"]

T = TypeVar("T")


def account(cluster: ClusterSpec) -> str:
    """The id of the cluster's AWS account or Google Cloud project.

    Raises `CloudError` if this computer has no credentials, or lacks the SDK.
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


class Ask(Protocol):
    """Puts a question to a cloud. Blocking. Raises `CloudError`."""

    def __call__(self, question: Callable[[Cloud], Awaitable[T]]) -> T: ...


@contextlib.contextmanager
def asking(cluster: ClusterSpec) -> Iterator[Ask]:
    """Yields a function that asks the cluster's cloud. All questions use one connection, which the first one opens."""
    opened: list[Cloud] = []

    async def put(question: Callable[[Cloud], Awaitable[T]]) -> T:
        if not opened:
            opened.append(connect(cluster))
        return await question(opened[0])

    with asyncio.Runner() as runner:
        try:
            yield lambda question: runner.run(put(question))
        finally:
            for cloud in opened:
                runner.run(cloud.close())


def connect(cluster: ClusterSpec) -> Cloud:
    """A connection to the cluster's cloud. Raises `CloudError` if this computer cannot reach the cloud.

    Only the head of a local cluster can reach the local cloud.
    """
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
