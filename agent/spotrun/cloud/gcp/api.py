"""google-cloud-compute for one project. Clients are made once, and every call ends in bounded time."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import google.auth
import google.auth.exceptions
import requests
from google.api_core.client_options import ClientOptions
from google.api_core.retry import Retry
from google.api_core.timeout import ConstantTimeout
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud import compute_v1

from spotrun.cloud.gcp import errors

T = TypeVar("T")

ENDPOINT = "GOOGLE_COMPUTE_CUSTOM_ENDPOINT"  # the variable of Terraform's google provider
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_THREADS = 16  # a zone that hangs takes one for each of its pools; other zones must not wait
_ATTEMPT = 10.0  # seconds for one request
_PATIENCE = 20.0  # seconds for a request with its retries
_LIMIT = 30.0  # seconds for a call, which may have several pages
_SETTLE = 5.0  # seconds to wait for an operation; the head looks again anyway
OPTIONS: dict[str, Any] = {
    "retry": Retry(predicate=errors.transient, initial=0.5, maximum=5.0, multiplier=2.0, timeout=_PATIENCE),
    "timeout": ConstantTimeout(_ATTEMPT),  # type: ignore[no-untyped-call]
}


@dataclass(frozen=True)
class Clients:
    """Synchronous clients over REST; call their methods with `**OPTIONS`."""

    instances: compute_v1.InstancesClient
    groups: compute_v1.InstanceGroupManagersClient
    operations: compute_v1.ZoneOperationsClient
    regions: compute_v1.RegionsClient
    projects: compute_v1.ProjectsClient
    images: compute_v1.ImagesClient
    image_operations: compute_v1.GlobalOperationsClient
    templates: compute_v1.InstanceTemplatesClient
    machines: compute_v1.MachineTypesClient
    accelerators: compute_v1.AcceleratorTypesClient
    disks: compute_v1.DisksClient
    addresses: compute_v1.AddressesClient


class Api:
    """Calls to Compute Engine, in separate threads, so that a call that hangs does not block the loop's own threads.

    With GOOGLE_COMPUTE_CUSTOM_ENDPOINT (`http://127.0.0.1:8080/compute/v1/`) calls go there, without credentials.
    """

    def __init__(self, project: str) -> None:
        self.project = project
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gce")
        self._lock = threading.Lock()
        self._made: Clients | None = None

    async def ask(self, what: str, call: Callable[[Clients], T]) -> T:
        """The result of `call`, which runs in a thread. Raises `CloudError` that begins with `what`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LIMIT):
                return await loop.run_in_executor(self._threads, lambda: call(self._clients()))
        except Exception as error:  # a client may raise anything, and the head must survive it
            raise errors.explain(error, what, self.project) from error

    async def change(
        self, what: str, request: Any, method: Callable[[Clients], Callable[..., compute_v1.Operation]]
    ) -> None:
        """Send a change of a zone, and wait a little for its end. Raises `CloudError` if Google refuses it by then."""
        request.request_id = str(uuid.uuid4())  # Google executes requests with the same id only once
        operation = await self.ask(what, lambda clients: method(clients)(request, **OPTIONS))
        if operation.status != compute_v1.Operation.Status.DONE:
            operation = await self.ask(what, functools.partial(self._settle, request.zone, operation))
        for error in operation.error.errors:
            raise errors.refusal(what, error.code, error.message)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        clients, self._made = self._made, None
        for client in vars(clients).values() if clients else ():
            client.transport.close()

    def _settle(self, zone: str, operation: compute_v1.Operation, clients: Clients) -> compute_v1.Operation:
        request = compute_v1.WaitZoneOperationRequest(project=self.project, zone=zone, operation=operation.name)
        limit = ConstantTimeout(_SETTLE)  # type: ignore[no-untyped-call]
        try:
            return clients.operations.wait(request, retry=None, timeout=limit)
        except requests.exceptions.Timeout:  # Google answers when the operation ends; the operation continues
            return operation

    def _clients(self) -> Clients:
        with self._lock:
            if self._made is None:
                self._made = _connect()
            return self._made


def check_credentials(project: str) -> None:
    """Raise `CloudError` if there are none here."""
    try:
        credentials()
    except google.auth.exceptions.GoogleAuthError as error:
        raise errors.explain(error, "signing in", project) from error


def _endpoint() -> str:
    return os.environ.get(ENDPOINT, "").rstrip("/").removesuffix("/compute/v1")


def credentials() -> Credentials:
    """The credentials of this computer. Raises `google.auth.exceptions.GoogleAuthError`."""
    if _endpoint():
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    for name in ("google.auth", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)  # we report such problems ourselves, if they matter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns about personal credentials, which operators have
        default, _ = google.auth.default(scopes=[_SCOPE])
    found: Credentials = default
    return found


def _connect() -> Clients:
    options = ClientOptions(api_endpoint=_endpoint() or None)
    how: dict[str, Any] = {"credentials": credentials(), "client_options": options, "transport": "rest"}
    return Clients(**{name: kind(**how) for name, kind in get_type_hints(Clients).items()})
