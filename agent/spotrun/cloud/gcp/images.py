"""Machine images: which exist, which were baked, what uses them. Only operators call this, never a head."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from google.cloud import compute_v1

from spotrun.cloud.base import Image
from spotrun.cloud.gcp import errors
from spotrun.cloud.gcp.api import OPTIONS, Api, Clients, settle
from spotrun.errors import GoneError

T = TypeVar("T")

FAMILY = "spotrun"  # images/spotrun.pkr.hcl

_PATH = re.compile(r"projects/([^/]+)/global/images/(family/)?([^/]+)")


def exists(project: str, path: str) -> bool:
    """Whether the image exists. Blocking. Raises `CloudError`.

    project: the cluster's project. Only error messages use it. path: projects/<project>/global/images/<name>, or
    projects/<project>/global/images/family/<name>.
    """
    match = _PATH.fullmatch(path)
    assert match is not None, path  # the path is from a stack, which has checked it
    owner, family, name = match.groups()

    def call(clients: Clients) -> compute_v1.Image:
        if family:
            request = compute_v1.GetFromFamilyImageRequest(project=owner, family=name)
            return clients.images.get_from_family(request, **OPTIONS)
        return clients.images.get(compute_v1.GetImageRequest(project=owner, image=name), **OPTIONS)

    try:
        _ask(project, f"image {path}", call)
    except GoneError:
        return False
    return True


def baked(project: str) -> list[Image]:
    """The images of the project that `make image` has baked, newest first. Blocking. Raises `CloudError`."""
    return _ask(project, "images", lambda clients: _baked(clients, project))


def remove(project: str, image: Image) -> None:
    """Delete an image, and wait a few seconds for the end of the deletion. Blocking.

    Raises `CloudError` if Google refuses the deletion within that time. A slower deletion continues at Google.
    """

    def call(clients: Clients) -> compute_v1.Operation:
        request = compute_v1.DeleteImageRequest(project=project, image=image.id)
        begun = clients.images.delete_unary(request, **OPTIONS)
        rest = compute_v1.WaitGlobalOperationRequest(project=project, operation=begun.name)
        return settle(begun, lambda **limit: clients.image_operations.wait(rest, **limit))

    what = f"image {image.name}"
    for error in _ask(project, what, call).error.errors:
        raise errors.refusal(what, error.code, error.message)


def _baked(clients: Clients, project: str) -> list[Image]:
    users: defaultdict[str, set[str]] = defaultdict(set)
    scopes = clients.templates.aggregated_list(
        compute_v1.AggregatedListInstanceTemplatesRequest(project=project), **OPTIONS
    )
    for template in (each for _, scope in scopes for each in scope.instance_templates):
        for disk in template.properties.disks:
            users[disk.initialize_params.source_image.rpartition("/")[2]].add(template.name)
    listed = clients.images.list(compute_v1.ListImagesRequest(project=project), **OPTIONS)
    found = [
        Image(
            name=each.name,
            id=each.name,
            made=datetime.fromisoformat(each.creation_timestamp).timestamp(),
            gigabytes=each.archive_size_bytes / 2**30,
            users=tuple(sorted(users[each.name])),
        )
        for each in listed
        if each.family == FAMILY
    ]
    return sorted(found, key=lambda image: image.made, reverse=True)


def _ask(project: str, what: str, call: Callable[[Clients], T]) -> T:
    async def ask() -> T:
        api = Api(project)
        try:
            return await api.ask(what, call)
        finally:
            await api.close()

    return asyncio.run(ask())
