"""What a stack must know of machine types."""

from __future__ import annotations

import re

from spotrun.spec import efa
from spotrun.spec.efa import Interface

# Graviton, a g after the generation's digit, and Grace, a gb.
# https://docs.aws.amazon.com/ec2/latest/instancetypes/instance-type-names.html
_ARM = re.compile(r"(a1|[a-z]+\d+[a-z]*g[a-z]*|p\d+e?-gb\d+)\.")
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html#placement-groups-limitations-cluster
_APART = re.compile(r"(t\d[a-z]*|mac[a-z0-9-]+|vt1|[a-z]+\d+[a-z]*-flex|c1|m[1-3])\.")


def architecture(machine: str) -> str:
    """In the words that machine images have for it."""
    return "arm64" if _ARM.match(machine) else "x86_64"


def can_be_near(machine: str) -> bool:
    """Whether machines of that type can be in a cluster placement group."""
    return _APART.match(machine) is None


def interfaces(machine: str, with_efa: bool) -> tuple[Interface, ...]:
    return efa.interfaces(machine) if with_efa else (efa.PRIMARY,)
