"""The limits of a code bundle. Operators do not pack a larger bundle, and nodes refuse one."""

from __future__ import annotations

FILES = 50_000
BYTES = 256 << 20  # of all files together; code is smaller, and data belongs in the bucket
# Of the archive: files that cannot be compressed keep their size, and each file has a header.
PACKED = BYTES + FILES * 2048
