"""Whether a connection comes from the node that it names. Pure: `head.door` does the I/O.

Two things must hold. The connection comes from the address that the cloud lists for that node. And it shows the secret
whose hash is in the node's own record in the bucket. A job's code on another node cannot meet the first condition.
Another user of the same computer cannot meet the second.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spotrun.cloud.base import Instance
from spotrun.wire import hash_of

Cure = Literal["", "look", "read"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Visitor:
    """What a connection claims, and where it comes from.

    node: the name that it gives. token: the secret that it shows. peer: its address, as the kernel reports it.
    """

    node: str
    token: str
    peer: str


@dataclass(frozen=True)
class Refusal:
    """Why a connection is not let in.

    reason: a text for people. status: the HTTP status; 503: the head does not know yet, and the agent tries again.
    cure: what may change the answer: list the machines of the cloud again, or read the node's record again.
    """

    reason: str
    status: int
    cure: Cure = ""


def decide(visitor: Visitor, listed: Sequence[Instance] | None, digest: str | None) -> Refusal | None:
    """None if the visitor is let in.

    listed: the machines of the cluster, as the cloud listed them last; None: the cloud has not answered yet.
    digest: `hash_of` the node's secret, from its record; "": the record has none; None: the record is not read yet.
    """
    if not visitor.node:
        return Refusal("it does not say which node it is: an agent older than this head does not", 401)
    if not NAME.fullmatch(visitor.node):
        return Refusal("what it gives as its node is no node's name", 401)
    if refusal := _place(visitor, listed):
        return refusal
    if digest is None:
        return Refusal("its record in the bucket has not been read yet", 503, "read")
    if not digest:
        return Refusal("the bucket has no record with its token", 401, "read")
    if not hmac.compare_digest(hash_of(visitor.token).encode(), digest.encode()):
        return Refusal("wrong token", 401, "read")
    return None


def _place(visitor: Visitor, listed: Sequence[Instance] | None) -> Refusal | None:
    if listed is None:
        return Refusal("the cloud has not told yet which machines there are", 503, "look")
    machines = [each for each in listed if each.name == visitor.node]
    if not machines:
        return Refusal("the cloud lists no such machine in this cluster", 403, "look")
    addresses = [each.address for each in machines if each.address]
    if visitor.peer.removeprefix("::ffff:") not in addresses:
        known = ", ".join(addresses) or "no address yet"
        return Refusal(f"the cloud lists {known} for it", 403, "look")
    return None
