"""Which machines the cloud was asked to replace, how often, and when it may be asked again. Pure.

Replacements are limited, because with a broken image every machine is unfit. They are counted for the whole cluster,
not for each job. The count is in the bucket, so that a new head continues it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spotrun.head.timeouts import TIMEOUTS
from spotrun.wire import Document

LIMIT = 3  # unfit machines of a pool that are replaced within `TIMEOUTS.replacement_window`


class Recreate(Document):
    """A request to the cloud: another machine in the place of this one."""

    node: str
    pool: str
    why: str = ""  # why the machine is unfit, or a job cannot be set up on it; empty: it served, and does not answer
    created: float = 0.0  # when the cloud made the machine: tells it from its successor of the same name
    planned: bool = False  # the machine is well, and its end is known

    @property
    def unfit(self) -> bool:
        """Whether the machine is unfit, or a job cannot be set up on it: such replacements are limited."""
        return bool(self.why) and not self.planned


class Replacement(Recreate):
    """A request that the cloud has got."""

    at: float  # when the cloud was last asked
    tries: int = 1  # how often the cloud was asked
    refused: str = ""  # why the last request failed; such a request does not count against the limit


Asked = tuple[Replacement, ...]


def ask(replaced: Asked, action: Recreate, now: float) -> Asked:
    """The record with one more request. Each machine has one entry; old entries are dropped."""
    before = _find(replaced, action)
    kept = (each for each in replaced if each is not before and now - each.at < TIMEOUTS.replacement_window)
    tries = before.tries + 1 if before else 1
    return (*kept, Replacement(at=now, tries=tries, **dict(action)))


def answered(replaced: Asked, action: Recreate, refusal: str, now: float) -> Asked:
    """The record after the cloud's answer. refusal: why it does not replace the machine; empty if it does.

    The time until the next request begins with the answer, which may take long.
    """
    return tuple(each.replace(refused=refusal, at=now) if _same(each, action) else each for each in replaced)


def forget(replaced: Asked, action: Recreate) -> Asked:
    """The record without a machine that serves again, or that is gone."""
    return tuple(each for each in replaced if not _same(each, action))


def may_ask(replaced: Asked, action: Recreate, now: float) -> bool:
    """Whether the pool is within its limit, and the cloud has had its time since the last request for this machine."""
    others = [each for each in counted(replaced, action.pool, now) if not _same(each, action)]
    if action.unfit and len(others) >= LIMIT:
        return False
    before = _find(replaced, action)
    return before is None or now - before.at >= min(TIMEOUTS.retry_most, TIMEOUTS.retry * 2 ** (before.tries - 1))


def counted(replaced: Asked, pool: str, now: float) -> list[Replacement]:
    """The replacements that count against the pool's limit, the oldest first."""
    recent = (each for each in replaced if each.pool == pool and now - each.at < TIMEOUTS.replacement_window)
    return [each for each in recent if each.unfit and not each.refused]


def exhausted(replaced: Asked, now: float) -> frozenset[str]:
    """Pools in which no more unfit machines are replaced for now."""
    return frozenset(pool for pool in {each.pool for each in replaced} if len(counted(replaced, pool, now)) >= LIMIT)


def refusal(replaced: Asked, action: Recreate) -> str:
    """Why the cloud did not replace this machine when it was last asked; empty if it did not refuse."""
    before = _find(replaced, action)
    return before.refused if before else ""


def _find(replaced: Sequence[Replacement], action: Recreate) -> Replacement | None:
    return next((each for each in replaced if _same(each, action)), None)


def _same(record: Replacement, action: Recreate) -> bool:
    """Whether both mean the same machine, not its successor of that name."""
    return (record.node, record.created) == (action.node, action.created)
