"""boto3's clients, and calls to them in threads, with spotrun's own errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from spotrun.cloud.aws.errors import refusal, tidy
from spotrun.errors import CloudError, SpotrunError

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_fis import FISClient
    from mypy_boto3_service_quotas import ServiceQuotasClient

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(16, thread_name_prefix="aws")  # The head has at most eight calls under way.
# Four attempts; the pause between them doubles, from at most 1 s. Without an answer a call fails after a minute.
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html
_CONFIG = Config(
    connect_timeout=4,
    read_timeout=10,
    retries={"mode": "standard", "total_max_attempts": 4},
    user_agent_extra="spotrun",
)


class Clients:
    """A region's clients. Each is made when it is first needed, by one thread at a time; threads may share clients."""

    def __init__(self, region: str) -> None:
        self.region = region
        self._making = threading.Lock()
        self._session: boto3.session.Session | None = None
        self._made: dict[str, Any] = {}

    @property
    def autoscaling(self) -> AutoScalingClient:
        made: AutoScalingClient = self._client("autoscaling")
        return made

    @property
    def ec2(self) -> EC2Client:
        made: EC2Client = self._client("ec2")
        return made

    @property
    def fis(self) -> FISClient:
        made: FISClient = self._client("fis")
        return made

    @property
    def quotas(self) -> ServiceQuotasClient:
        made: ServiceQuotasClient = self._client("service-quotas")
        return made

    def close(self) -> None:
        with self._making:
            for client in self._made.values():
                client.close()
            self._made.clear()

    def _client(self, service: str) -> Any:
        with self._making:
            if self._session is None:
                self._session = boto3.session.Session(region_name=self.region)
                if self._session.get_credentials() is None:
                    # The metadata server may have failed to answer only this once, so the next call looks again.
                    self._session = None
                    raise NoCredentialsError
            if service not in self._made:
                self._made[service] = self._session.client(service, config=_CONFIG)  # type: ignore[call-overload]
            return self._made[service]


async def ask(work: Callable[..., T], *args: Any) -> T:
    """`work(*args)` in a thread. Raises `CloudError` for what the SDK raises.

    A call that hangs blocks none of the event loop's threads: the head needs these for the bucket.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: call(work, *args))


def call(work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`. Raises `CloudError` for what the SDK raises."""
    try:
        return work(*args)
    except SpotrunError:
        raise
    except (ClientError, BotoCoreError) as error:
        raise refusal(error) from error
    except Exception as error:  # half an answer, or a proxy's page: the head must know that AWS does not answer
        raise CloudError(f"AWS: {type(error).__name__}: {tidy(str(error))}") from error


def account(region: str) -> str:
    """The id of the account that the credentials here belong to. Blocking. Raises `CloudError`."""

    def look() -> str:
        session = boto3.session.Session(region_name=region)
        with closing(session.client("sts", config=_CONFIG)) as client:
            return client.get_caller_identity()["Account"]

    return call(look)
