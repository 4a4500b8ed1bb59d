"""What a node may do with the objects of its cluster's bucket, in words that both clouds' stacks translate. Pure.

A job's code runs on nodes, so a node has no more rights than a job needs. The keys are those of `spotrun.store`;
tests/test_rights.py holds these rights against what real agents do.
"""

from __future__ import annotations

from dataclasses import dataclass

CODE, DATA = "code/", "data/"  # bundles; what operators put there for jobs to read
JOBS = "jobs/"
CHECKPOINTS = "checkpoints"
GROWING = ("logs", "metrics", "system")  # of a job: objects that are replaced by longer ones
RECORDS = ("hosts", "unfit", "alive")  # of a cluster: an object for each machine, which replaces its own
FORGOTTEN = ("unfit", "alive")  # of these, a machine removes its own


@dataclass(frozen=True)
class Cluster:
    """The keys of one cluster. machine: how the names of all its nodes begin, and no head's."""

    name: str
    machine: str

    @property
    def head(self) -> str:
        """Where nodes find the head."""
        return f"clusters/{self.name}/head.json"

    def records(self, kind: str) -> str:
        """How the keys of the nodes' own records begin; the head's is none of them."""
        return f"clusters/{self.name}/{kind}/{self.machine}"
