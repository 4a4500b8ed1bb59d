"""Checks this machine as the health gate does, from within a job."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from words import tell

from spotrun.machine.metadata import Identity, detect
from spotrun.node.health import probe, verdict
from spotrun.spec import names

_LONGEST = 240.0  # seconds for everything
_SERVER = 5.0  # seconds for the metadata server: a job of the local cloud may not be told where it is


def print_facts() -> None:
    """Print what the gate would find, and what it would object to."""
    facts = asyncio.run(_look())
    smi = [f"{gpu.name}: {gpu.ecc_errors} memory errors" for gpu in facts.smi]
    tell(
        "fitness",
        machine=facts.machine,
        problems=list(verdict.judge(facts)),
        remarks=list(verdict.remarks(facts)),
        disk=facts.disk,
        clock=facts.clock,
        gpus=len(facts.smi),
        gpus_wanted=verdict.wanted_gpus(facts),
        smi=smi,
        torch_gpus=facts.torch_gpus,
        efas=facts.fabric,
        efas_wanted=verdict.wanted_efas(facts),
    )


async def _look() -> verdict.Facts:
    until = asyncio.get_running_loop().time() + _LONGEST
    facts, address = verdict.Facts(), "127.0.0.1"
    try:
        async with asyncio.timeout(_SERVER), await detect() as metadata:
            identity: Identity = await metadata.identity()
            gpus, efas = await metadata.attribute(names.GPUS), await metadata.attribute(names.EFAS)
            address, clock = identity.address, metadata.ahead
            facts = replace(facts, machine=identity.type, gpus=_whole(gpus), efas=_whole(efas), clock=clock)
    except (OSError, TimeoutError):
        tell("fitness metadata", problem="no metadata server answers a job here")
    facts = await probe.probe_disk(facts, Path(os.getcwd()), until)
    return await probe.probe_hardware(facts, address, probe.Programs(), until)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
