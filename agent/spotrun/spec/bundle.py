"""What a code bundle may be at most. Operators pack within these limits, and nodes refuse what is beyond them."""

from __future__ import annotations

FILES = 50_000
BYTES = 256 << 20  # of all files together; code is smaller, data belongs into the bucket
# Of the archive: what files take that cannot be compressed, and a header for each.
PACKED = BYTES + FILES * 2048
