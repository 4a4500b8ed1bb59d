"""`make images`: lists the baked images with age and cost; `PRUNE=n` removes all but the newest n.

    python -m images.kept CLUSTER [--json] [--prune N]

An image in use is never removed. A cluster that is up uses the images of its templates and machines. A cluster file
uses the image that it names.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts import console, ctrl_c
from spotrun.cloud.base import Image
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, load_cluster

# Dollars for a GB and month: list prices of us-east-1 and us-central1 that nobody looked up (docs/images.md).
PRICE = {"aws": 0.05, "gcp": 0.05}
_DAY = 86400.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make images", allow_abbrev=False)
    parser.add_argument("cluster")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prune", type=number)
    try:
        words = parser.parse_args(argv)
        cluster = load_cluster(words.cluster)
        found = baked(cluster, words.cluster)
        if words.prune is not None:
            gone = prune(cluster, words.cluster, words.prune, found)
            found = [image for image in found if image not in gone]
        if words.json:
            console.answer([asdict(image) | {"monthly": price(cluster.cloud, image)} for image in found])
        else:
            console.say(table(cluster.cloud, found, time.time()))
    except SpotrunError as error:
        console.warn(f"spotrun: {error}")
        return 2
    except KeyboardInterrupt:
        console.warn("spotrun: interrupted")
        return ctrl_c.INTERRUPTED
    return 0


def number(text: str) -> int:
    """The number of images to keep, from the operator's text. Raises `SpotrunError`."""
    word = text.strip()
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise SpotrunError(f"PRUNE: {word!r}: how many of the newest images to keep; allowed: 1 and more")
    return int(word)


def baked(cluster: ClusterSpec, file: str) -> list[Image]:
    """The baked images in the cluster's project (Google Cloud) or region (AWS), newest first.

    Raises `SpotrunError`.
    """
    if cluster.cloud == "gcp":
        from spotrun.cloud.gcp import images as google

        return google.baked(cluster.project or "")
    if cluster.cloud == "aws":
        from spotrun.cloud.aws import images as amazon

        return amazon.baked(cluster.region)
    raise SpotrunError(f"{file}: cloud {cluster.cloud} has no images; name a cluster file of gcp or aws")


def prune(cluster: ClusterSpec, file: str, keep: int, found: Sequence[Image]) -> list[Image]:
    """Remove all but the newest images. Returns the removed ones, and reports on stderr. Raises `SpotrunError`."""
    named = names(Path(file))
    removed = surplus(found, keep, named)
    for image in found[keep:]:
        if image not in removed:
            console.warn(f"{image.name} stays: {', '.join(image.users) or 'a cluster file'} uses it")
    for image in removed:
        _remove(cluster, image)
        console.warn(f"{image.name} is removed: {price(cluster.cloud, image):.2f} dollars a month less")
    return removed


def surplus(found: Sequence[Image], keep: int, named: Collection[str]) -> list[Image]:
    """All but the newest `keep` and those in use. found: newest first. named: the images in cluster files. Pure."""
    return [each for each in found[keep:] if not each.users and each.name not in named and each.id not in named]


def names(file: Path) -> set[str]:
    """The images that this cluster file, and the files beside it, name. A file that cannot be read is an error.

    Raises `SpotrunError`.
    """
    files = {file, *file.parent.glob("*.yaml"), *file.parent.glob("*.yml")}
    images = [load_cluster(str(each)).image for each in sorted(files)]
    return {image.rpartition("/")[2] for image in images if image}


def price(cloud: str, image: Image) -> float:
    """Dollars a month."""
    return round(image.gigabytes * PRICE[cloud], 2)


def table(cloud: str, found: Iterable[Image], now: float) -> str:
    """The table for operators."""
    rows = [
        (image.name, f"{(now - image.made) / _DAY:.0f}", f"{image.gigabytes:.1f}", f"{price(cloud, image):.2f}", image)
        for image in found
    ]
    if not rows:
        return "no images"
    lines = [f"{'image':28}{'age, days':>10}{'GB':>8}{'$ a month':>11}  used by"]
    lines += [
        f"{name:28}{age:>10}{size:>8}{cost:>11}  {', '.join(image.users) or '-'}"
        for name, age, size, cost, image in rows
    ]
    total = sum(price(cloud, image) for *_, image in rows)
    return "\n".join([*lines, f"{len(rows)} images: {total:.2f} dollars a month"])


def _remove(cluster: ClusterSpec, image: Image) -> None:
    if cluster.cloud == "gcp":
        from spotrun.cloud.gcp import images as google

        google.remove(cluster.project or "", image)
        return
    from spotrun.cloud.aws import images as amazon

    amazon.remove(cluster.region, image)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
