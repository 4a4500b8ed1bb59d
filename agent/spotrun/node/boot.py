"""Start the agent: read from the metadata which machine this is, then run all tasks of the agent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
from dataclasses import replace

import aiohttp

from spotrun.machine import private_paths
from spotrun.machine.metadata import Identity, Metadata, detect
from spotrun.machine.systemd import Systemd
from spotrun.node import cleanup
from spotrun.node.agent import Agent, Settings
from spotrun.node.health.gate import Gate
from spotrun.node.life_sign import LifeSign
from spotrun.node.notice import Terms, watch
from spotrun.node.telemetry.recorder import Recorder
from spotrun.node.telemetry.sensors import Sensors
from spotrun.spec import names
from spotrun.store import Store

log = logging.getLogger(__name__)

RETRY = 2.0  # seconds between tries to read the metadata
THREADS = 128  # a job whose bucket or disk hangs keeps a few threads, and no other job may wait for one


async def run() -> None:
    """Run this machine's agent until SIGTERM or SIGINT, which end everything it has started."""
    stop = asyncio.Event()
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(THREADS))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    systemd = Systemd.from_env()
    watching = asyncio.create_task(systemd.watch())
    life = asyncio.create_task(_live(Settings.from_env(), systemd))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([life, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    systemd.stopping()
    if not life.done():
        life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await life
    watching.cancel()


async def _live(settings: Settings, systemd: Systemd) -> None:
    systemd.status("asking the cloud's metadata server who this is")
    async with await detect() as metadata:
        identity, attributes = await _identify(metadata)
        identity = replace(identity, name=settings.name or identity.name)
        bucket = attributes[names.BUCKET]
        if bucket.startswith("s3://"):
            os.environ.setdefault("AWS_REGION", identity.region)  # for the bucket, and for AWS's libraries in a job
        store = await asyncio.to_thread(Store, bucket)
        with contextlib.suppress(OSError):  # the health gate reports what is wrong with the disk
            await asyncio.to_thread(cleanup.remove_halves, settings.scratch)
        private_paths.make_folder(settings.tmpfs)
        agent = Agent(settings, identity, attributes, store, systemd)
        gate, life_sign = Gate(agent, settings, metadata, attributes), LifeSign(agent)
        recorder = Recorder(agent, Sensors(settings.tmpfs, settings.scratch))
        systemd.status(f"connecting to the head of {agent.cluster}, and checking whether this machine is fit")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(gate.run())
                tasks.create_task(watch(metadata, agent.notify, Terms.of(attributes), agent.expect))
                tasks.create_task(agent.connection.run())
                tasks.create_task(life_sign.run())
                tasks.create_task(recorder.run())
                tasks.create_task(agent.run())
        finally:
            await agent.end()
            await asyncio.gather(life_sign.end(), recorder.end())


async def _identify(metadata: Metadata) -> tuple[Identity, dict[str, str]]:
    needed = (names.CLUSTER, names.BUCKET, names.POOL)
    optional = (names.GPUS, names.EFAS, names.PREEMPT_NOTICE, names.MAINTENANCE_NOTICE)
    while True:
        try:
            identity = await metadata.identity()
            found = {key: await metadata.attribute(key) or "" for key in (*needed, *optional)}
            missing = [key for key in needed if not found[key]]
            if not missing:
                return identity, found
            log.warning("the machine's metadata has no %s; trying again", ", ".join(missing))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("metadata: no usable answer, trying again: %r", error)
        await asyncio.sleep(RETRY)
