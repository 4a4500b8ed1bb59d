"""The health gate: a task that checks this machine until it is fit, and gives the agent each result.

Meanwhile the agent connects to the head and watches for notices. It takes no job before the machine is fit. The bucket
has a record of the problems as long as there are any.
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
from spotrun.node.health.probe import Programs, probe_disk, probe_hardware
from spotrun.node.health.verdict import DISK, Facts, judge, remarks
from spotrun.spec import names
from spotrun.store import unfit_key
from spotrun.wire import UnfitRecord

log = logging.getLogger(__name__)

LONGEST = 240.0  # seconds for all tries of one check
PAUSES = (5.0, 10.0, 30.0)
"""Seconds between tries before a problem counts: drivers may still be starting. After fabric manager has started, CUDA
fails with error 802 until all GPUs are registered, which may take a minute
(https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/, "Checking Fabric Registration Status")."""
AGAIN = 30.0  # seconds between later checks, and between tries to remove the bucket's record

Probe = Callable[[float], Awaitable[Facts]]  # its argument: the time of the event loop by which it must return


class Gate:
    """The health gate of this machine. attributes: of its metadata."""

    def __init__(self, agent: Agent, settings: Settings, metadata: Metadata, attributes: Mapping[str, str]) -> None:
        self._agent, self._settings, self._metadata = agent, settings, metadata
        self._wanted = Facts(gpus=_count(attributes, names.GPUS), efas=_count(attributes, names.EFAS))
        self._programs = Programs()
        self._remarked: set[str] = set()
        self._key = unfit_key(agent.cluster, agent.identity.name)

    async def run(self) -> None:
        """Check this machine until it is fit and the bucket has no record of problems."""
        problems = await check(self._probe, PAUSES, LONGEST)
        self._agent.set_problems(problems)
        written: tuple[str, ...] = ()
        while problems:
            if written != problems:
                log.error("this machine takes no job: %s", "; ".join(problems))
                with contextlib.suppress(SpotrunError):
                    await asyncio.to_thread(self._write, problems)
                    written = problems
            await asyncio.sleep(AGAIN)
            problems = await check(self._probe, (), LONGEST)
            self._agent.set_problems(problems)
            if not problems:
                log.info("this machine is fit now")
        await self._forget()

    async def _probe(self, until: float) -> Facts:
        if self._metadata.ahead:  # chrony may have set the clock since: another answer compares the clocks again
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._metadata.identity()
        facts = replace(self._wanted, machine=self._agent.identity.type, clock=self._metadata.ahead)
        facts = await self._probe_disk(facts, until)
        facts = await probe_hardware(facts, self._agent.identity.address, self._programs, until)
        for remark in remarks(facts):
            if remark not in self._remarked:
                log.warning("%s", remark)
                self._remarked.add(remark)
        return facts

    async def _probe_disk(self, facts: Facts, until: float) -> Facts:
        """Add the disk's free space. If that is too little, remove what a killed agent has left, and look again."""
        facts = await probe_disk(facts, self._settings.scratch, until)
        if facts.disk is not None and facts.disk < DISK:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._agent.make_room)  # no time limit: it must not go on beside a job
            facts = await probe_disk(facts, self._settings.scratch, until)
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
        """Remove the record of this machine, or of an earlier machine of the same name."""
        while True:
            try:
                if await asyncio.to_thread(self._agent.store.exists, self._key):
                    await asyncio.to_thread(self._agent.store.delete, [self._key])
                return
            except SpotrunError as error:
                log.warning("the bucket may still say that this machine is unfit, trying again: %s", error)
            await asyncio.sleep(AGAIN)


async def check(probe: Probe, pauses: Sequence[float], longest: float) -> tuple[str, ...]:
    """This machine's problems after the last try. pauses: seconds between tries. longest: seconds for all tries."""
    now = asyncio.get_running_loop().time
    until = now() + longest
    problems = judge(await probe(until))
    for pause in pauses:
        if not problems or now() + pause >= until:
            break
        log.warning("not fit, looking again in %g s: %s", pause, "; ".join(problems))
        await asyncio.sleep(pause)
        problems = judge(await probe(until))
    return problems


def _count(attributes: Mapping[str, str], key: str) -> int:
    text = attributes.get(key, "")
    if re.fullmatch("[0-9]{1,3}", text):
        return int(text)
    if text:
        log.warning("the machine's metadata have %r as %s, which is not a whole number: ignored", text[:100], key)
    return 0
