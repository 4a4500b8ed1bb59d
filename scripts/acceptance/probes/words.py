"""What probes print: lines of JSON that `make acceptance` reads in the job's log."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

# What Google's server says of a machine's end: https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys
_NOTICES = ("preempted", "maintenance-event")
_SERVER = "http://metadata.google.internal/computeMetadata/v1/instance/"
_EVERY = 0.2  # seconds


def tell(probe: str, **facts: Any) -> None:
    """Print a line. A NaN becomes null: JSON has none."""
    known = {key: None if isinstance(value, float) and value != value else value for key, value in facts.items()}
    print(json.dumps({"probe": probe, **known}), flush=True)


def transport(log: str) -> str:
    """What NCCL goes over between machines, by the file of its debug output; empty if that does not say.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    try:
        with open(log, errors="replace") as file:
            lines = [line.partition("Using network ")[2].strip() for line in file if "Using network " in line]
    except OSError:
        return ""
    return lines[-1] if lines else ""


def watch_metadata() -> None:
    """Print each change of a notice, with its time. Never returns."""
    seen: dict[str, str] = {}
    while True:
        for name in _NOTICES:
            request = urllib.request.Request(_SERVER + name, headers={"Metadata-Flavor": "Google"})
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    text = answer.read(100).decode(errors="replace")
            except OSError:
                continue
            if seen.setdefault(name, text) != text:
                seen[name] = text
                tell("notice", key=name, value=text, at=time.time())
        time.sleep(_EVERY)
