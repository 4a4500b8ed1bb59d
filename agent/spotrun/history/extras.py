"""The texts, images and histograms that a job has logged, read from the bucket."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spotrun.errors import NotFound, TooLargeError, UnreadableError
from spotrun.history.curves import limits
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
    headers = read_headers(store, job)
    bounds, found = limits(headers.values()), list[Found]()
    for key in store.list(metrics_folder(job)):
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        try:
            block = points.read_extras(store.get(key, LARGEST), key)
        except (UnreadableError, TooLargeError, NotFound):
            continue
        limit = bounds.get(int(match[1]))
        for each in block.calls:
            if name in (None, each.name):
                found.append(Found(int(match[1]), each, limit is not None and points.place(each) >= limit))
    return found
