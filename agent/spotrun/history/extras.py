"""The texts, images and histograms that a job has logged, read from the bucket."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotrun.errors import NotFound, TooLargeError, UnreadableError
from spotrun.history.curves import Place, limits
from spotrun.history.reader import LARGEST, read_headers
from spotrun.state import points
from spotrun.state.points import EXTRAS, Extra
from spotrun.store import Store, metrics_folder

_KEY = re.compile(rf".*/metrics/([0-9]{{4,9}})/{EXTRAS}/[0-9]{{6,12}}\.jsonl\.zst")


@dataclass(frozen=True)
class Found:
    """A text, image or histogram. void: as in `history.curves`."""

    generation: int
    extra: Extra
    void: bool


def read_extras(store: Store, job: str, name: str | None = None) -> list[Found]:
    """All texts, images and histograms of a job, in the order in which they were logged. name: only those of this name.

    Blocks that cannot be read are left out. Raises `StoreError`.
    """
    bounds, found = limits(read_headers(store, job).values()), list[Found]()
    for key in keys(store.list(metrics_folder(job))):
        found += marked(key, read_block(store, key), bounds)
    return [each for each in found if name in (None, each.extra.name)]


def keys(listed: Iterable[str]) -> list[str]:
    """The keys of blocks of texts, images and histograms among those of a job's metrics; the oldest block first."""
    return sorted(key for key in listed if _KEY.fullmatch(key))


def read_block(store: Store, key: str) -> list[Extra]:
    """What a block has; nothing if the block cannot be read. Raises `StoreError`."""
    try:
        return points.read_extras(store.get(key, LARGEST), key).calls
    except (UnreadableError, TooLargeError, NotFound):
        return []


def marked(key: str, calls: Iterable[Extra], bounds: Mapping[int, Place | None]) -> list[Found]:
    """What a block has, with what is void. bounds: as `history.curves.limits` returns them."""
    match = _KEY.fullmatch(key)
    generation = int(match[1]) if match else 0
    limit = bounds.get(generation)
    return [Found(generation, each, limit is not None and points.place(each) >= limit) for each in calls]
