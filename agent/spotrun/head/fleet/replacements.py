"""What the cloud is asked to do about single machines, so that no order to an agent waits for its answer.

What is to be asked is written into the bucket first (`clusters/<name>/replaced.json`): a head that is killed at any
point leaves one that counts on, and that asks again about a machine that is still there. Each call is a task of its
own; what came of it is an event that the next turn takes in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from spotrun.errors import SpotrunError
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet import repair
from spotrun.head.job_state import Recreate, Replacement
from spotrun.store import Store, replaced_key
from spotrun.wire import Kept

log = logging.getLogger(__name__)

AT_ONCE = 4  # calls; some clouds look at all their pools for each


class Record(Kept):
    """clusters/<name>/replaced.json. description: the cluster's then; with another, machines are made anew."""

    description: str
    machines: tuple[Replacement, ...] = ()


class Replacements:
    """One cluster's. recreate: asks the cloud. still: whether a call is wanted yet. wake: called when an answer came.

    Between a decision and its call the bucket may be away, or other calls take their time: meanwhile the machine may
    have become fit and a member, or have a successor of its name.
    """

    def __init__(
        self,
        cluster: str,
        description: str,
        store: Store,
        recreate: Callable[[str], Awaitable[None]],
        still: Callable[[Recreate], bool],
        wake: Callable[[], None],
    ) -> None:
        self.replaced: tuple[Replacement, ...] = ()
        self._key, self._description, self._fenced = replaced_key(cluster), description, FencedStore(store)
        self._recreate, self._still, self._wake = recreate, still, wake
        self._written: tuple[Replacement, ...] | None = None  # None: not read yet
        self._waiting: list[Recreate] = []
        self._asking: dict[asyncio.Task[str | None], Recreate] = {}
        self._before: dict[Recreate, Replacement | None] = {}  # what was on record of a machine until it was wanted
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def read(self) -> None:
        """What earlier heads have asked; from the bucket the first time. Raises `StoreError`."""
        if self._written is None:
            self._written = self.replaced = self._parsed(await self._fenced.find(self._key))

    def want(self, action: Recreate, now: float) -> None:
        """Note what is to be asked; `begin` asks."""
        if action.node in {each.node for each in (*self._waiting, *self._asking.values())}:
            return  # no answer yet
        self._before[action] = repair.on_record(self.replaced, action)
        self.replaced = repair.asked(self.replaced, action, now)
        self._waiting.append(action)

    @property
    def pending(self) -> bool:
        """Whether there is something to write or to ask."""
        return bool(self._waiting) or (self._written is not None and self.replaced != self._written)

    async def begin(self) -> None:
        """Write down what is new, then ask. Raises `StoreError`; then nothing was asked, and the next call will."""
        for action in [each for each in self._waiting if not self._still(each)]:
            self._waiting.remove(action)
            self._undo(action)
        if self.replaced != self._written:
            replaced = self.replaced
            record = Record(description=self._description, machines=replaced)
            await self._fenced.put(self._key, record.model_dump_json().encode())
            self._written = replaced
        for action in self._waiting:
            task = asyncio.create_task(self._ask(action), name=f"recreate {action.node}")
            self._asking[task] = action
            task.add_done_callback(lambda _: self._wake())
        self._waiting.clear()

    def answers(self) -> list[str]:
        """What came of calls since the last time, a line each."""
        lines = []
        for task in [task for task in self._asking if task.done()]:
            action, refusal = self._asking.pop(task), task.result()
            if refusal is None:
                self._undo(action)
                continue
            del self._before[action]
            what = f"{action.node}: {action.why or 'does not answer'}"
            if refusal:
                self.replaced = repair.refused(self.replaced, action, refusal)
                lines.append(f"{what}: the cloud does not put another in its place: {refusal}")
            else:
                lines.append(f"{what}: asked the cloud for another in its place")
        return lines

    async def answered(self) -> None:
        """Wait until every call that was begun has its answer."""
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def close(self) -> None:
        """End the calls under way: the next head asks again about machines that are still there."""
        for task in self._asking:
            task.cancel()
        await self.answered()
        self._asking.clear()

    async def _ask(self, action: Recreate) -> str | None:
        """ "" or the cloud's refusal; None if it was not asked, as that was not wanted any more."""
        try:
            async with self._at_once:
                if not self._still(action):
                    return None
                await self._recreate(action.node)
        except SpotrunError as error:
            return str(error)
        except Exception as error:
            # What a cloud's library lets through would end this head, and the next one at the same call.
            log.exception("recreate %s", action.node)
            return f"{type(error).__name__}: {error}"
        return ""

    def _undo(self, action: Recreate) -> None:
        """The cloud was not asked: that does not count."""
        log.info("%s: is not to be replaced any more", action.node)
        self.replaced = repair.undone(self.replaced, action, self._before.pop(action))

    def _parsed(self, data: bytes | None) -> tuple[Replacement, ...]:
        if data is None:
            return ()
        try:
            record = Record.model_validate_json(data)
        except ValueError as error:
            log.warning("%s is not readable, counting begins anew: %s", self._key, str(error).partition("\n")[0])
            return ()
        return record.machines if record.description == self._description else ()
