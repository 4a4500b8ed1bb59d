"""Two images, one for each cloud, baked once for all tests. This takes minutes: `make test-image`, not `make test`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image import baked
from tests.image.root import Root, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))


@dataclass(frozen=True)
class Image:
    """root: as it is at the end. first, second: what the scripts said at the first and at the second time.

    pending: what apt would still have upgraded after 10-packages.sh, by the lists of that moment. Debian may publish
    an update at any time after it, also while the tests run.
    """

    cloud: str
    root: Root
    first: str
    second: str
    pending: str


@pytest.fixture(scope="session")
def supplies(tmp_path_factory: pytest.TempPathFactory) -> baked.Supplies:
    lacking = missing()
    if lacking:
        pytest.skip(f"an image cannot be baked here without: {', '.join(lacking)}")
    try:
        return baked.prepare(tmp_path_factory.mktemp("image") / "supplies")
    except OSError as error:
        pytest.skip(f"an image cannot be baked here: {error}")


@pytest.fixture(scope="session")
def _base(supplies: baked.Supplies) -> Iterator[Image]:
    """Debian with what the first scripts bring, which is the same for both clouds. It is copied, and stays as it is."""
    root = Root(supplies.folder.parent / "base")
    root.folder.mkdir()
    try:
        root.bootstrap()
        baked.upload(root, supplies)
        first, second = (baked.provision(root, supplies, "gcp", 10, 11) for _ in range(2))
        pending = root.run("apt-get", "-q", "--simulate", "upgrade", timeout=baked.PATIENCE).stdout
        yield Image("gcp", root, first, second, pending)
    finally:
        shutil.rmtree(root.folder)


@pytest.fixture(scope="session", params=["gcp", "aws"])
def unclean(request: pytest.FixtureRequest, supplies: baked.Supplies, _base: Image) -> Iterator[Image]:
    """An image before its last script, on a machine that has been used a little."""
    cloud = str(request.param)
    root = _base.root.copy(supplies.folder.parent / cloud)
    try:
        first = _base.first + baked.provision(root, supplies, cloud, 20, 90)
        second = _base.second + baked.provision(root, supplies, cloud, 20, 90)
        yield Image(cloud, root, first, second, _base.pending)
    finally:
        shutil.rmtree(root.folder)


@pytest.fixture(scope="session")
def image(unclean: Image, supplies: baked.Supplies) -> Image:
    """The image that machines start from."""
    for path in baked.TRACES:
        target = unclean.root.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("of the machine that the image was made on")
    for _ in range(2):
        baked.provision(unclean.root, supplies, unclean.cloud, 99, 99)
    return unclean
