"""Workers that wake the agent: no wake is lost, and a script that does it without end takes little time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from spotrun.state import wakeup
from spotrun.state.wakeup import Wakeups, wake
from tests.helpers import await_for


async def test_a_worker_wakes_the_agent(tmp_path: Path) -> None:
    woken: list[float] = []
    wakeups = Wakeups(tmp_path / "control" / "wakeup", lambda: woken.append(0))
    code = f"from spotrun.state.wakeup import wake; wake({str(wakeups.path)!r})"
    assert (await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code])).returncode == 0
    await await_for(lambda: len(woken) == 1, what="the first wake")
    wake(str(wakeups.path))
    await await_for(lambda: len(woken) == 2, what="the second wake")
    wakeups.close()
    assert not wakeups.path.exists()


async def test_a_wake_during_the_pause_is_not_lost(tmp_path: Path) -> None:
    found: list[int] = []

    def woken() -> None:
        found.append(len(found))
        if len(found) < 5:
            wake(str(wakeups.path))

    wakeups = Wakeups(tmp_path / "wakeup", woken)
    wake(str(wakeups.path))
    await await_for(lambda: len(found) == 5, what="five wakes")
    wakeups.close()


async def test_a_script_that_wakes_without_end(tmp_path: Path) -> None:
    woken: list[float] = []
    wakeups = Wakeups(tmp_path / "wakeup", lambda: woken.append(0))
    handle = os.open(wakeups.path, os.O_WRONLY | os.O_NONBLOCK)
    loop = asyncio.get_running_loop()
    end = loop.time() + 20 * wakeup.PAUSE
    while loop.time() < end:
        try:
            os.write(handle, bytes(1 << 16))
        except BlockingIOError:
            await asyncio.sleep(0)
    os.close(handle)
    assert 1 <= len(woken) <= 21
    wakeups.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    """Before the agent listens, after its end, and where a script has put something else."""
    wake("")
    wake(str(tmp_path / "wakeup"))
    (tmp_path / "wakeup").write_text("of a script")
    wakeups = Wakeups(tmp_path / "wakeup", lambda: None)
    wakeups.close()
    wakeups.close()
    assert not (tmp_path / "wakeup").exists()
    wake(str(wakeups.path))
    os.mkfifo(tmp_path / "wakeup")
    wake(str(tmp_path / "wakeup"))
