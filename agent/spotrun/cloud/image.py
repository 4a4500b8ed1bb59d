"""A machine image that `make image` has baked, as both clouds' `images` modules tell of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """One image, and what is stored for it."""

    # What it is called, spotrun-<date>-<time>.
    name: str
    # How the cloud's own calls name it: an AMI's id, on Google Cloud the name.
    id: str
    # When it was made, in epoch seconds.
    made: float
    # What is billed, in GB; on AWS the volume's size if the snapshot's own is not told.
    gigabytes: float
    # Ids of the snapshots that it consists of; Google's images have none.
    snapshots: tuple[str, ...] = ()
    # Names of the templates and machines of clusters that start from it.
    users: tuple[str, ...] = ()
