"""Whether a connection comes from the node that it names. Pure: `AgentServer` does the I/O.

Two conditions must hold. The connection comes from the address that the cloud lists for that node. And it shows the
secret whose hash is in the node's own record in the bucket. A job's code on another node has another address. Another
user of the same computer does not know the secret.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spotrun.cloud.base import Instance
from spotrun.wire import hash_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Caller:
    """Who asks for a connection."""

    node: str  # the name that the caller gives
    secret: str  # the secret that the caller shows
    address: str  # where the connection comes from, as the kernel reports it


@dataclass(frozen=True)
class Refusal:
    """Why a connection is refused."""

    reason: str
    status: int  # HTTP status; 503: the head does not know yet, and the agent tries again
    refresh: Literal["", "machines", "record"] = ""  # what to read again, because that may change the answer


def decide(caller: Caller, listed: Sequence[Instance] | None, secret_hash: str | None) -> Refusal | None:
    """None if the caller may connect.

    listed: the cluster's machines, as the cloud listed them last; None: the cloud has not answered yet.
    secret_hash: the hash in the node's record; "": the bucket has no hash for this node; None: not read yet.
    """
    if not caller.node:
        return Refusal("the agent does not name its node: it is older than this head", 401)
    if not NAME.fullmatch(caller.node):
        return Refusal("the name that the agent gives is not a node's name", 401)
    if refusal := _check_address(caller, listed):
        return refusal
    if secret_hash is None:
        return Refusal("the node's record in the bucket has not been read yet", 503, "record")
    if not secret_hash:
        return Refusal("the bucket has no record with the node's secret", 401, "record")
    if not hmac.compare_digest(hash_of(caller.secret).encode(), secret_hash.encode()):
        return Refusal("wrong secret", 401, "record")
    return None


def _check_address(caller: Caller, listed: Sequence[Instance] | None) -> Refusal | None:
    if listed is None:
        return Refusal("the cloud has not listed its machines yet", 503, "machines")
    machines = [each for each in listed if each.name == caller.node]
    if not machines:
        return Refusal("the cloud lists no such machine in this cluster", 403, "machines")
    addresses = [each.address for each in machines if each.address]
    if caller.address.removeprefix("::ffff:") not in addresses:
        known = ", ".join(addresses) or "no address yet"
        return Refusal(f"the cloud lists {known} for this node", 403, "machines")
    return None
