"""The health gate: one task that finds out whether this machine is fit, tells its agent, and goes on until it is.

The agent has connected meanwhile and watches for notices. It takes no job before the gate has passed. While something
is wrong, the bucket says what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import aiohttp

from spotrun.errors import SpotrunError
from spotrun.machine.metadata import Metadata
from spotrun.node.agent import Agent, Settings
from spotrun.node.health.probe import Programs, ask_disk, ask_hardware
from spotrun.node.health.verdict import DISK, Facts, judge, remarks
from spotrun.spec import names
from spotrun.store import unfit_key
from spotrun.wire import UnfitRecord

log = logging.getLogger(__name__)

LONGEST = 240.0  # seconds that all tries together may take before the verdict
PAUSES = (5.0, 10.0)  # seconds between tries before a problem counts: what starts beside the agent may need a moment
AGAIN = 30.0  # seconds between tries from then on, and between tries to have the bucket right

Look = Callable[[float], Awaitable[Facts]]  # takes the time of the event loop by which there must be an answer


class Gate:
    """What it looks at is this machine, with what its metadata say that it must have."""

    def __init__(self, agent: Agent, settings: Settings, metadata: Metadata, attributes: Mapping[str, str]) -> None:
        self._agent, self._settings, self._metadata = agent, settings, metadata
        self._wanted = Facts(gpus=_whole(attributes, names.GPUS), efas=_whole(attributes, names.EFAS))
        self._programs = Programs()
        self._remarked: set[str] = set()
        self._key = unfit_key(agent.cluster, agent.identity.name)

    async def run(self) -> None:
        """Until this machine is fit, and nothing in the bucket says otherwise. It may be replaced before that."""
        problems = await check(self._look, PAUSES, LONGEST)
        self._agent.set_problems(problems)
        written: tuple[str, ...] = ()
        while problems:
            if written != problems:
                log.error("this machine takes no job: %s", "; ".join(problems))
                with contextlib.suppress(SpotrunError):
                    await asyncio.to_thread(self._write, problems)
                    written = problems
            await asyncio.sleep(AGAIN)
            problems = await check(self._look, (), LONGEST)
            self._agent.set_problems(problems)
            if not problems:
                log.info("this machine is fit now")
        await self._forget()

    async def _look(self, until: float) -> Facts:
        if self._metadata.ahead:  # chrony may have set the clock since
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._metadata.identity()
        facts = replace(self._wanted, machine=self._agent.identity.type, clock=self._metadata.ahead)
        facts = await self._look_at_disk(facts, until)
        facts = await ask_hardware(facts, self._agent.identity.address, self._programs, until)
        for remark in remarks(facts):
            if remark not in self._remarked:
                log.warning("%s", remark)
                self._remarked.add(remark)
        return facts

    async def _look_at_disk(self, facts: Facts, until: float) -> Facts:
        """What a killed agent has left must not make its machine unfit; a job that comes again finds its files.

        The removing has no end but its own: it must not go on beside a job.
        """
        scratch = self._settings.scratch
        facts = await ask_disk(facts, scratch, until)
        if facts.disk is not None and facts.disk < DISK:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._agent.make_room)
            facts = await ask_disk(facts, scratch, until)
        return facts

    def _write(self, problems: tuple[str, ...]) -> None:
        agent, identity = self._agent, self._agent.identity
        record = UnfitRecord(
            node=identity.name,
            boot=agent.boot,
            pool=agent.pool,
            zone=identity.zone,
            type=identity.type,
            machine=identity.machine,
            at=time.time(),
            problems=problems,
        )
        agent.store.put(self._key, record.model_dump_json().encode())

    async def _forget(self) -> None:
        """Remove what this machine, or one before it of the same name, has written."""
        while True:
            try:
                if await asyncio.to_thread(self._agent.store.exists, self._key):
                    await asyncio.to_thread(self._agent.store.delete, [self._key])
                return
            except SpotrunError as error:
                log.warning("the bucket may still say that this machine is unfit, trying again: %s", error)
            await asyncio.sleep(AGAIN)


async def check(look: Look, pauses: Sequence[float], longest: float) -> tuple[str, ...]:
    """What is wrong with this machine, and still is after some tries, with pauses in between.

    pauses, longest: seconds; the latter for all of it.
    """
    now = asyncio.get_running_loop().time
    until = now() + longest
    problems = judge(await look(until))
    for pause in pauses:
        if not problems or now() + pause >= until:
            break
        log.warning("not fit, looking again in %g s: %s", pause, "; ".join(problems))
        await asyncio.sleep(pause)
        problems = judge(await look(until))
    return problems


def _whole(attributes: Mapping[str, str], key: str) -> int:
    text = attributes.get(key, "")
    if re.fullmatch("[0-9]{1,3}", text):
        return int(text)
    if text:
        log.warning("the machine's metadata have %r as %s, which is no whole number: ignored", text[:100], key)
    return 0
