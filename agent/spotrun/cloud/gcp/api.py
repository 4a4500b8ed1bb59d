"""Calls to Compute Engine for one project. The clients are made once. Every call ends within a fixed time."""

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
_THREADS = 16  # a zone that hangs blocks a thread for each of its pools, and the other zones need threads too
_REQUEST_SECONDS = 10.0  # the most that one request may take
_RETRY_SECONDS = 20.0  # the most that a request and its retries may take
_CALL_SECONDS = 30.0  # the most that a call may take, which may send several requests
_SETTLE = 5.0  # seconds to wait for the end of an operation; what ends later is seen at the next look
OPTIONS: dict[str, Any] = {
    "retry": Retry(predicate=errors.transient, initial=0.5, maximum=5.0, multiplier=2.0, timeout=_RETRY_SECONDS),
    "timeout": ConstantTimeout(_REQUEST_SECONDS),  # type: ignore[no-untyped-call]
}


@dataclass(frozen=True)
class Clients:
    """One synchronous client for each kind of resource. Call the methods of a client with `**OPTIONS`."""

    instances: compute_v1.InstancesClient  # machines
    groups: compute_v1.InstanceGroupManagersClient  # the managed instance groups of pools
    resizes: compute_v1.InstanceGroupManagerResizeRequestsClient  # requests for flex machines
    operations: compute_v1.ZoneOperationsClient  # changes in a zone
    regions: compute_v1.RegionsClient  # a region's quotas
    projects: compute_v1.ProjectsClient  # the project's quotas
    images: compute_v1.ImagesClient  # machine images
    image_operations: compute_v1.GlobalOperationsClient  # changes of images
    templates: compute_v1.InstanceTemplatesClient  # what the groups' new machines are like
    machine_types: compute_v1.MachineTypesClient  # which machine types a zone offers
    accelerators: compute_v1.AcceleratorTypesClient  # which GPUs a zone offers
    disks: compute_v1.DisksClient  # disks, for the list of what is left
    advice: compute_v1.AdviceClient  # what Google says about the market
    addresses: compute_v1.AddressesClient  # IP addresses, for the list of what is left


class Api:
    """Runs calls to Compute Engine in threads of its own. So a call that hangs blocks none of the event loop's threads.

    If the variable GOOGLE_COMPUTE_CUSTOM_ENDPOINT has a URL, such as `http://127.0.0.1:8080/compute/v1/`, all calls go
    there, without credentials.
    """

    def __init__(self, project: str) -> None:
        self.project = project
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gce")
        self._lock = threading.Lock()
        self._made: Clients | None = None

    async def ask(self, what: str, call: Callable[[Clients], T]) -> T:
        """Run `call` in a thread, and return its result. Raises `CloudError` if the call fails.

        what: what the call does. The message of the error begins with this.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return await loop.run_in_executor(self._threads, lambda: call(self._clients()))
        except Exception as error:  # a client may raise anything, and the head must survive it
            raise errors.explain(error, what, self.project) from error

    async def change(
        self, what: str, request: Any, method: Callable[[Clients], Callable[..., compute_v1.Operation]]
    ) -> None:
        """Send a change of a zone, and wait up to _SETTLE seconds for its end.

        Raises `CloudError` if Google refuses the change within that time.
        """
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
        return settle(operation, lambda **limit: clients.operations.wait(request, **limit))

    def _clients(self) -> Clients:
        with self._lock:
            if self._made is None:
                self._made = _connect()
            return self._made


def settle(operation: compute_v1.Operation, wait: Callable[..., compute_v1.Operation]) -> compute_v1.Operation:
    """Wait up to _SETTLE seconds for the end of an operation, and return its newest state.

    wait: asks Google to answer when the operation has ended. It takes the keyword arguments of a client's method.
    """
    try:
        return wait(retry=None, timeout=ConstantTimeout(_SETTLE))  # type: ignore[no-untyped-call]
    except requests.exceptions.Timeout:
        return operation  # it has not ended, and continues at Google


def check_credentials(project: str) -> None:
    """Raise `CloudError` if this computer has no credentials for Google Cloud."""
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
        warnings.simplefilter("ignore", UserWarning)  # google.auth warns about an operator's own credentials
        default, _ = google.auth.default(scopes=[_SCOPE])
    found: Credentials = default
    return found


def _connect() -> Clients:
    options = ClientOptions(api_endpoint=_endpoint() or None)
    how: dict[str, Any] = {"credentials": credentials(), "client_options": options, "transport": "rest"}
    return Clients(**{name: kind(**how) for name, kind in get_type_hints(Clients).items()})
