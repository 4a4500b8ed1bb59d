"""The head and the agents stay small: they share machines with what the machines are for."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.e2e.harness import Harness

MEGABYTE = 1 << 20


def processes(cluster: Harness, command: str) -> list[psutil.Process]:
    """Processes of this cluster that run `spotrun.cli <command>`."""
    mark = str(cluster.access.scratch)
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:] == ["-m", "spotrun.cli", command] and any(
                mark in value for value in process.environ().values()
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def libraries(process: psutil.Process) -> set[str]:
    return {Path(entry.path).name for entry in process.memory_maps(grouped=True)}


def assert_small(cluster: Harness, agents: int) -> None:
    """The head and so many agents take under 80 MB each, and no torch: it would be mapped."""
    (head,) = processes(cluster, "head")
    found = processes(cluster, "agent")
    assert len(found) == agents
    for process in (head, *found):
        assert process.memory_info().rss < 80 * MEGABYTE
        assert not {name for name in libraries(process) if "torch" in name}
