"""Asks the cloud to replace machines, so that no order to an agent waits for its answer.

Each turn says which machines should be replaced now. A request is written to the bucket first, so the next head
continues the count, and asks again for a machine that is still there. Each request is a task of its own. Its answer
becomes an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import Field

from spotrun.errors import SpotrunError
from spotrun.head.fenced import FencedStore
from spotrun.head.fleet.record import Asked, Recreate, Replacement, answered, ask, forget
from spotrun.store import Store, replaced_key
from spotrun.wire import Kept

log = logging.getLogger(__name__)


class Record(Kept):
    """clusters/<name>/replaced.json."""

    description: str
    """Digest of the cluster's description. Another description makes other machines, so the count starts again."""
    machines: tuple[Replacement, ...] = ()
    joined: dict[str, float] = Field(default={})  # machines whose agents have joined: when each was made


class Replacements:
    """The requests of one cluster."""

    def __init__(
        self,
        cluster: str,
        description: str,
        store: Store,
        recreate: Callable[[str], Awaitable[None]],
        still: Callable[[Recreate], bool],
        wake: Callable[[], None],
    ) -> None:
        """recreate: asks the cloud. still: whether a machine should still be replaced. wake: an answer came."""
        self.replaced: Asked = ()
        self.joined: Mapping[str, float] = {}
        self.at_once = 4  # requests; some clouds look at all their pools for each
        self._key, self._description, self._fenced = replaced_key(cluster), description, FencedStore(store)
        self._recreate, self._still, self._wake = recreate, still, wake
        self._written: Record | None = None  # None: not read yet
        self._asking: dict[asyncio.Task[str | None], Recreate] = {}

    async def read(self, now: float) -> None:
        """What earlier heads have asked; from the bucket the first time. Raises `StoreError`.

        If the clock of the last head was ahead of this head's clock, times after `now` become `now`.
        """
        if self._written is None:
            self._written = self._parsed(await self._fenced.find(self._key))
            self.replaced = tuple(each.replace(at=min(each.at, now)) for each in self._written.machines)
            self.joined = self._written.joined

    def pending(self, wanted: Sequence[Recreate]) -> bool:
        """Whether there is something to write or to ask."""
        return bool(self._free(wanted)) or self._written != self._record(self.replaced)

    async def begin(self, wanted: Sequence[Recreate], now: float) -> None:
        """Write the requests down, then ask. Raises `StoreError`; then nothing was asked or counted."""
        actions, replaced = self._free(wanted), self.replaced
        for action in actions:
            replaced = ask(replaced, action, now)
        record = self._record(replaced)
        await self._fenced.put(self._key, record.model_dump_json().encode())
        self.replaced, self._written = replaced, record
        for action in actions:
            task = asyncio.create_task(self._ask(action), name=f"recreate {action.node}")
            self._asking[task] = action
            task.add_done_callback(lambda _: self._wake())

    def answers(self, now: float) -> list[str]:
        """A line about each request that has got its answer since the last call."""
        lines = []
        for task in [task for task in self._asking if task.done()]:
            action, refusal = self._asking.pop(task), task.result()
            if refusal is None:
                self.replaced = forget(self.replaced, action)
                lines.append(f"{action.node}: needs no replacement any more; the cloud was not asked")
                continue
            what = f"{action.node}: {action.why or 'does not answer'}"
            self.replaced = answered(self.replaced, action, refusal, now)
            if refusal:
                lines.append(f"{what}: the cloud does not replace it: {refusal}")
            else:
                lines.append(f"{what}: asked the cloud to replace it")
        return lines

    async def answered(self) -> None:
        """Wait until every request has its answer."""
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def close(self) -> None:
        """End the requests under way: the next head asks again for machines that are still there."""
        for task in self._asking:
            task.cancel()
        await self.answered()
        self._asking.clear()

    def _free(self, wanted: Sequence[Recreate]) -> list[Recreate]:
        """The requests that can be made now. The others are due again in a later turn."""
        asked = {each.node for each in self._asking.values()}
        return [each for each in wanted if each.node not in asked][: max(0, self.at_once - len(asked))]

    async def _ask(self, action: Recreate) -> str | None:
        """Empty, or why the cloud does not replace the machine. None if it was not asked."""
        try:
            if not self._still(action):  # the write to the bucket may have taken long
                return None
            await self._recreate(action.node)
        except SpotrunError as error:
            return str(error)
        except Exception as error:
            # An error from a cloud's library would end this head, and the next one at the same request.
            log.exception("recreate %s", action.node)
            return f"{type(error).__name__}: {error}"
        return ""

    def _record(self, replaced: Asked) -> Record:
        return Record(description=self._description, machines=replaced, joined=dict(self.joined))

    def _parsed(self, data: bytes | None) -> Record:
        empty = Record(description=self._description)
        if data is None:
            return empty
        try:
            record = Record.model_validate_json(data)
        except ValueError as error:
            log.warning("%s is not readable, the count starts at 0: %s", self._key, str(error).partition("\n")[0])
            return empty
        return record if record.description == self._description else empty.replace(joined=record.joined)
