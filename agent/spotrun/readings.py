"""What a node tells the head of its machine: a few numbers without names, because reports are frequent."""

from __future__ import annotations

from pydantic import Field

from spotrun.document import Document

NAMES = ("cpu", "memory", "memory_total", "tmpfs", "tmpfs_total", "net_in", "net_out")
OF_GPU = (
    *("use", "memory", "memory_total", "temperature", "power", "sm_clock", "memory_clock", "ecc", "throttle_bits"),
)


class Readings(Document):
    """The newest readings. Units: as in `node.telemetry`; NaN: not known. An agent of an older version sends none."""

    machine: tuple[float, ...] = Field(default=(), max_length=64)  # in the order of NAMES
    gpus: tuple[tuple[float, ...], ...] = Field(default=(), max_length=64)  # for each GPU, in the order of OF_GPU


NONE = Readings()
