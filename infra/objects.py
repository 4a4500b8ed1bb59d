"""What a node may do with the objects of its cluster's bucket, in a form that both clouds' stacks translate. Pure.

A job's code runs on nodes, so a node has no more rights than a job needs. tests/infra/test_rights.py runs real agents
under these rights.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotrun.store import keys

GROWING = (keys.LOGS, keys.METRICS, keys.SYSTEM)  # of a job: a node replaces these objects by longer versions
# Of a cluster: for each machine an object, which the machine itself replaces.
_RECORDS = {"hosts": keys.host_key, "unfit": keys.unfit_key, "alive": keys.alive_key}
RECORDS = tuple(_RECORDS)
FORGOTTEN = ("unfit", "alive")  # records that a machine also removes


@dataclass(frozen=True)
class Cluster:
    """The keys of one cluster."""

    name: str  # the cluster's name
    machine: str  # How the names of all nodes begin. The head's name begins in another way.

    @property
    def head(self) -> str:
        """Where nodes find the head."""
        return keys.head_key(self.name)

    def records(self, kind: str) -> str:
        """How the keys of the nodes' records begin. The head's record has another key."""
        return _RECORDS[kind](self.name, self.machine).removesuffix(".json")
