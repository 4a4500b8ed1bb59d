"""A machine image that `make image` baked, as the `images` modules of both clouds describe it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """One image, and what is stored for it."""

    name: str  # spotrun-<date>-<time>
    id: str  # what the cloud's calls take: an AMI's id, on Google Cloud the name
    made: float  # epoch seconds
    gigabytes: float  # What is billed. On AWS, the volume's size if the size of the snapshot is unknown.
    snapshots: tuple[str, ...] = ()  # Ids of its snapshots. Google's images have none.
    users: tuple[str, ...] = ()  # names of the templates and machines that start from it
