"""The smallest cluster files, and what a wrong file is refused with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spotrun.errors import SpecError

CLUSTER = "name: a\ncloud: local\npools:\n- {name: p, zone: local-a, max: 2}\n"
GCP = (
    "name: a\ncloud: gcp\nregion: us-central1\nproject: my-project\n"
    "pools:\n- {name: p, zone: us-central1-b, machine: g2-standard-8}\n"
)
AWS = "name: a\ncloud: aws\nregion: us-east-1\npools:\n- {name: p, zone: us-east-1b, machine: g5.2xlarge}\n"
LABEL = "lower-case letters, digits and single inner hyphens, a letter first, at most 20 characters"


def refusal(load: Callable[[Path], object], path: Path) -> list[str]:
    """The lines of the message that refuses the file."""
    with pytest.raises(SpecError) as caught:
        load(path)
    return str(caught.value).splitlines()
