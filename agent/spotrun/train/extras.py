"""Texts, images and histograms that a script logs, in the form in which they are kept."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spotrun.state.points import Extra

TEXT = 64 << 10  # characters of a text; a longer one is cut
SIDE = 1024  # pixels of an image's longer side
BINS = 64  # of a histogram
VALUES = 10_000_000  # of a histogram

Array = npt.NDArray[Any]


def prepare(extra: Extra, value: Any) -> Array | None:
    """Take a value as it is now. Returns the array that `complete` needs. The value's own code may raise anything."""
    if extra.kind == "text":
        extra.text = str(value)[:TEXT].encode(errors="replace").decode()
        return None
    array = to_array(value)
    if extra.kind == "image":
        check_image(array)
    elif array.size > VALUES:
        raise ValueError(f"has {array.size} values; at most {VALUES} are allowed")
    return array


def complete(extra: Extra, array: Array | None) -> None:
    """Fill in what takes longer. May raise any exception."""
    if array is not None and extra.kind == "image":
        extra.text = base64.b64encode(png(array)).decode()
    elif array is not None:
        extra.edges, extra.counts = histogram(array)


def to_array(value: Any) -> Array:
    """A copy of an array or tensor, in the host's memory. May raise any exception if the value is something else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().float().numpy().copy() if value.is_floating_point() else value.cpu().numpy().copy()
    return np.array(value)


def check_image(image: Array) -> None:
    """Raise `ValueError` unless the array is a small image: uint8, height x width, or height x width x 3."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ValueError(f"has type {image.dtype} and shape {image.shape}; allowed: uint8, and (h, w) or (h, w, 3)")
    if not 0 < max(image.shape[:2]) <= SIDE or min(image.shape[:2]) < 1:
        raise ValueError(f"has {image.shape[1]} x {image.shape[0]} pixels; allowed: 1 to {SIDE} on each side")


def png(image: Array) -> bytes:
    """The image as a PNG file (https://www.w3.org/TR/png-3/)."""
    height, width = image.shape[:2]
    colours = 2 if image.ndim == 3 else 0  # the format's numbers for RGB and for grey
    rows = np.zeros((height, 1 + image[0].size), np.uint8)  # each row begins with its filter's number; 0: no filter
    rows[:, 1:] = image.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def histogram(values: Array) -> tuple[list[float], list[int]]:
    """Edges of the bins, and how many values each bin has. NaN and infinities are not counted."""
    finite = values.astype(np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return [], []
    counts, edges = np.histogram(finite, bins=BINS)
    return [float(edge) for edge in edges], [int(count) for count in counts]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
