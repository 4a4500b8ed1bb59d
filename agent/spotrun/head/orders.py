"""From a job's state to orders for its agents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from spotrun.head.job_state import JobState
from spotrun.head.view import named
from spotrun.wire import Bundle, JobOrder, Member, SaveOrder


class JobOrders:
    """What each agent should be doing for one job. While an order is valid, its agent gets the same object."""

    def __init__(self, job: JobState, bundle: Bundle) -> None:
        self._job, self._bundle, self._keeper = job, bundle, job.keeper
        self._found: dict[tuple[str, str, tuple[int, ...] | None, bool], JobOrder] = {}

    def same(self, other: JobOrders) -> bool:
        """Whether the other orders say the same to each agent."""
        return self._essence == other._essence

    def of(self, node: str, boot: str, devices: tuple[int, ...] | None, fits: bool = True) -> JobOrder:
        """What the agent `node`, in its incarnation `boot`, should be doing.

        devices: those that the job has there, (): all; None: the job has none, or none any more. fits: whether the
        node's workers, if they wait, could join the next generation.
        """
        key = (node, boot, devices, fits)
        if key not in self._found:
            self._found[key] = self._order(*key)
        return self._found[key]

    @property
    def _essence(self) -> tuple[object, ...]:
        """All that orders depend on."""
        job = self._job
        kept = self._keeper, job.kept_node
        stand_by = job.regroups and job.wants_nodes
        told = job.draining, job.saving, job.released, job.dumping
        return self._bundle, job.current, job.generation, *told, stand_by, *kept

    def _order(self, node: str, boot: str, devices: tuple[int, ...] | None, fits: bool) -> JobOrder:
        job, save = self._job, self._save(node)
        stand_by = devices is not None and job.regroups and job.wants_nodes and fits
        order = JobOrder(bundle=self._bundle, devices=devices or (), stand_by=stand_by)
        if job.kept_node:
            return order.replace(devices=job.kept_node.member.devices)
        if job.current is None:
            if self._keeper and (self._keeper.node, self._keeper.boot) == (node, boot):
                order = order.replace(keep=job.generation)
            return order.replace(upload=job.saving.ref, save=save) if job.saving and save else order
        member, draining = self._members.get((node, boot)), job.draining
        if follows := next((each for each in named(job) if (node, boot) == (each.node, each.boot)), None):
            # Also if the job has lost the devices since then: its workers may have gone on, and others wait for them.
            order = order.replace(next=job.following, devices=follows.devices)
        if member is None:
            return order
        more = {
            "stop_at": draining.step if draining else None,
            "save": save,
            "release": job.released is not None,
            "dump": job.dumping,
        }
        return order.replace(stand_by=False, generation=job.current, devices=member.devices, **more)

    def _save(self, node: str) -> SaveOrder | None:
        saving, index = self._job.saving, self._places.get(node)
        if saving is None or index is None:
            return None
        return SaveOrder(step=saving.ref.step, index=index, parts=len(saving.holders))

    @cached_property
    def _members(self) -> Mapping[tuple[str, str], Member]:
        return {(member.node, member.boot): member for member in self._job.members}

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """The index of each part of the checkpoint that is being taken, by the node that uploads the part."""
        return {node: index for index, node in enumerate(self._job.saving.holders)} if self._job.saving else {}
