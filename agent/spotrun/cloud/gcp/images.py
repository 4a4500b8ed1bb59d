"""Whether there is a machine image; asked by the operator before `make up` makes anything, never by a head."""

from __future__ import annotations

import asyncio
import re

from google.cloud import compute_v1

from spotrun.cloud.gcp.api import OPTIONS, Api, Clients
from spotrun.errors import GoneError

_PATH = re.compile(r"projects/([^/]+)/global/images/(family/)?([^/]+)")


def exists(project: str, path: str) -> bool:
    """Whether an image, or any of a family, is at projects/<project>/global/images/[family/]<name>.

    project: who asks. Blocking. Raises `CloudError`.
    """
    return asyncio.run(_exists(project, path))


async def _exists(project: str, path: str) -> bool:
    match = _PATH.fullmatch(path)
    assert match is not None, path  # the stacks' own checks
    owner, family, name = match.groups()

    def call(clients: Clients) -> compute_v1.Image:
        if family:
            request = compute_v1.GetFromFamilyImageRequest(project=owner, family=name)
            return clients.images.get_from_family(request, **OPTIONS)
        return clients.images.get(compute_v1.GetImageRequest(project=owner, image=name), **OPTIONS)

    api = Api(project)
    try:
        await api.ask(f"image {path}", call)
    except GoneError:
        return False
    finally:
        await api.close()
    return True
